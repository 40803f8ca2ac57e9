"""The store that ranks meet through, with a time limit on each request, since a frozen host never answers. torch's client has
no limit of its own where a host accepts a connection and then is silent, whatever time-out it is given."""

import os
import threading
import time
import zlib
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from elastictrain.distributed.bounded import call_until
from elastictrain.errors import TransportError
from elastictrain.identity import STORE_HOST

# Through these messages hosts report that a network drops large frames, so each must fit into a small one. Every network
# carries 1,280 bytes (RFC 8200, section 5), headers and the store's own bytes included.
PIECE_BYTES = 1000
_FIRST_PAUSE_S = 0.001
_LONGEST_PAUSE_S = 0.05

_WHERE = "the store that the ranks meet through, on "

T = TypeVar("T")


class BoundedStore:
    """A torch store whose requests share one deadline; each raises TransportError in time."""

    def __init__(
        self,
        connect: Callable[[], dist.Store],
        *,
        limit_s: float,
        poll: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`poll` is called during a request, and may raise to leave early. Raises: TransportError."""
        self._poll = poll
        self._clock = clock
        self._deadline_s = clock() + limit_s
        self.unbounded = self.ask(connect)

    @property
    def left_s(self) -> float:
        return max(0.0, self._deadline_s - self._clock())

    def extend_deadline(self, seconds: float) -> None:
        """Move the deadline to `seconds` from now, if it is earlier."""
        self._deadline_s = max(self._deadline_s, self._clock() + seconds)

    def ask(self, act: Callable[[], T]) -> T:
        """Return what `act` returns. Raises: TransportError that names the store's host, in time or where the store fails."""
        asked_s = self._clock()
        # The store is on the host of the first rank.
        return _ask(act, left_s=lambda: self.left_s, silent_s=lambda: self._clock() - asked_s, poll=self._poll, missing=(0,))

    def set(self, key: str, value: str, /) -> None:
        self.ask(lambda: self.unbounded.set(key, value))

    def get(self, key: str, /) -> bytes:
        return self.ask(lambda: self.unbounded.get(key))

    def check(self, keys: list[str], /) -> bool:
        return self.ask(lambda: self.unbounded.check(keys))

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        return self.ask(lambda: self.unbounded.compare_set(key, expected, desired))


class PolledStore(dist.Store):
    """A store that polls for a key instead of waiting in C++, where nothing ends the wait for a rank that is gone."""

    def __init__(self, store: dist.Store, *, limit_s: float, poll: Callable[[], None]) -> None:
        """`poll` may raise to end a wait; it is called by the thread that waits."""
        super().__init__()
        self._store, self._limit_s, self._poll = store, limit_s, poll

    def set(self, key: str, value: str) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        """Raises: TransportError if nobody sets it in time, and whatever `poll` raises."""
        self.wait([key])
        return self._store.get(key)

    def add(self, key: str, value: int) -> int:
        return self._store.add(key, value)

    def check(self, keys: list[str]) -> bool:
        return self._store.check(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """`timeout`: by default `limit_s`. Raises: TransportError if a key is not set in time; whatever `poll` raises."""
        deadline = time.monotonic() + (self._limit_s if timeout is None else timeout.total_seconds())
        pause_s = _FIRST_PAUSE_S
        while not self._store.check(keys):
            self._poll()
            if time.monotonic() > deadline:
                raise TransportError(f"no rank has set {', '.join(keys)} in the store in time: a rank is missing")
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, _LONGEST_PAUSE_S)


class StoreExchange:
    """Leaves messages in a store, in small pieces, and waits for them; several threads may use it. The store's own wait would
    block every other user of the connection, and has a limit of its own; so this polls, over a connection of its own."""

    def __init__(
        self,
        store: dist.Store,
        *,
        poll: Callable[[], None] = lambda: None,
        patience_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`poll` is called by the main thread while it waits, and may raise to leave early. `patience_s`: how much longer than
        the limit of a request the store's answer may take."""
        self._store: dist.Store = store.clone() if hasattr(store, "clone") else store
        self._store.set_timeout(timedelta(seconds=patience_s))
        self._poll = poll
        self._patience_s = patience_s
        self._clock = clock
        self._left = threading.Event()

    def put(self, key: str, value: bytes) -> None:
        """Leave a message. Raises: TransportError if the store cannot be reached."""
        self._bounded(lambda: put_pieces(self._store, key, value), limit_s=0.0)

    def get(self, key: str, *, limit_s: float) -> bytes | None:
        """Wait for a message; None if there is none in time. Raises: TransportError if the store cannot be reached."""
        return self._bounded(lambda: self._get(key, limit_s), limit_s=max(0.0, limit_s))

    def _get(self, key: str, limit_s: float) -> bytes | None:
        deadline, pause_s = self._clock() + limit_s, _FIRST_PAUSE_S
        while not self._store.check([key]):
            if self._clock() > deadline or self._left.is_set():
                return None
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, _LONGEST_PAUSE_S)
        return get_pieces(self._store, key)

    def _bounded(self, act: Callable[[], T], *, limit_s: float) -> T:
        deadline_s = self._clock() + limit_s + self._patience_s
        return _ask(
            act,
            left_s=lambda: deadline_s - self._clock(),
            silent_s=lambda: self._patience_s,
            poll=self._poll_in_main,
        )

    def _poll_in_main(self) -> None:
        if threading.current_thread() is threading.main_thread():
            try:
                self._poll()
            except BaseException:
                self._left.set()
                raise


def put_pieces(store: dist.Store | BoundedStore, key: str, value: bytes) -> None:
    """Set `key` in small pieces: others find it when all are there."""
    packed = zlib.compress(value)
    pieces = [packed[begin : begin + PIECE_BYTES] for begin in range(0, len(packed), PIECE_BYTES)]
    for number, piece in enumerate(pieces):
        # The type stub of torch takes texts only; the store takes bytes.
        store.set(f"{key}#{number}", piece)  # type: ignore[arg-type]
        # Wait for the answer: the kernel must not put several messages into one large frame.
        store.check([f"{key}#{number}"])
    store.set(key, str(len(pieces)))


def get_pieces(store: dist.Store | BoundedStore, key: str) -> bytes:
    """What `put_pieces` has set."""
    count = int(store.get(key))
    return zlib.decompress(b"".join(bytes(store.get(f"{key}#{number}")) for number in range(count)))


def store_host() -> str:
    """The host of the store that torchrun named, for messages."""
    place = f"{os.environ.get('MASTER_ADDR', '?')}:{os.environ.get('MASTER_PORT', '?')} (MASTER_ADDR, MASTER_PORT)"
    name = os.environ.get(STORE_HOST)
    return f"{name} at {place}" if name else place


def _ask(
    act: Callable[[], T],
    *,
    left_s: Callable[[], float],
    silent_s: Callable[[], float],
    poll: Callable[[], None],
    missing: tuple[int, ...] = (),
) -> T:
    try:
        return call_until(act, left_s=left_s, poll=poll)
    except TimeoutError:
        why = "that host is frozen, cut off or gone, or a firewall drops what is sent to it"
        sentence = f"{_WHERE}{store_host()}, has not answered for {silent_s():.0f} s: {why}"
        raise TransportError(sentence, missing=missing) from None
    except RuntimeError as error:
        first = next(iter(str(error).splitlines()), "")
        raise TransportError(f"{_WHERE}{store_host()}, cannot be used: {first}") from error
