#!/usr/bin/env bash
# Trains on hosts that are reached by ssh. Copy it, set the lines with <-, and
#
#   bash ssh.sh start      a launcher on each host; it stays when you log out
#   bash ssh.sh status
#   bash ssh.sh stop       saves, then ends
#
# Each host needs elastictrain in the same folder, with .venv in it. docs/clusters.md explains it.
set -euo pipefail

hosts=(10.0.0.1 10.0.0.2 10.0.0.3)      # <- names or addresses by which the hosts reach each other, too
folder=elastictrain                     # <- on each host, from the home folder

run=(
    recipe=llama_fsdp
    run.dir=s3://bucket/llama       # <- or a folder that all hosts see
    data.path=s3://bucket/tokens    # <-
    launch.min_hosts=1
    fault.notice_s=240              # for saving, after SIGTERM: `stop` kills nobody
)

on_each() {
    local rank
    for rank in "${!hosts[@]}"; do
        printf '== %s: ' "${hosts[rank]}"
        "$1" "$rank" | ssh -o BatchMode=yes "${hosts[rank]}" bash -s || echo "ssh: exit code $?"
    done
}

# What these print is run on host number $1.
common() {
    cat <<REMOTE
cd ${folder@Q} || exit
runs() { ps -o args= -p "\$(cat launcher-$1.pid 2>/dev/null)" 2>/dev/null | grep -q elastictrain.launch; }
REMOTE
}

start() {
    common "$1"
    cat <<REMOTE
if runs; then echo "runs already"; exit; fi
export PET_NNODES=${#hosts[@]} PET_NODE_RANK=$1 PET_MASTER_ADDR=${hosts[0]@Q}
nohup .venv/bin/python -m elastictrain.launch ${run[*]@Q} </dev/null >>launcher-$1.log 2>&1 &
echo \$! >launcher-$1.pid
echo "started; its words are in ${folder}/launcher-$1.log"
REMOTE
}

status() {
    common "$1"
    cat <<REMOTE
if runs; then echo runs; else echo "does not run"; fi
tail -n 3 launcher-$1.log
REMOTE
}

stop() {
    common "$1"
    cat <<REMOTE
if runs; then kill -TERM "\$(cat launcher-$1.pid)" && echo "asked to stop"; else echo "does not run"; fi
REMOTE
}

case "${1:-}" in
    start | status | stop) on_each "$1" ;;
    *) echo "usage: bash ssh.sh start|status|stop" >&2; exit 64 ;;
esac
