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


@dataclass(frozen=True, slots=True)
class Reporter:
    """Makes the verdicts of one check. `subject`, `scope` and `seconds` are those of verdicts that name no others."""

    check: str
    subject: str = "all"
    scope: Scope = Scope.HOST
    seconds: float = 0.0

    def passed(self, measured: Figure = None, *, expected: Figure = None, unit: str = "") -> Verdict:
        """All is well."""
        return self(self.subject, Status.PASS, measured, expected, unit=unit)

    def skipped(self, measured: Figure, *, remedy: str) -> Verdict:
        """The check does not apply, or nothing is known."""
        return self(self.subject, Status.SKIP, measured, None, remedy)

    def warned(self, measured: Figure, *, remedy: str, expected: Figure = None, unit: str = "") -> Verdict:
        """The subject can take part, but worse than it could."""
        return self(self.subject, Status.WARN, measured, expected, remedy, unit=unit)

    def failed(
        self, measured: Figure, *, remedy: str, expected: Figure = None, unit: str = "", may_pass: bool = False
    ) -> Verdict:
        """The subject cannot take part. `may_pass`: as in `Verdict`."""
        return self(self.subject, Status.FAIL, measured, expected, remedy, unit=unit, may_pass=may_pass)

    def __call__(
        self,
        subject: str,
        status: Status,
        measured: Figure = None,
        expected: Figure = None,
        remedy: str = "",
        *,
        unit: str = "",
        scope: Scope | None = None,
        may_pass: bool = False,
    ) -> Verdict:
        """A verdict about another subject. An `expected` that is empty is left out."""
        return Verdict(
            check=self.check,
            scope=scope or self.scope,
            subject=subject,
            status=status,
            measured=measured,
            expected=None if expected == "" else expected,
            unit=unit,
            seconds=self.seconds,
            remedy=remedy,
            may_pass=may_pass,
        )


def worst_first(verdicts: Iterable[Verdict]) -> list[Verdict]:
    """Failures, then warnings, then what was skipped, then what passed; otherwise in the order of their coming."""
    return sorted(verdicts, key=lambda verdict: _ORDER[verdict.status])


def failures(verdicts: Iterable[Verdict]) -> Sequence[Verdict]:
    """Those that failed."""
    return [verdict for verdict in verdicts if verdict.status is Status.FAIL]
