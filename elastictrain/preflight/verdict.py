"""Verdicts of checks: subject, measured and expected figure, remedy; as data, JSON, sentence or table."""

import json
import os
import sys
import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import partial
from itertools import zip_longest

from elastictrain.telemetry.progress import terminal_width


class Status(StrEnum):
    """How a check ended for its subject."""

    PASS = "pass"  # noqa: S105
    SKIP = "skip"  # does not apply here, or what it needs is missing
    WARN = "warn"
    FAIL = "fail"  # the subject cannot take part


class Scope(StrEnum):
    """What a check looks at."""

    HOST = "host"
    LINK = "link"  # from one host to another, in that direction
    GROUP = "group"  # several hosts or ranks together


Figure = float | str | None  # a number in the verdict's unit, a word where there is no number, or nothing
_WORST_FIRST = (Status.FAIL, Status.WARN, Status.SKIP, Status.PASS)
_COLOURS = {Status.PASS: "32", Status.SKIP: "90", Status.WARN: "33", Status.FAIL: "1;31"}
_HEADINGS = ("", "check", "subject", "measured", "expected", "seconds")
_WIDEST, _NARROWEST = 48, 8
_fill = partial(textwrap.fill, initial_indent="      -> ", subsequent_indent="         ")


@dataclass(frozen=True, slots=True)
class Verdict:
    """One finding. Raises: ValueError without a remedy where one is required."""

    check: str
    scope: Scope
    subject: str  # a host ("h3"), a link ("h3 -> h1"), a rank ("rank 5 on h3"), a device ("GPU 3 on h1") or "all"
    status: Status
    measured: Figure = None
    expected: Figure = None
    unit: str = ""
    seconds: float = 0.0  # how long the check took
    remedy: str = ""  # a command or a setting; required unless the check passed
    may_pass: bool = False  # may disappear by itself: an answer that did not come, a store that is down for a while
    excused: bool = False  # a failure of speed that is only a warning because no host could be left out for it

    def __post_init__(self) -> None:
        if self.status is not Status.PASS and not self.remedy:
            raise ValueError(f"check {self.check!r} says {self.status} of {self.subject} without a remedy")


@dataclass(frozen=True, slots=True)
class Reporter:
    """Makes the verdicts of one check. The other fields are defaults for its verdicts."""

    check: str
    subject: str = "all"
    scope: Scope = Scope.HOST
    seconds: float = 0.0

    def passed(self, measured: Figure = None, *, expected: Figure = None, unit: str = "") -> Verdict:
        return self(self.subject, Status.PASS, measured, expected, unit=unit)

    def skipped(self, measured: Figure, *, remedy: str) -> Verdict:
        """The check does not apply, or nothing is known."""
        return self(self.subject, Status.SKIP, measured, None, remedy)

    def warned(self, measured: Figure, *, remedy: str, expected: Figure = None, unit: str = "") -> Verdict:
        """The subject can take part, but worse than it could."""
        return self(self.subject, Status.WARN, measured, expected, remedy, unit=unit)

    def failed(self, measured: Figure, *, remedy: str, expected: Figure = None, unit: str = "", fatal: bool = True) -> Verdict:
        """The subject cannot take part; a warning if that is not `fatal`."""
        return self(self.subject, Status.FAIL if fatal else Status.WARN, measured, expected, remedy, unit)

    def __call__(
        self, subject: str, status: Status, measured: Figure = None, expected: Figure = None, remedy: str = "", unit: str = ""
    ) -> Verdict:
        measured, expected = (float(f"{one:.4g}") if isinstance(one, float) else one for one in (measured, expected))
        return Verdict(self.check, self.scope, subject, status, measured, expected, unit, self.seconds, remedy)


def worst_first(verdicts: Iterable[Verdict]) -> list[Verdict]:
    """Failures, then warnings, skipped, passed; otherwise in the given order."""
    return sorted(verdicts, key=lambda verdict: _WORST_FIRST.index(verdict.status))


