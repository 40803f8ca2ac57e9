"""The job templates, and stand-ins for the commands that they call."""

import os
import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from elastictrain.errors import EXIT_BUG, EXIT_CONFIG, EXIT_USAGE

FINAL = {EXIT_USAGE, EXIT_BUG, EXIT_CONFIG}
"""Codes after which another start does the same again."""

REPOSITORY = Path(__file__).parents[3]
FOLDER = REPOSITORY / "scripts" / "cluster"


def read_yaml(name: str) -> dict[str, Any]:
    return yaml.safe_load((FOLDER / name).read_text())  # type: ignore[no-any-return]


def with_options(name: str) -> dict[str, Any]:
    """With the options that are commented out put in: comments in which a key or an item of a list stands."""
    option = re.compile(r"^( +)# ((?: *)(?:- )?[A-Za-z][A-Za-z0-9./_-]*:(?: .*)?)$", re.MULTILINE)
    return yaml.safe_load(option.sub(r"\1\2", (FOLDER / name).read_text()))  # type: ignore[no-any-return]


def bash_array(text: str) -> list[str]:
    """What a template's `run=(...)` gives to the launcher."""
    array = re.search(r"^run=\(\n(.*?)^\)$", text, re.DOTALL | re.MULTILINE)
    assert array is not None
    return shlex.split(array[1], comments=True)


def stand_in(folder: Path, name: str, script: str) -> None:
    """A command of that name, which writes its arguments, one a line, into `NAME.N` and goes on with `script`."""
    folder.mkdir(exist_ok=True)
    note = f'n=0; while [[ -e "$NOTES/{name}.$n" ]]; do n=$((n+1)); done; printf "%s\\n" "$@" >"$NOTES/{name}.$n"'
    (folder / name).write_text(f"#!/usr/bin/env bash\n{note}\n{script}\n")
    (folder / name).chmod(0o755)


def bash(
    name: str, *arguments: str, bin_folder: Path, folder: Path, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a template of that name, or at that path, with stand-ins first in the search path."""
    return subprocess.run(
        ["bash", str(FOLDER / name), *arguments],
        cwd=folder,
        env={"PATH": f"{bin_folder}:{os.environ['PATH']}", "NOTES": str(folder), **(environment or {})},
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )


def noted(folder: Path, name: str) -> list[list[str]]:
    """The arguments of each call of a stand-in."""
    return [path.read_text().splitlines() for path in sorted(folder.glob(f"{name}.[0-9]*"))]


def after(words: Sequence[str], option: str) -> str:
    return words[words.index(option) + 1]
