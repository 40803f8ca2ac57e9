"""Things that happen at a time, in their order."""

import heapq
from collections.abc import Callable
from itertools import count


class EventQueue:
    def __init__(self) -> None:
        self.now_s = 0.0
        self._heap: list[tuple[float, int, int, Callable[[], None]]] = []
        self._number = count()

    def at(self, time_s: float, act: Callable[[], None], *, last: bool = False) -> None:
        """`last`: after all else of that time."""
        heapq.heappush(self._heap, (max(time_s, self.now_s), last, next(self._number), act))

    def next_s(self) -> float:
        return self._heap[0][0] if self._heap else float("inf")

    def run_next(self) -> None:
        self.now_s, _, _, act = heapq.heappop(self._heap)
        act()
