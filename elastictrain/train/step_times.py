"""Measures how long this rank works on each phase of a step, without waiting for the device."""

from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Generic

from elastictrain.distributed.clock import Clock, M
from elastictrain.train.straggler import FIGURES, PHASES

WAIT = ""  # time that is no work of this rank, or that cannot be told from waiting for others
LATE = 3  # steps: the loop has the figures of the step after a measured one, so the device has passed all its marks


@dataclass(slots=True)
class StepTimes(Generic[M]):
    """The marks of the last steps. A step lasts from its first mark to that of the next step."""

    clock: Clock[M]
    _steps: deque[list[tuple[str, M]]] = field(default_factory=deque, init=False)

    def begin(self) -> list[float]:
        """A step begins. Returns FIGURES seconds of the step `LATE` steps ago; zeros where there was none."""
        figures = [0.0] * FIGURES
        first = self.clock.now()
        if self._steps:
            self._steps[-1].append((WAIT, first))
        if len(self._steps) == LATE:
            marks = self._steps.popleft()
            for (phase, since), (_, until) in pairwise(marks):
                seconds = self.clock.between_s(since, until)
                figures[0] += seconds
                if phase:
                    figures[1 + PHASES.index(phase)] += seconds
            # The last mark is the first one of the next step.
            self.clock.release([mark for _, mark in marks[:-1]])
        self._steps.append([(WAIT, first)])
        return figures

    def mark(self, phase: str = WAIT) -> None:
        """From now on the rank works on `phase`, one of PHASES, or waits."""
        if self._steps[-1][-1][0] != phase:
            self._steps[-1].append((phase, self.clock.now()))
