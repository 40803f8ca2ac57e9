#!/usr/bin/env bash
# Sets up, then runs every check and test that this machine can run. Arguments go to pytest: scripts/test.sh -x -k wheel
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$root"
bash scripts/setup.sh dev
python="${ELASTICTRAIN_VENV:-$root/.venv}/bin/python"

# A slow resolver must not stall connections on loopback by 5 s, thread counts change the bits of CPU arithmetic, and no test
# may depend on a download.
export RES_OPTIONS="timeout:1 attempts:1" OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1

bash scripts/check.sh --static
for suite in unit process; do
    printf '== pytest tests/%s\n' "$suite" >&2
    status=0
    "$python" -m pytest "tests/$suite" "$@" || status=$?
    # 5: a selection in "$@" matched nothing in this suite.
    if ((status != 0 && !(status == 5 && $# > 0))); then
        exit "$status"
    fi
done
