"""A daemon thread that its owner starts and closes."""

import threading
from collections.abc import Callable


class ClosableThread:
    """Base of a class with one such thread; `run` returns soon after the event `_closed` is set."""

    def _prepare(self, run: Callable[[], None], *, name: str, close_s: float) -> None:
        self._closed = threading.Event()
        self._thread = threading.Thread(target=run, name=name, daemon=True)
        self._close_s = close_s

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Ask the thread to end, and wait `close_s` at most for a turn in progress."""
        self._closed.set()
        self._thread.join(self._close_s)
