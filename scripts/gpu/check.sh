#!/usr/bin/env bash
# Correctness on a host with two GPUs, then our step against the hand-written loop. Needs the package's dependencies installed.
set -uo pipefail
cd "$(dirname "$0")/../.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
failed=0
timeout "${CHECK_LIMIT_S:-240}" python3 -m pytest tests/gpu -q -x --timeout 200 --durations=10 || failed=1
timeout "${BENCH_LIMIT_S:-200}" torchrun --standalone --nproc-per-node 2 \
    scripts/bench_step.py recipe=llama_fsdp train.global_batch=8 train.micro_batch=4 || failed=1
exit "$failed"
