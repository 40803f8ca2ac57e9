"""Notices: what a cloud or a clock announces for this host. A thread asks for them every few seconds."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Protocol

from elastictrain.fault.closable_thread import ClosableThread

logger = logging.getLogger(__name__)

POLL_S = 2.0  # the shortest notices are 30 s long; AWS recommends 5 s, Azure 1 s; all refuse many requests a second
_SAME_S = 1.0


class MetadataError(Exception):
    """The service does not answer, or not in a known form; a later request may succeed."""


@dataclass(frozen=True, slots=True)
class Notice:
    """Something that will happen to this host."""

    kind: str  # `preempt`, `maintenance`, `pause`, `rebalance` or `limit`
    reason: str  # continues "asked to stop": who takes the host, and how
    deadline: float | None  # unix seconds at which the host may be gone; None if unknown
    leave: bool = True  # whether to stop here; else it is a hint to save soon


class NoticeSource(Protocol):
    """A service or clock that gives notices."""

    @property
    def name(self) -> str:
        """For messages."""

    def look(self) -> Notice | None:
        """The current notice, if any; returns within seconds. Raises: MetadataError."""


def adds_to(notice: Notice, before: Notice | None) -> bool:
    """Whether a notice is news after `before`.

    A later deadline is not: a source without a time of its own counts from each request.
    """
    if before is None or (notice.kind, notice.reason, notice.leave) != (before.kind, before.reason, before.leave):
        return True
    return notice.deadline is not None and (before.deadline is None or notice.deadline < before.deadline - _SAME_S)


@dataclass(frozen=True, kw_only=True)
class LimitSource:
    """Gives a notice `lead_s` before the first limit on the duration of the run. All times are unix seconds."""

    name = "the time limit"
    started: float
    max_hours: float = 0.0  # after `started`; 0 for none
    job_end: float | None = None  # when the scheduler ends the job, if known
    lead_s: float
    wall: Callable[[], float] = time.time

    def look(self) -> Notice | None:
        limits = []
        if self.max_hours > 0:
            limits.append((self.started + 3600 * self.max_hours, f"launch.max_hours = {self.max_hours:g} is reached"))
        if self.job_end is not None:
            limits.append((self.job_end, "the time limit of the job is reached"))
        deadline, reason = min(limits, default=(float("inf"), ""))
        return Notice("limit", reason, deadline) if self.wall() >= deadline - self.lead_s else None


@dataclass(eq=False)
class NoticePoller(ClosableThread):
    """Asks each source in turn, and passes on news."""

    sources: Sequence[NoticeSource]
    _: KW_ONLY
    on_notice: Callable[[Notice], None]  # called from the poller's thread
    interval_s: float = POLL_S

    def __post_init__(self) -> None:
        self._last: dict[int, Notice] = {}
        self._errors: dict[int, str] = {}
        # A request in progress may last seconds, and is not waited for.
        self._prepare(self._run, name="notices", close_s=0.0)

    def _run(self) -> None:
        while True:
            for index, source in enumerate(self.sources):
                try:
                    self._pass_on(index, source.look())
                except Exception as error:  # noqa: BLE001  # the edge of the thread: the next answer may be a notice
                    text = str(error) if isinstance(error, MetadataError) else f"{type(error).__name__}: {error}"
                    if self._errors.get(index) != text:
                        logger.warning("cannot read the notices of %s: %s", source.name, text)
                    self._errors[index] = text
                else:
                    if self._errors.pop(index, ""):
                        logger.info("%s answers again", source.name)
            if self._closed.wait(self.interval_s):
                return

    def _pass_on(self, index: int, notice: Notice | None) -> None:
        if notice is None:
            # Cancelled, or over: the next notice is news again, even if it is the same.
            self._last.pop(index, None)
        elif adds_to(notice, self._last.get(index)) and not self._closed.is_set():
            # Recorded only after `on_notice`: if that raises, the notice is passed on again.
            self.on_notice(notice)
            self._last[index] = notice
