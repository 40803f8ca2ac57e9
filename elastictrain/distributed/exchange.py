"""A shared table over the store of torchrun: every question has a limit, and no message is larger than any network carries."""

import threading
import time
import zlib
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from elastictrain.errors import TransportError

PIECE_BYTES = 1000
"""A network that drops large frames must still carry the words in which hosts tell each other of it.

Every network carries 1,280 bytes (RFC 8200, section 5), headers and the store's own words included.
"""

_FIRST_PAUSE_S = 0.001
_LONGEST_PAUSE_S = 0.05
_POLL_S = 0.1

T = TypeVar("T")


class StoreExchange:
    """Leaves word in a store, and looks for it; may be used by several threads.

    The store's own wait would block every other user of the connection, and has a limit of its own; so it is asked again and
    again, over a connection that nobody else uses.
    """

    def __init__(
        self,
        store: dist.Store,
        *,
        poll: Callable[[], None] = lambda: None,
        patience_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`poll` is called by the main thread while it waits, and may raise to leave early. `patience_s`: how much longer than
        asked for the store may take over an answer."""
        self._store: dist.Store = store.clone() if hasattr(store, "clone") else store
        self._store.set_timeout(timedelta(seconds=patience_s))
        self._poll = poll
        self._patience_s = patience_s
        self._clock = clock
        self._left = threading.Event()

    def put(self, key: str, value: bytes) -> None:
        """Leave word. Raises: TransportError if the store cannot be reached."""
        self._bounded(lambda: self._put(key, value), limit_s=0.0)

    def get(self, key: str, *, limit_s: float) -> bytes | None:
        """Wait for word; None if nobody has left it in time. Raises: TransportError if the store cannot be reached."""
        return self._bounded(lambda: self._get(key, limit_s), limit_s=max(0.0, limit_s))

    def _put(self, key: str, value: bytes) -> None:
        packed = zlib.compress(value)
        pieces = [packed[begin : begin + PIECE_BYTES] for begin in range(0, len(packed), PIECE_BYTES)]
        for number, piece in enumerate(pieces):
            # The stub of torch knows texts only; the store takes bytes.
            self._store.set(f"{key}#{number}", piece)  # type: ignore[arg-type]
            # Waits for the answer: the kernel must not put several messages into one large frame.
            self._store.check([f"{key}#{number}"])
        self._store.set(key, str(len(pieces)))

    def _get(self, key: str, limit_s: float) -> bytes | None:
        deadline, pause_s = self._clock() + limit_s, _FIRST_PAUSE_S
        while not self._store.check([key]):
            if self._clock() > deadline or self._left.is_set():
                return None
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, _LONGEST_PAUSE_S)
        count = int(self._store.get(key))
        return zlib.decompress(b"".join(bytes(self._store.get(f"{key}#{number}")) for number in range(count)))

    def _bounded(self, act: Callable[[], T], *, limit_s: float) -> T:
        """In a thread of its own: a store whose host is gone without a word never answers, whatever time-out it was given."""
        results: list[T] = []
        failed: list[BaseException] = []

        def run() -> None:
            try:
                results.append(act())
            except BaseException as error:  # noqa: BLE001  # the edge of a thread; it is raised where it was asked for
                failed.append(error)

        thread = threading.Thread(target=run, name="exchange", daemon=True)
        thread.start()
        deadline = self._clock() + limit_s + self._patience_s
        main = threading.current_thread() is threading.main_thread()
        while thread.is_alive() and self._clock() < deadline:
            thread.join(min(_POLL_S, max(0.0, deadline - self._clock())))
            if main and thread.is_alive():
                try:
                    self._poll()
                except BaseException:
                    self._left.set()
                    raise
        if results:
            return results[0]
        if failed and not isinstance(failed[0], RuntimeError):
            raise failed[0]
        reason = str(failed[0]) if failed else f"no answer for {self._patience_s:g} s"
        raise TransportError(
            f"the rendezvous store that torchrun named (MASTER_ADDR, MASTER_PORT) does not answer: {reason}"
        ) from (failed[0] if failed else None)
