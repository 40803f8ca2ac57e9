"""What a cloud or a clock has to say to a host."""

from dataclasses import dataclass
from typing import Protocol

_SAME_S = 1.0


@dataclass(frozen=True, slots=True)
class Notice:
    """Something will happen to this host."""

    kind: str
    """`preempt`, `maintenance`, `pause`, `rebalance` or `limit`."""

    reason: str
    """Goes on from "asked to stop": who takes the host, and how."""

    deadline: float | None
    """Unix seconds at which the host may be gone; None: nobody says."""

    leave: bool = True
    """Whether to stop here. Else it is a hint: what is saved soon will not be missed later."""


class Source(Protocol):
    """Somebody who can be asked for notices."""

    @property
    def name(self) -> str:
        """For people."""

    def look(self) -> Notice | None:
        """What there is to say now, if anything; ends within seconds. Raises: MetadataError."""


def is_news(notice: Notice, *, before: Notice | None) -> bool:
    """Whether a notice says something that the one before it did not. Pure.

    A deadline that moves back is none: a source without a time of its own counts from each time that it is asked.
    """
    if before is None:
        return True
    if (notice.kind, notice.reason, notice.leave) != (before.kind, before.reason, before.leave):
        return True
    return notice.deadline is not None and (before.deadline is None or notice.deadline < before.deadline - _SAME_S)
