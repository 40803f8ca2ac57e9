"""Limits on how long a run may take, as notices."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from elastictrain.fault.notices.notice import Notice


@dataclass(frozen=True, slots=True)
class TimeLimits:
    """When a run has to be over. All times are unix seconds."""

    started: float
    max_hours: float = 0.0
    """After `started`; 0 for no such limit."""

    job_end: float | None = None
    """When the scheduler ends the job, if it told."""


def first_limit(limits: TimeLimits) -> Notice | None:
    """The limit that is reached first, as the notice to be given before it. Pure."""
    found = []
    if limits.max_hours > 0:
        deadline = limits.started + 3600 * limits.max_hours
        found.append(Notice("limit", f"launch.max_hours = {limits.max_hours:g} is reached", deadline))
    if limits.job_end is not None:
        found.append(Notice("limit", "the time limit of the job is reached", limits.job_end))
    return min(found, key=lambda notice: notice.deadline or 0.0, default=None)


def due(limits: TimeLimits, *, now: float, lead_s: float) -> Notice | None:
    """The notice that has to be given now: `lead_s` before a limit, or later. Pure."""
    notice = first_limit(limits)
    if notice is None or notice.deadline is None or now < notice.deadline - lead_s:
        return None
    return notice


class LimitSource:
    """Gives the notice when it is time."""

    name = "the time limit"

    def __init__(self, limits: TimeLimits, *, lead_s: float, wall: Callable[[], float] = time.time) -> None:
        """`lead_s`: how long before a limit to say so."""
        self._limits = limits
        self._lead_s = lead_s
        self._wall = wall

    def look(self) -> Notice | None:
        return due(self._limits, now=self._wall(), lead_s=self._lead_s)
