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

sources=(elastictrain recipes tests)
run ruff format --check "${sources[@]}" scripts
run ruff check "${sources[@]}" scripts
run mypy
run lint-imports
if [[ "${1:-}" == --static ]]; then
    exit 0
fi

# Properties are tried with fewer examples here than by scripts/test.sh. Plain processes side by side: those of pytest-xdist would
# each collect all tests, and a third one takes their reports.
export HYPOTHESIS_PROFILE="${HYPOTHESIS_PROFILE:-quick}"
first=(tests/unit/checkpoint)
second=(tests/unit/{distributed,fault,launch,liveness,net,preflight})
apart=("${first[@]}" "${second[@]}")
logs="$(mktemp -d)"
others=()
trap 'kill "${others[@]}" 2>/dev/null || true; rm -rf "$logs"' EXIT
run python -m pytest "${first[@]}" -q >"$logs/first" 2>&1 &
others+=($!)
run python -m pytest "${second[@]}" -q >"$logs/second" 2>&1 &
others+=($!)
code=0
run python -m pytest tests/unit "${apart[@]/#/--ignore=}" -q || code=$?
for other in "${others[@]}"; do
    wait "$other" || code=$?
done
cat "$logs/first" "$logs/second"
exit "$code"