def failures(verdicts: Iterable[Verdict]) -> Sequence[Verdict]:
    """Those whose subject cannot take part, in the given order."""
    return [verdict for verdict in verdicts if verdict.status is Status.FAIL]


def findings(verdicts: Iterable[Verdict]) -> list[Verdict]:
    """Warnings and failures."""
    return [verdict for verdict in verdicts if verdict.status in (Status.WARN, Status.FAIL)]


def describe(verdict: Verdict) -> str:
    """One sentence: subject, measured figure, remedy."""
    measured, expected = shown(verdict.measured, verdict.unit), shown(verdict.expected, verdict.unit)
    figures = (f" is {measured}" if measured else "") + (f" (should be {expected})" if expected else "")
    return f"{verdict.subject}: {verdict.check}{figures}; {verdict.remedy}"


def shown(figure: Figure, unit: str = "") -> str:
    """A figure as a person reads it; empty for None."""
    if isinstance(figure, float):
        figure = str(int(figure)) if figure.is_integer() else f"{figure:.4g}"
    return "" if figure is None else f"{figure} {unit}".rstrip()


def render(verdicts: Sequence[Verdict], *, colour: bool, width: int, everything: bool = True) -> str:
    """A table, worst first, with remedies below their rows. Without `everything`, passed and skipped are only counted."""
    listed = worst_first(verdicts if everything else findings(verdicts))
    if not listed:
        return summary(verdicts)
    rows: list[Sequence[str]] = [_HEADINGS]
    for one in listed:
        figures = (shown(one.measured, one.unit), shown(one.expected, one.unit))
        rows.append((one.status.value, one.check, one.subject, *figures, f"{one.seconds:.2f}"))
    widths = [min(_WIDEST, max(len(row[column]) for row in rows)) for column in range(len(_HEADINGS))]
    while sum(widths) + 2 * (len(widths) - 1) > width and max(widths) > _NARROWEST:
        widths[widths.index(max(widths))] -= 1
    lines = _wrapped(rows[0], widths)
    for verdict, row in zip(listed, rows[1:], strict=True):
        lines += _wrapped(row, widths, colour=_COLOURS[verdict.status] if colour else "")
        lines += [_fill(verdict.remedy, max(40, width))] if verdict.remedy else []
    return "\n".join([*lines, "", summary(verdicts)])


def summary(verdicts: Iterable[Verdict]) -> str:
    """Such as "1 failed, 2 warnings, 20 passed, 3 skipped"."""
    counts = count(verdicts)
    words = {Status.FAIL: "failed", Status.WARN: "warnings", Status.PASS: "passed", Status.SKIP: "skipped"}
    parts = [f"{counts[status]} {word}" for status, word in words.items() if counts[status]]
    return ", ".join(parts).replace("1 warnings", "1 warning") if parts else "nothing was checked"


def count(verdicts: Iterable[Verdict]) -> dict[str, int]:
    """How many have each status, also one that none has."""
    counts = Counter(verdict.status.value for verdict in verdicts)
    return {status.value: counts[status.value] for status in Status}


def show(verdicts: Sequence[Verdict], *, as_json: bool) -> None:
    """Write a table to the terminal, or JSON for a script, worst first."""
    if as_json:
        sys.stdout.write(json.dumps([asdict(verdict) for verdict in worst_first(verdicts)]) + "\n")
        return
    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    sys.stdout.write(f"{render(verdicts, colour=colour, width=terminal_width(sys.stdout))}\n")


def _wrapped(row: Sequence[str], widths: Sequence[int], *, colour: str = "") -> list[str]:
    cells = [textwrap.wrap(cell, width, break_on_hyphens=False) or [""] for cell, width in zip(row, widths, strict=True)]
    padded = zip_longest(*cells, fillvalue="")
    lines = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in padded]
    if colour:
        lines[0] = f"\033[{colour}m{row[0]}\033[0m{lines[0][len(row[0]) :]}"
    return lines
