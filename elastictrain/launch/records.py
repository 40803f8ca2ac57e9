"""The launcher's events."""

import logging
from collections.abc import Callable
from typing import Self

from elastictrain.events import AppendLog, Event, encode, event_time
from elastictrain.fault.reasons import NO_RANK
from elastictrain.launch.membership.records import End

logger = logging.getLogger(__name__)


class LauncherStarted(Event, tag="launcher_started", frozen=True):
    """This host can take part: it waits for others, or for a generation."""

    launcher: str  # its unique name, as in that of its journal
    host: str
    processes: int


class GenerationBegun(Event, tag="generation", frozen=True):
    hosts: tuple[str, ...]
    world_size: int
    reason: str
    pause_s: float


class GenerationEnded(Event, tag="generation_ended", frozen=True):
    """Nothing of a generation runs on this host any more."""

    kind: str
    exit_code: int
    phase: str
    step: int
    reason: str
    lost: str  # the host that fell silent, if that is why
    died: tuple[str, ...] = ()  # the ranks of this host that died or hung, or the host that failed; empty after an orderly end

    @classmethod
    def of(cls, end: End, *, died: tuple[str, ...]) -> Self:
        died = died if end.loses_state else ()
        phase, step, reason, lost = end.phase, end.step, end.reason, end.lost
        return cls(kind=end.kind, exit_code=end.exit_code, phase=phase, step=step, reason=reason, lost=lost, died=died)


class LauncherEnded(Event, tag="launcher_ended", frozen=True):
    """This host's launcher ends, and why: the run is done, was given up or stopped, or this host is unfit."""

    exit_code: int
    reason: str


class NoticeGiven(Event, tag="notice", frozen=True):
    """The cloud, the cluster or the time limit announces that this host will or may be taken away."""

    reason: str
    leave: bool  # whether the host leaves; otherwise it was only a hint
    deadline: float | None  # Unix seconds


class WorkersNotForked(Event, tag="workers_not_forked", frozen=True):
    """Workers of this host are started anew each time, and import torch, so that a restart takes longer."""

    reason: str


class Recorder:
    """Appends a launcher's events to a log of its own. Never raises: a launcher outlives its storage."""

    def __init__(self, log: AppendLog, *, clock: Callable[[], float] = event_time) -> None:
        self._log = log
        self._clock = clock

    def record(self, generation: int, event: Event) -> None:
        """Append one event of a generation (0: of none)."""
        try:
            self._log.append(encode(event, now=self._clock(), incarnation=f"generation-{generation}", rank=NO_RANK))
        except Exception:
            # The log is written through storage, which may be what failed.
            logger.exception("an event could not be recorded")

    def close(self) -> None:
        """Make all events durable, as far as storage allows."""
        self._log.close()
