#!/usr/bin/env bash
# The quick gate for every commit: format, lint, types, layers, unit tests.
#
#   scripts/check.sh            all of it
#   scripts/check.sh --static   without the unit tests
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$root"
bash scripts/setup.sh dev
bin="${ELASTICTRAIN_VENV:-$root/.venv}/bin"

run() {
    printf '== %s\n' "$*" >&2
    "$bin/$1" "${@:2}"
}

# Both halves of a machine with two cores, where mypy can: 2.x.
export MYPY_NUM_WORKERS="${MYPY_NUM_WORKERS:-2}"

sources=(elastictrain recipes tests)
run ruff format --check "${sources[@]}" scripts
run ruff check "${sources[@]}" scripts
run mypy
run lint-imports
if [[ "${1:-}" != --static ]]; then
    # Properties are tried with fewer examples here than by scripts/test.sh.
    HYPOTHESIS_PROFILE="${HYPOTHESIS_PROFILE:-quick}" run python -m pytest tests/unit -q -n 2
fi
