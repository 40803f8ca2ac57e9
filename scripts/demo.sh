#!/usr/bin/env bash
# Sets up, then trains a tiny Llama on the source text of the Python standard library, with two workers on this machine.
# Arguments are overrides: scripts/demo.sh train.steps=50 run.dir=/tmp/llama
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$root"
bash scripts/setup.sh
bin="${ELASTICTRAIN_VENV:-$root/.venv}/bin"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" RES_OPTIONS="${RES_OPTIONS:-timeout:1 attempts:1}"

dir=runs/llama_tiny
overrides=()
for argument in "$@"; do
    case "$argument" in
        run.dir=*) dir="${argument#run.dir=}" ;;
        *) overrides+=("$argument") ;;
    esac
done

cat <<TEXT
A Llama of 0.9 M parameters learns to write Python, byte by byte, from the source text of the standard library:
two workers on this machine's CPU, one to two minutes. Everything it writes is in $dir.
Ctrl-C stops it with its state saved, kill -9 does not hurt it: the same command goes on.

TEXT

# A wrong key is said once here; torchrun would start the workers again and again.
"$bin/python" -m elastictrain.run recipe=llama_tiny "run.dir=$dir" "${overrides[@]}" --cfg job >/dev/null

status=0
"$bin/torchrun" --standalone --nproc-per-node 2 --max-restarts 3 \
    -m elastictrain.run recipe=llama_tiny "run.dir=$dir" "${overrides[@]}" || status=$?
if ((status)); then
    printf '\nThe run did not reach its end. Why stands above, before the traceback that torchrun adds.\n' >&2
    printf 'The same command continues from the newest checkpoint in %s.\n' "$dir" >&2
    exit "$status"
fi

printf '\nWhat happened\n'
"$bin/python" - "$dir" <<'PYTHON'
import json
import sys

from elastictrain.storage.opening import open_store

store = open_store(sys.argv[1])
losses, held_out, latest = {}, None, ()
# Names sort in the order of the run's lives, so that a step that was done again replaces its predecessor.
for key in sorted(info.key for info in store.list("events") if "-r00000." in info.key):
    latest = [json.loads(line) for line in store.read(key).splitlines()]
    losses |= {event["step"]: event["loss"] for event in latest if event["event"] == "step"}
    held_out = next((event["loss"] for event in reversed(latest) if event["event"] == "eval"), held_out)
if losses and None not in losses.values():
    last = [losses[step] for step in sorted(losses)[-10:]]
    print(f"  loss: {losses[min(losses)]:.1f} -> {sum(last) / len(last):.1f}   "
          f"(nats per byte; step {min(losses)}, and the mean of the last {len(last)} of {max(losses)} steps)")
if held_out is not None:
    print(f"  on text that it was not trained on: {held_out:.1f}")
if not any(event["event"] == "step" for event in latest):
    print(f"  the run in {sys.argv[1]} was complete before; to see it learn again, delete that folder first")
PYTHON

cat <<TEXT

Where to look next
  curves       $bin/tensorboard --logdir $(dirname "$dir")
  events       tail -n 3 $dir/events/*-r00000.jsonl      (one JSON object a line)
  checkpoints  ls $dir/checkpoints
  every key    $bin/python -m elastictrain.run --help
  break it     README.md, "Try to break it"
TEXT
