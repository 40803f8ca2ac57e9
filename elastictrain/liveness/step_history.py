"""How long a rank may be silent inside a step, learnt from the steps that it has done. Pure."""

from collections import deque

ENOUGH_STEPS = 10
"""Before that many steps nothing is known about what is usual."""

WINDOW_STEPS = 64
"""Steps that count: what was long ago may have been another kind of work."""


class StepHistory:
    """The durations of the last steps of this rank."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=WINDOW_STEPS)

    def add(self, seconds: float) -> None:
        """One more step is through."""
        self._seconds.append(seconds)

    @property
    def usual_s(self) -> float:
        """The longest step but one, so that a single stall does not blunt the bound; 0 until enough is known."""
        return sorted(self._seconds)[-2] if len(self._seconds) >= ENOUGH_STEPS else 0.0


def learned_bound_s(usual_s: float, *, multiple: float, floor_s: float, ceiling_s: float) -> float:
    """The bound for any part of a step; the ceiling holds also where the floor is above it, or nothing was learnt."""
    return min(ceiling_s, max(floor_s, multiple * usual_s)) if usual_s > 0 else ceiling_s
