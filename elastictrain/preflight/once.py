"""A question that several checks share, asked once."""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Once(Generic[T]):
    """Asks when first called; every later caller, from any thread, gets the same answer. If asking breaks, all hear of it."""

    def __init__(self, ask: Callable[[], T]) -> None:
        self._ask = ask
        self._lock = threading.Lock()
        self._answers: list[T] = []

    def __call__(self) -> T:
        # Checks run side by side: whoever comes second waits here for the tool instead of starting it again.
        with self._lock:
            if not self._answers:
                self._answers.append(self._ask())
            return self._answers[0]
