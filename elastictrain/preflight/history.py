"""What earlier starts of a run found wrong: an interface that flaps is well each time it is looked at. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from elastictrain.preflight.verdict import Status, Verdict

PastFindings = Sequence[Mapping[str, object]]
"""The findings of one event `preflight`."""

STARTS = 20
"""How far back one looks."""


@dataclass(frozen=True, slots=True)
class Repeated:
    """A check that the same subject did not pass in several of the last starts, this one included."""

    check: str
    subject: str
    times: int
    starts: int

    def __str__(self) -> str:
        return f"{self.check} of {self.subject}: {self.times} of the last {self.starts} starts"


def find_repeated(verdicts: Sequence[Verdict], before: Iterable[PastFindings]) -> list[Repeated]:
    """What is wrong now and was in earlier starts, the most frequent first.

    `before`: for each earlier start, the newest last, the findings that its event `preflight` holds.
    """
    earlier = [
        {(str(row.get("check")), str(row.get("subject"))) for row in findings} for findings in list(before)[-(STARTS - 1) :]
    ]
    now = dict.fromkeys((one.check, one.subject) for one in verdicts if one.status in (Status.WARN, Status.FAIL))
    counted = [Repeated(*key, times=1 + sum(key in one for one in earlier), starts=1 + len(earlier)) for key in now]
    return sorted((one for one in counted if one.times > 1), key=lambda one: -one.times)
