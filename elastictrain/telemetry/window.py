"""How long the run will still take."""

from collections import deque


class RemainingTime:
    """Estimates the time to the last step from the most recent steps, pauses included."""

    def __init__(self, *, total_steps: int, window_s: float = 120.0) -> None:
        self._total_steps = total_steps
        self._window_s = window_s
        self._passed: deque[tuple[float, int]] = deque()
        self._latest: tuple[float, int] | None = None

    def observe(self, *, time_s: float, step: int) -> None:
        """Note that `step` steps were committed at the monotonic time `time_s`."""
        self._latest = (time_s, step)
        # A hundred moments per window suffice, however short the steps are.
        if self._passed and time_s - self._passed[-1][0] < self._window_s / 100:
            return
        self._passed.append(self._latest)
        # The newest moment outside the window stays, so that steps longer than the window still have a speed.
        while len(self._passed) > 2 and self._passed[1][0] <= time_s - self._window_s:
            self._passed.popleft()

    def estimate_s(self) -> float | None:
        """Seconds to go; None before a step was seen to pass."""
        if self._latest is None:
            return None
        (first_s, first_step), (last_s, last_step) = self._passed[0], self._latest
        if last_step <= first_step:
            return None
        return (self._total_steps - last_step) * (last_s - first_s) / (last_step - first_step)
