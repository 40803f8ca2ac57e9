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

# Beside the first tests, which are those without real processes. What it says is shown when they are through.
static_log="$(mktemp)"
bash scripts/check.sh --static >"$static_log" 2>&1 &
static_pid=$!
checked() {
    [[ -n "$static_pid" ]] || return 0
    local code=0
    wait "$static_pid" || code=$?
    static_pid=""
    cat "$static_log" >&2
    rm -f "$static_log"
    return "$code"
}
trap 'code=$?; checked || code=1; exit "$code"' EXIT

# Tests with real processes have bounds in seconds, which another load on the machine can break. A few that fail are tried once
# more, alone; both results are shown. Other tests have no second chance, and neither has what fails in more than three files.
most_again=3

tried_again() {
    "$python" - "$most_again" <<'END' || return 1
import json, sys
failed = list(json.load(open(".pytest_cache/v/cache/lastfailed")))
print("== failed, and tried once more alone:", *failed, sep="\n     ", file=sys.stderr)
files = {name.partition("::")[0] for name in failed}
sys.exit(len(files) > int(sys.argv[1]) or any(not name.startswith(("tests/process", "tests/network")) for name in files))
END
    "$python" -m pytest "$@" -n 0 --last-failed --last-failed-no-failures none
}

status=5
run() {
    local code=0
    printf '== pytest %s\n' "$*" >&2
    rm -f .pytest_cache/v/cache/lastfailed
    "$python" -m pytest "$@" || code=$?
    # Where the first failure ends it, the rest has not run.
    if ((code == 1)) && [[ " $* " != *" -x "* && " $* " != *" --exitfirst "* && " $* " != *" --maxfail"* ]]; then
        code=0
        tried_again "$@" || code=1
        ((code)) || printf '== the tests named above have passed the second time only\n' >&2
    fi
    # 5: the arguments chose none of these tests.
    case $code in
        0) status=0 ;;
        5) ;;
        *) exit "$code" ;;
    esac
}

# Cheap tests first. More at a time than there are cores: those with processes wait more than they compute. Those that measure
# rates and delays run two files at a time, beside nothing else; those on devices one by one.
quiet=(tests/network/test_{links,preflight,rendezvous}.py tests/process/test_stragglers.py)
run tests/unit tests/integration tests/process tests/network "${quiet[@]/#/--ignore=}" -n "${ELASTICTRAIN_TEST_JOBS:-4}" --no-loadscope-reorder "$@"
checked
run "${quiet[@]}" -n 2 "$@"
run tests/gpu "$@"
exit "$status"
