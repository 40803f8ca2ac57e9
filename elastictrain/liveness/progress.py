"""The phase and step of this rank, for heartbeats, the watchdog and failure reports."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum

ENOUGH_STEPS = 10  # with fewer steps the usual duration is unknown
WINDOW_STEPS = 64  # newest steps that count: older ones may have been another kind of work


class Phase(StrEnum):
    """What a rank is doing, in the order of a run's life."""

    STANDBY = "standby"
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
    STEP = "step"  # all of a step of a loop that a user has written, and what follows it there
    SAVE = "save"
    EVAL = "eval"
    DETACH = "detach"
    END = "end"


STEP_PHASES = frozenset((Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.REDUCE, Phase.UPDATE, Phase.STEP, Phase.EVAL))
"""The short phases that recur in every step, or nearly so."""


@dataclass(frozen=True, slots=True)
class ProgressMark:
    """One moment: the phase that began, in which step, and when (monotonic seconds)."""

    phase: Phase
    step: int
    micro_batch: int
    since_s: float
    first_step_done: bool
    longest_s: float = 0.0  # the longest phase of a step since the first step was done
    usual_s: float = 0.0  # second longest of the last steps, so that one stall does not blunt the bound; 0: too few steps
    compiling: bool = False
    finished_step: int = 0  # the newest step of this generation whose figures are known; 0: none

    @property
    def in_collective(self) -> bool:
        """Whether ranks call collectives in this phase."""
        return self.phase not in (Phase.STANDBY, Phase.START, Phase.DATA)

    def __str__(self) -> str:
        where = f"{self.phase} of step {self.step}" if self.step else f"{self.phase}"
        return f"{where}, micro-batch {self.micro_batch}" if self.phase in (Phase.FORWARD, Phase.BACKWARD) else where


class ProgressTracker:
    """The latest mark of this rank. One thread sets it and any thread reads it: a mark is replaced whole."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._first_step_done = False
        self._longest_s = 0.0
        self._steps_s: deque[float] = deque(maxlen=WINDOW_STEPS)
        self._usual_s = 0.0
        self._step_s: float | None = None  # time in the phases of the current step; None if its beginning was not seen
        self._on_mark: Callable[[ProgressMark], None] | None = None
        self._finished_step = 0
        self.has_trained = False  # whether this process has finished a step, in any generation
        self.sees_compiler = False  # whether `compiling` is called for each compilation of this process
        self.mark = ProgressMark(Phase.START, 0, 0, clock(), False)

    def set_phase(self, phase: Phase, *, step: int = 0, micro_batch: int = 0) -> None:
        """Begin `phase`, which ends the one before. DATA of another step ends the step before: its duration is learned."""
        now_s, before = self._clock(), self.mark
        if before.first_step_done and before.phase in STEP_PHASES and not before.compiling:
            spent_s = now_s - before.since_s
            self._longest_s = max(self._longest_s, spent_s)
            if self._step_s is not None and before.phase is not Phase.EVAL:
                self._step_s += spent_s
        if phase is Phase.DATA and step != before.step:
            self._learn()
        figures = (self._first_step_done, self._longest_s, self._usual_s)
        self._replace(ProgressMark(phase, step, micro_batch, now_s, *figures, finished_step=self._finished_step))

    def step_finished(self, step: int) -> None:
        """The figures of a step are known. The current phase, which may be of a later step, goes on."""
        self._finished_step, self.has_trained = step, True
        self._replace(replace(self.mark, finished_step=step))

    def first_step_done(self) -> None:
        self._first_step_done = True

    def begin_generation(self) -> None:
        """A process begins another generation: limits are generous until its first step is done."""
        self._first_step_done, self._step_s, self._finished_step = False, None, 0
        self._on_mark = None
        self.set_phase(Phase.START)

    def compiling(self, *, begins: bool) -> None:
        """A compiler begins or ends its work within the current phase: that takes minutes and is no part of a step."""
        self._step_s = None
        self._replace(replace(self.mark, since_s=self._clock(), compiling=begins))

    def follow(self, on_progress: Callable[[ProgressMark], None]) -> None:
        """Pass the current mark, and each later one, to `on_progress`."""
        self._on_mark = on_progress
        on_progress(self.mark)

    def _learn(self) -> None:
        """A step begins: record how long the step before it took."""
        if self._step_s is not None:
            self._steps_s.append(self._step_s)
            self._usual_s = sorted(self._steps_s)[-2] if len(self._steps_s) >= ENOUGH_STEPS else 0.0
        self._step_s = 0.0 if self._first_step_done else None

    def _replace(self, mark: ProgressMark) -> None:
        self.mark = mark
        if self._on_mark is not None:
            self._on_mark(mark)
