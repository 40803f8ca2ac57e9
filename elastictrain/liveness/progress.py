"""Where this rank is: the phase and step that heartbeats, the watchdog and failure reports speak of."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum

ENOUGH_STEPS = 10  # before that many steps nothing is known about what is usual
WINDOW_STEPS = 64  # steps that count: what was long ago may have been another kind of work


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
class ProgressMark:
    """One moment: what began, in which step, and when (monotonic seconds)."""

    phase: Phase
    step: int
    micro_batch: int
    since_s: float
    first_step_done: bool
    longest_s: float = 0.0  # the longest that any phase of a step has taken since the first step was through

    usual_s: float = 0.0
    """The longest but one of the last steps, so that a single stall does not blunt the bound; 0 while too few are known."""

    compiling: bool = False

    @property
    def in_collective(self) -> bool:
        """Whether ranks call collectives there."""
        return self.phase not in (Phase.START, Phase.DATA)

    def __str__(self) -> str:
        where = f"{self.phase} of step {self.step}" if self.step else f"{self.phase}"
        return f"{where}, micro-batch {self.micro_batch}" if self.phase in (Phase.FORWARD, Phase.BACKWARD) else where


class ProgressTracker:
    """The latest mark of this rank. One thread marks, any thread reads: a mark is replaced whole."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._first_step_done = False
        self._longest_s = 0.0
        self._steps_s: deque[float] = deque(maxlen=WINDOW_STEPS)
        self._usual_s = 0.0
        self._step_s: float | None = None
        """Spent in the parts of the step at hand so far; None if it was not seen from its beginning."""
        self._on_mark: Callable[[ProgressMark], None] | None = None
        self.mark = ProgressMark(Phase.START, 0, 0, clock(), False)

    def set_phase(self, phase: Phase, *, step: int = 0, micro_batch: int = 0) -> None:
        now_s, before = self._clock(), self.mark
        if before.first_step_done and before.phase in STEP_PHASES and not before.compiling:
            spent_s = now_s - before.since_s
            self._longest_s = max(self._longest_s, spent_s)
            if self._step_s is not None and before.phase is not Phase.EVAL:
                self._step_s += spent_s
        if phase is Phase.DATA and step != before.step:
            self._learn()
        self._replace(ProgressMark(phase, step, micro_batch, now_s, self._first_step_done, self._longest_s, self._usual_s))

    def first_step_done(self) -> None:
        """From now on the tight bounds hold."""
        self._first_step_done = True

    def compiling(self, *, begins: bool) -> None:
        """A compiler begins its work inside the phase at hand, or has done it: that takes minutes and is no part of a step."""
        self._step_s = None
        self._replace(replace(self.mark, since_s=self._clock(), compiling=begins))

    def follow(self, on_progress: Callable[[ProgressMark], None]) -> None:
        """Have each mark from this one on written down elsewhere, too."""
        self._on_mark = on_progress
        on_progress(self.mark)

    def _learn(self) -> None:
        """A step begins: the one before it is through."""
        if self._step_s is not None:
            self._steps_s.append(self._step_s)
            self._usual_s = sorted(self._steps_s)[-2] if len(self._steps_s) >= ENOUGH_STEPS else 0.0
        self._step_s = 0.0 if self._first_step_done else None

    def _replace(self, mark: ProgressMark) -> None:
        self.mark = mark
        if self._on_mark is not None:
            self._on_mark(mark)
