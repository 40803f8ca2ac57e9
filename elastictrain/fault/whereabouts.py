"""Where this rank is: the phase and step that heartbeats, the watchdog and failure reports speak of."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum


class Phase(StrEnum):
    """What a rank is doing, in the order of a run's life."""

    START = "start"
    RENDEZVOUS = "rendezvous"
    PREFLIGHT = "preflight"
    GROUP = "process group"
    BUILD = "build"
    RESTORE = "restore"
    DATA = "data"
    FORWARD = "forward"
    BACKWARD = "backward"
    REDUCE = "reduce"
    UPDATE = "update"
    SAVE = "save"
    EVAL = "eval"
    END = "end"


STEP_PHASES = frozenset((Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.REDUCE, Phase.UPDATE, Phase.EVAL))
"""What recurs in every step, or nearly so, and is short."""


@dataclass(frozen=True, slots=True)
class Mark:
    """One moment: what began, in which step, and when (monotonic seconds)."""

    phase: Phase
    step: int
    micro_batch: int
    since_s: float
    first_step_done: bool
    longest_s: float = 0.0
    """The longest that any phase of a step has taken since the first step was through."""

    def __str__(self) -> str:
        where = f"{self.phase} of step {self.step}" if self.step else f"{self.phase}"
        return f"{where}, micro-batch {self.micro_batch}" if self.phase in (Phase.FORWARD, Phase.BACKWARD) else where


class Whereabouts:
    """The latest mark of this rank. One thread marks, any thread reads: a mark is replaced whole."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._first_step_done = False
        self._longest_s = 0.0
        self.mark = Mark(Phase.START, 0, 0, clock(), False)

    def enter(self, phase: Phase, *, step: int = 0, micro_batch: int = 0) -> None:
        """Note that `phase` begins now."""
        now_s, before = self._clock(), self.mark
        if before.first_step_done and before.phase in STEP_PHASES:
            self._longest_s = max(self._longest_s, now_s - before.since_s)
        self.mark = Mark(phase, step, micro_batch, now_s, self._first_step_done, self._longest_s)

    def first_step_done(self) -> None:
        """From now on the tight bounds hold."""
        self._first_step_done = True
