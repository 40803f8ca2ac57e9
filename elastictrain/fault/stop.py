"""Stop requests: a signal becomes a request that the loop reads, and that all ranks agree on."""

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field, replace

logger = logging.getLogger(__name__)

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
"""Slurm is commonly told to send the last two before the time limit of a job."""


@dataclass(frozen=True, slots=True)
class StopRequest:
    """A request to end this run; times are monotonic."""

    reason: str
    since_s: float
    deadline_s: float | None = None  # when this process will be ended, whatever it does then; None if unknown
    host_stays: bool = False  # this host takes part in a later generation: what its memory holds is safe there


def brought_forward(request: StopRequest, deadline_s: float | None) -> StopRequest:
    """The request with the earlier of two deadlines."""
    if deadline_s is None or (request.deadline_s is not None and request.deadline_s <= deadline_s):
        return request
    return replace(request, deadline_s=deadline_s)


def is_news(request: StopRequest, *, before: StopRequest | None) -> bool:
    """Whether to log the request. A repeated request has a recomputed deadline, which differs in its last digits."""
    if before is None or before.reason != request.reason:
        return True
    return request.deadline_s is not None and (before.deadline_s is None or request.deadline_s < before.deadline_s - 1.0)


@dataclass(eq=False)
class StopListener:
    """Turns signals into a `StopRequest`.

    A Python signal handler does not run while the main thread is blocked inside a collective, so a thread reads the byte that
    the C-level handler writes to the wake-up descriptor.
    """

    clock: Callable[[], float] = time.monotonic
    _: KW_ONLY
    notice_s: float | None = None  # from a signal to this process's end, if nobody gives a time; None: it is not ended
    wall: Callable[[], float] = time.time  # unix seconds
    quiet: bool = field(default=False, init=False)  # log no requests: another process of this host does
    request: StopRequest | None = field(default=None, init=False)  # any thread may read it; replaced whole

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._reader, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        os.set_blocking(self._reader, True)
        self._previous_wakeup = -1
        self._previous_handlers: dict[int, object] = {}
        self._thread = threading.Thread(target=self._listen, name="stop-listener", daemon=True)

    def start(self) -> None:
        """Call from the main thread."""
        # First, or a signal between the two would be swallowed.
        self._previous_wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        for number in STOP_SIGNALS:
            self._previous_handlers[number] = signal.signal(number, _ignore)
        # The parent may have blocked these signals until a listener exists.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        self._thread.start()

    def renew(self, *, quiet: bool) -> None:
        """Forget the requests of a generation that has ended: a worker gets those of the next one anew, each second."""
        with self._lock:
            self.request, self.quiet = None, quiet

    def close(self) -> None:
        """Restore the previous handlers and end the thread; call from the main thread."""
        signal.set_wakeup_fd(self._previous_wakeup)
        for number, handler in self._previous_handlers.items():
            if handler is not None:  # None: it was not installed from Python, and cannot be restored
                signal.signal(number, handler)  # type: ignore[arg-type]  # what signal.signal returned it also takes
        os.close(self._writer)
        self._thread.join(timeout=1.0)
        os.close(self._reader)

    def ask(self, reason: str, *, deadline: float | None = None, host_stays: bool = False) -> None:
        """Request a stop by `deadline` (unix seconds); the first reason and the earliest deadline stay. The last call decides
        whether the host stays."""
        now_s = self.clock()
        deadline_s = None if deadline is None else now_s + deadline - self.wall()
        with self._lock:
            request = replace(self.request or StopRequest(reason, now_s), host_stays=host_stays)
            self._adopt(brought_forward(request, deadline_s))

    def _adopt(self, request: StopRequest) -> None:
        before, self.request = self.request, request
        if not self.quiet and is_news(request, before=before):
            left = "" if request.deadline_s is None else f"; {request.deadline_s - self.clock():.0f} s are left"
            logger.warning("asked to stop (%s)%s", request.reason, left)

    def _listen(self) -> None:
        while data := os.read(self._reader, 64):
            for name in (signal.Signals(number).name for number in data if number in STOP_SIGNALS):
                first = self.request is None
                self.ask(name, deadline=self.wall() + self.notice_s if first and self.notice_s is not None else None)


def _ignore(number: int, frame: object) -> None:
    """The signal's default action would end the process; the wake-up descriptor does the work."""
