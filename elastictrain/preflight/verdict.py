"""What a check found, as data: about whom, what was measured, what it should be, and what to do."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum


class Status(StrEnum):
    """How a check ended."""

    PASS = "pass"  # noqa: S105
    SKIP = "skip"
    """It does not apply here, or what it needs is missing."""

    WARN = "warn"
    FAIL = "fail"
    """The subject cannot take part as it is."""


class Scope(StrEnum):
    """What a verdict is about."""

    HOST = "host"
    LINK = "link"
    """From one host to another, in that direction: the subject is "a -> b"."""

    GROUP = "group"
    """All, or several, hosts or ranks together."""


Figure = float | str | None
"""A number in the verdict's unit, a word where there is no number, or nothing."""

_ORDER = {Status.FAIL: 0, Status.WARN: 1, Status.SKIP: 2, Status.PASS: 3}


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One finding.

    `subject` names a host ("h3"), a link ("h3 -> h1"), a rank ("rank 5 on h3"), a device ("GPU 3 on h1") or the whole group
    ("all"). `remedy` is a command or a setting, and required unless the check passed. `seconds` is what the check took.

    Raises: ValueError without a remedy where one is required.
    """

    check: str
    scope: Scope
    subject: str
    status: Status
    measured: Figure = None
    expected: Figure = None
    unit: str = ""
    seconds: float = 0.0
    remedy: str = ""
    may_pass: bool = False
    """Whether what is wrong may pass by itself: an answer that did not come, a store that is down for a while."""

    def __post_init__(self) -> None:
        if self.status is not Status.PASS and not self.remedy:
            raise ValueError(f"check {self.check!r} says {self.status} of {self.subject} without a remedy")


def worst_first(verdicts: Iterable[Verdict]) -> list[Verdict]:
    """Failures, then warnings, then what was skipped, then what passed; otherwise in the order of their coming."""
    return sorted(verdicts, key=lambda verdict: _ORDER[verdict.status])


def failures(verdicts: Iterable[Verdict]) -> Sequence[Verdict]:
    """Those that failed."""
    return [verdict for verdict in verdicts if verdict.status is Status.FAIL]
