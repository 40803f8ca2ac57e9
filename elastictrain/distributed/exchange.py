"""A shared table over the store of torchrun: every question has a limit, and no message is larger than any network carries."""

import time
import zlib
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from elastictrain.errors import TransportError

PIECE_BYTES = 1000
"""A network that drops large frames must still carry the words in which hosts tell each other of it.

Every network carries 1,280 bytes (RFC 8200, section 5), headers and the store's own words included.
"""

_OPERATION_TIMEOUT = timedelta(seconds=5)
_FIRST_PAUSE_S = 0.001
_LONGEST_PAUSE_S = 0.05


class StoreExchange:
    """Leaves word in a store, and looks for it; may be used by several threads.

    The store's own wait would block every other user of the connection, and has a limit of its own; so it is asked again and
    again, over a connection that nobody else uses.
    """

    def __init__(self, store: dist.Store, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._store: dist.Store = store.clone() if hasattr(store, "clone") else store
        self._store.set_timeout(_OPERATION_TIMEOUT)
        self._clock = clock

    def put(self, key: str, value: bytes) -> None:
        """Leave word. Raises: TransportError if the store cannot be reached."""
        packed = zlib.compress(value)
        pieces = [packed[begin : begin + PIECE_BYTES] for begin in range(0, len(packed), PIECE_BYTES)]
        try:
            for number, piece in enumerate(pieces):
                # The stub of torch knows texts only; the store takes bytes.
                self._store.set(f"{key}#{number}", piece)  # type: ignore[arg-type]
                # Waits for the answer: the kernel must not put several messages into one large frame.
                self._store.check([f"{key}#{number}"])
            self._store.set(key, str(len(pieces)))
        except RuntimeError as error:
            raise _unreachable(error) from error

    def get(self, key: str, *, limit_s: float) -> bytes | None:
        """Wait for word; None if nobody has left it in time. Raises: TransportError if the store cannot be reached."""
        deadline, pause_s = self._clock() + limit_s, _FIRST_PAUSE_S
        try:
            while not self._store.check([key]):
                if self._clock() > deadline:
                    return None
                time.sleep(pause_s)
                pause_s = min(1.5 * pause_s, _LONGEST_PAUSE_S)
            count = int(self._store.get(key))
            return zlib.decompress(b"".join(bytes(self._store.get(f"{key}#{number}")) for number in range(count)))
        except RuntimeError as error:
            raise _unreachable(error) from error


def _unreachable(error: RuntimeError) -> TransportError:
    return TransportError(f"the rendezvous store that torchrun named (MASTER_ADDR, MASTER_PORT) does not answer: {error}")
