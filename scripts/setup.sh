#!/usr/bin/env bash
# Makes the virtual environment and installs elastictrain into it, editable.
#
#   scripts/setup.sh [EXTRA...]      e.g. scripts/setup.sh dev
#
# ELASTICTRAIN_VENV  where the environment is (default: .venv in the checkout)
# PYTHON             the interpreter to make it with (default: the first of python3, python3.13, 3.12, 3.11 that is >= 3.11)
#
# Nothing is done when the environment already has what is asked for: a stamp in it holds a digest of what it was made from.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="${ELASTICTRAIN_VENV:-$root/.venv}"
stamp="$venv/elastictrain-setup"

say() { printf 'setup: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

recent_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

find_python() {
    local candidate
    if [[ -n "${PYTHON:-}" ]]; then
        recent_enough "$PYTHON" || die "PYTHON=$PYTHON must be an interpreter of Python 3.11 or newer."
        printf '%s\n' "$PYTHON"
        return
    fi
    for candidate in python3 python3.13 python3.12 python3.11; do
        if recent_enough "$candidate"; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    die "needs Python 3.11 or newer, but found $(python3 --version 2>&1 || true). Install one, or name one: PYTHON=/path/to/python3"
}

gpu=0
if command -v nvidia-smi >/dev/null 2>&1; then gpu=1; fi

digest() {
    { printf '%s\n' "$root" "$gpu"; cat "$root/pyproject.toml" "$root/constraints-cpu.txt"; } | cksum
}

# Extras accumulate: demo.sh after test.sh must not reinstall.
wanted="$(digest)"
installed=" "
if [[ -f "$stamp" && -x "$venv/bin/python" ]]; then
    { read -r made_from; read -r extras || true; } <"$stamp"
    if [[ "$made_from" == "$wanted" ]]; then
        installed=" ${extras:-} "
        missing=0
        for extra in "$@"; do
            [[ "$installed" == *" $extra "* ]] || missing=1
        done
        if ((!missing)); then
            exit 0
        fi
    fi
fi
extras="$(printf '%s\n' $installed "$@" | sed '/^$/d' | sort -u | paste -sd ' ' -)"

started=$SECONDS
if [[ ! -x "$venv/bin/python" ]]; then
    python="$(find_python)"
    say "making $venv with $("$python" --version)"
    "$python" -m venv "$venv" || die "cannot make a virtual environment; on Debian and Ubuntu: apt install python3-venv"
fi
rm -f "$stamp"

target="$root"
[[ -z "$extras" ]] || target="$root[${extras// /,}]"
say "installing elastictrain${extras:+ with ${extras// /, }} (a few minutes the first time)"
# Where there is a GPU torch is left to pip; without one an unpinned torch may bring gigabytes of CUDA libraries.
constraints="$venv/elastictrain-constraints.txt"
if ((gpu)); then
    grep -v '^torch==' "$root/constraints-cpu.txt" >"$constraints"
else
    say "no nvidia-smi here: $(grep '^torch==' "$root/constraints-cpu.txt"), for the CPU"
    cp "$root/constraints-cpu.txt" "$constraints"
fi
# Twice quiet: errors only.
"$venv/bin/python" -m pip install --quiet --quiet --disable-pip-version-check --no-compile -c "$constraints" -e "$target"
# On all cores, where pip uses one. Not left to the first import: where PYTHONDONTWRITEBYTECODE is set, as in many containers,
# each start of a worker would compile torch anew, 3.5 s of it. What no worker imports is two fifths of it all, and is left out.
# Packages carry templates that are no Python; they may fail.
site="$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
unused='/(.*/)?(tests?|torch/testing/_internal|transformers/models|moto|mypy|pip|databricks)/'
"$venv/bin/python" -m compileall -qq -j 0 -x "$(printf %s "$site" | sed 's/[][\.*^$+?(){}|]/\\&/g')$unused" "$site" || true
printf '%s\n%s\n' "$wanted" "$extras" >"$stamp"
say "done in $((SECONDS - started)) s"
