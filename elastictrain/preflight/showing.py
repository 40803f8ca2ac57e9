"""Writes verdicts to the terminal."""

import os
import shutil
import sys
from collections.abc import Sequence

from elastictrain.preflight.table import render, to_json
from elastictrain.preflight.verdict import Verdict, worst_first


def show(verdicts: Sequence[Verdict], *, as_json: bool) -> None:
    """Write them to the terminal, or for a script, the worst first."""
    if as_json:
        sys.stdout.write(f"{to_json(worst_first(verdicts))}\n")
        return
    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    width = shutil.get_terminal_size((120, 24)).columns
    sys.stdout.write(f"{render(verdicts, colour=colour, width=width)}\n")
