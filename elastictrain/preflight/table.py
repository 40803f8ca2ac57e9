"""Verdicts as a table for people, as JSON for programs, and how they get to the terminal."""

import json
import os
import shutil
import sys
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict

from elastictrain.preflight.policy import shown
from elastictrain.preflight.verdict import Figure, Scope, Status, Verdict, worst_first

_COLOURS = {Status.PASS: "32", Status.SKIP: "90", Status.WARN: "33", Status.FAIL: "1;31"}
_HEADINGS = ("", "check", "subject", "measured", "expected", "seconds")
_WIDEST = 48


def render(verdicts: Sequence[Verdict], *, colour: bool, width: int, everything: bool = True) -> str:
    """A table, the worst first; below each row that did not pass, its remedy. Without `everything` what passed or was skipped
    is only counted."""
    listed = [one for one in worst_first(verdicts) if everything or one.status in (Status.WARN, Status.FAIL)]
    if not listed:
        return summary(verdicts)
    rows = [_HEADINGS, *(_row(verdict) for verdict in listed)]
    widths = [min(_WIDEST, max(len(row[column]) for row in rows)) for column in range(len(_HEADINGS))]
    lines = [_line(rows[0], widths)]
    for verdict, row in zip(listed, rows[1:], strict=True):
        lines += _wrapped(row, widths, colour=_COLOURS[verdict.status] if colour else "")
        if verdict.remedy:
            lines.append(
                textwrap.fill(verdict.remedy, max(40, width), initial_indent="      -> ", subsequent_indent="         ")
            )
    return "\n".join([*lines, "", summary(verdicts)])


def summary(verdicts: Iterable[Verdict]) -> str:
    """How many ended how: "1 failed, 2 warnings, 20 passed, 3 skipped"."""
    counts = count(verdicts)
    words = {Status.FAIL: "failed", Status.WARN: "warnings", Status.PASS: "passed", Status.SKIP: "skipped"}
    parts = [f"{counts[status]} {word}" for status, word in words.items() if counts[status]]
    return ", ".join(parts).replace("1 warnings", "1 warning") if parts else "nothing was checked"


def count(verdicts: Iterable[Verdict]) -> dict[str, int]:
    """How many there are of each status."""
    counts = Counter(verdict.status.value for verdict in verdicts)
    return {status.value: counts[status.value] for status in Status}


def to_json(verdicts: Sequence[Verdict]) -> str:
    """An array of objects, in the order of the verdicts."""
    return json.dumps([asdict(verdict) for verdict in verdicts])


def from_json(text: str) -> list[Verdict]:
    """The inverse. Raises: ValueError if it is not what `to_json` writes."""
    try:
        return [_verdict(row) for row in json.loads(text)]
    except (TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"not a list of verdicts ({type(error).__name__}: {error})") from error


def _verdict(row: Mapping[str, object]) -> Verdict:
    seconds = row["seconds"]
    return Verdict(
        check=str(row["check"]),
        scope=Scope(str(row["scope"])),
        subject=str(row["subject"]),
        status=Status(str(row["status"])),
        measured=_figure(row["measured"]),
        expected=_figure(row["expected"]),
        unit=str(row["unit"]),
        seconds=float(seconds) if isinstance(seconds, int | float) else 0.0,
        remedy=str(row["remedy"]),
        may_pass=row["may_pass"] is True,
    )


def _figure(value: object) -> Figure:
    return value if value is None or isinstance(value, float | str) else float(str(value))


def _row(verdict: Verdict) -> tuple[str, ...]:
    unit = f" {verdict.unit}" if verdict.unit else ""
    measured, expected = (f"{shown(one)}{unit}" if one is not None else "" for one in (verdict.measured, verdict.expected))
    return (verdict.status.value, verdict.check, verdict.subject, measured, expected, f"{verdict.seconds:.2f}")


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _wrapped(row: Sequence[str], widths: Sequence[int], *, colour: str) -> list[str]:
    cells = [textwrap.wrap(cell, width, break_on_hyphens=False) or [""] for cell, width in zip(row, widths, strict=True)]
    lines = []
    for number in range(max(map(len, cells))):
        line = _line([cell[number] if number < len(cell) else "" for cell in cells], widths)
        if colour and number == 0 and row[0]:
            line = f"\033[{colour}m{line[: len(row[0])]}\033[0m{line[len(row[0]) :]}"
        lines.append(line)
    return lines


def show(verdicts: Sequence[Verdict], *, as_json: bool) -> None:
    """Write them to the terminal, or for a script, the worst first."""
    if as_json:
        sys.stdout.write(f"{to_json(worst_first(verdicts))}\n")
        return
    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    width = shutil.get_terminal_size((120, 24)).columns
    sys.stdout.write(f"{render(verdicts, colour=colour, width=width)}\n")
