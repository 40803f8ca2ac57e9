"""How long one save waits for the keepers of other hosts. The times are handed in by a clock."""

import threading
import time
from collections.abc import Callable

HURRY_S = 10.0
"""How long other hosts are waited for once the group that took the snapshots is gone: some of them may be gone, too."""


class Patience:
    """Ends `limit_s` after a wait has begun; sooner when nobody trains any more. Any thread may hurry it."""

    def __init__(self, limit_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit_s = limit_s
        self._clock = clock
        self._lock = threading.Lock()
        self._hurried_s: float | None = None

    def hurry(self) -> None:
        """The group that took the snapshots is gone; what is said first counts."""
        with self._lock:
            if self._hurried_s is None:
                self._hurried_s = self._clock()

    def left_s(self, since_s: float, *, alike_s: float = 0.0) -> float:
        """What is left of a wait that began at `since_s` of the clock; not positive: it is over.

        `alike_s`: how long this host took for what the others are waited for to do.
        """
        now_s = self._clock()
        left_s = since_s + self._limit_s - now_s
        if self._hurried_s is None:
            return left_s
        return min(left_s, max(since_s, self._hurried_s) + HURRY_S + alike_s - now_s)
