"""Stop requests: a signal becomes a request that the loop reads, and that all ranks agree on."""

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import Annotated

import msgspec

from elastictrain.bounded_json import encode_record, parse_record

logger = logging.getLogger(__name__)

_MOST_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class StopNote:
    """Why to stop, and the unix second by which to have ended; None if unknown."""

    reason: Annotated[str, msgspec.Meta(min_length=1)]
    deadline: float | None = None
    host_stays: bool = False  # this host takes part in a later generation: what its memory holds is safe there


def write_stop_note(path: str, note: StopNote) -> None:
    """A reader finds the complete note, or the one before it. Raises: OSError."""
    temporary = f"{path}.{os.getpid()}"
    Path(temporary).write_bytes(encode_record(note))
    Path(temporary).replace(path)


def read_stop_note(path: str | None) -> StopNote | None:
    """None if there is no note, or an unreadable one, which is logged."""
    if not path:
        return None
    try:
        with Path(path).open("rb") as file:
            return parse_record(file.read(_MOST_BYTES), StopNote)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        logger.warning("the reason to stop cannot be read from %s: %s", path, error)
        return None


STOP_FILE_VARIABLE = "ELASTICTRAIN_STOP_FILE"  # a worker's variable for the path of its stop note, written before the signal

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
"""Slurm is commonly told to send the last two before the time limit of a job."""


@dataclass(frozen=True, slots=True)
class StopRequest:
    """A request to end this run; times are monotonic."""

    reason: str
    since_s: float
    deadline_s: float | None = None  # when this process will be ended, whatever it does then; None if unknown
    host_stays: bool = False  # as in `StopNote`


def after_signal(
    request: StopRequest | None, note: StopNote | None, *, name: str, now_s: float, now: float, notice_s: float | None
) -> StopRequest:
    """The request after a signal. `now_s` and `now` are the same moment, monotonic and in unix seconds.

    The first reason stays, and a note can only bring its deadline forward. A past deadline is ignored: it is left over from an
    earlier stop, or makes no difference any more. The last note decides whether the host stays.
    """
    host_stays = note is not None and note.host_stays
    noted_s = now_s + note.deadline - now if note is not None and note.deadline is not None and note.deadline > now else None
    if request is None:
        alone_s = None if notice_s is None else now_s + notice_s
        return StopRequest(
            note.reason if note is not None else name, now_s, alone_s if noted_s is None else noted_s, host_stays
        )
    if request.host_stays != host_stays:
        request = replace(request, host_stays=host_stays)
    return brought_forward(request, noted_s)


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
    notice_s: float | None = None  # from a signal to this process's end, if `stop_file` gives no time; None: it is not ended
    stop_file: str | None = None
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

    def renew(self, stop_file: str | None, *, quiet: bool) -> None:
        """Forget the requests of a generation that has ended: a worker gets those of the next one anew."""
        with self._lock:
            self.request, self.stop_file, self.quiet = None, stop_file, quiet

    def close(self) -> None:
        """Restore the previous handlers and end the thread; call from the main thread."""
        signal.set_wakeup_fd(self._previous_wakeup)
        for number, handler in self._previous_handlers.items():
            if handler is not None:  # None: it was not installed from Python, and cannot be restored
                signal.signal(number, handler)  # type: ignore[arg-type]  # what signal.signal returned it also takes
        os.close(self._writer)
        self._thread.join(timeout=1.0)
        os.close(self._reader)

    def ask(self, reason: str, *, deadline: float | None = None) -> None:
        """Request a stop by `deadline` (unix seconds); the first reason and the earliest deadline stay."""
        now_s = self.clock()
        deadline_s = None if deadline is None else now_s + deadline - self.wall()
        with self._lock:
            self._adopt(brought_forward(self.request or StopRequest(reason, now_s), deadline_s))

    def _adopt(self, request: StopRequest) -> None:
        before, self.request = self.request, request
        if not self.quiet and is_news(request, before=before):
            left = "" if request.deadline_s is None else f"; {request.deadline_s - self.clock():.0f} s are left"
            logger.warning("asked to stop (%s)%s", request.reason, left)

    def _listen(self) -> None:
        while data := os.read(self._reader, 64):
            for name in (signal.Signals(number).name for number in data if number in STOP_SIGNALS):
                note = read_stop_note(file := self.stop_file)
                now_s, now = self.clock(), self.wall()
                with self._lock:
                    if file != self.stop_file:
                        # It was sent to the generation before. Requests are repeated each second.
                        continue
                    self._adopt(after_signal(self.request, note, name=name, now_s=now_s, now=now, notice_s=self.notice_s))


def _ignore(number: int, frame: object) -> None:
    """The signal's default action would end the process; the wake-up descriptor does the work."""
