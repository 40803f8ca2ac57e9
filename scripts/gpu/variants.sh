#!/usr/bin/env bash
# The 8b recipe on two GPUs in several settings, one line of arguments each, read from standard input.
set -uo pipefail
cd "$(dirname "$0")/../.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" BENCH_ALONE="${BENCH_ALONE:-1}"
while read -r arguments; do
    # shellcheck disable=SC2086
    timeout "${BENCH_LIMIT_S:-120}" torchrun --standalone --nproc-per-node 2 scripts/bench_step.py \
        recipe=llama_hsdp parallel=fsdp train.global_batch=4 $arguments < /dev/null || echo "failed: $arguments"
done
