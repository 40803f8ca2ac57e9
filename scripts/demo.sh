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
for argument in "$@"; do
    case "$argument" in run.dir=*) dir="${argument#run.dir=}" ;; esac
done

"$bin/torchrun" --standalone --nproc-per-node 2 -m elastictrain.run recipe=llama_tiny "run.dir=$dir" "$@"

cat <<TEXT

Where to look next
  curves       $bin/tensorboard --logdir $dir/tensorboard
  events       $dir/events/*.jsonl (one JSON object a line)
  checkpoints  $dir/checkpoints/
  go on        run the same command again after any interruption: it continues from the newest checkpoint
TEXT
