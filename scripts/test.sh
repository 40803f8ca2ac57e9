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
printf '== pytest\n' >&2
# In the order of what a failure costs to find.
exec "$python" -m pytest tests/unit tests/process tests/network tests/gpu "$@"
