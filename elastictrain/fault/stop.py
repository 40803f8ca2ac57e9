"""Stop requests: a signal becomes a fact that the loop reads, and all ranks agree on."""

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

logger = logging.getLogger(__name__)

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


@dataclass(frozen=True, slots=True)
class StopRequest:
    """Somebody wants this run to end; `since_s` is monotonic."""

    reason: str
    since_s: float


class StopListener:
    """Turns signals into a `StopRequest`.

    A Python signal handler does not run while the main thread is blocked inside a collective, so the byte that the C-level
    handler writes to the wake-up descriptor is read by a thread of our own.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.request: StopRequest | None = None
        self._reader, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        os.set_blocking(self._reader, True)
        self._previous_wakeup = -1
        self._previous_handlers: dict[int, object] = {}
        self._thread = threading.Thread(target=self._listen, name="stop-listener", daemon=True)

    def start(self) -> None:
        """Begin to listen; call from the main thread."""
        for number in STOP_SIGNALS:
            self._previous_handlers[number] = signal.signal(number, _ignore)
        self._previous_wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._thread.start()

    def close(self) -> None:
        """Put the previous handlers back and end the thread; call from the main thread."""
        signal.set_wakeup_fd(self._previous_wakeup)
        for number, handler in self._previous_handlers.items():
            if handler is not None:  # None: it was not installed from Python, and cannot be put back
                signal.signal(number, handler)  # type: ignore[arg-type]  # what signal.signal returned it also takes
        os.close(self._writer)
        self._thread.join(timeout=1.0)
        os.close(self._reader)

    def ask(self, reason: str) -> None:
        """Request a stop; the first reason stays."""
        if self.request is None:
            self.request = StopRequest(reason, self._clock())
            logger.warning("asked to stop (%s)", reason)

    def _listen(self) -> None:
        while data := os.read(self._reader, 64):
            for number in data:
                if number in STOP_SIGNALS:
                    self.ask(signal.Signals(number).name)


def _ignore(number: int, frame: object) -> None:
    """A handler must exist, or the signal's default action would end the process; the wake-up descriptor does the work."""
