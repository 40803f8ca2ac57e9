"""What `RemoteStore` asks of a service: single requests, each tried once, failing with whatever its client raises."""

from collections.abc import Iterable
from typing import Protocol

from elastictrain.storage.store import ObjectInfo

CONNECT_TIMEOUT_S = 5
_SLOWEST_BYTES_PER_S = 1 << 20


class Upload(Protocol):
    """An object that is sent in parts and not visible before `finish`."""

    def put_part(self, number: int, data: bytes) -> None:
        """Send part `number` (from 1), all but the last of the same size. May be repeated."""

    def finish(self, total_bytes: int) -> None:
        """Make the object visible. Repeated after a failure only where the backend is `parallel`."""

    def abort(self) -> None:
        """Forget the parts."""


class Backend(Protocol):
    """Objects of one service, by path (bucket and key)."""

    parallel: int
    """Requests for one object that may run at a time; 1 if parts of an upload must come in order and only once."""

    def get(self, path: str, *, start: int, end: int | None) -> bytes:
        """Bytes [start, end)."""

    def put(self, path: str, data: bytes, *, mark: str | None = None) -> None:
        """Create or replace; with a `mark`, by which `is_ours` knows the object later, fail if it is there."""

    def is_ours(self, path: str, data: bytes, *, mark: str) -> bool:
        """Whether an object that is there already comes from a `put` with this mark, whose answer was lost."""

    def begin(self, path: str) -> Upload:
        """Begin an upload in parts."""

    def info(self, path: str) -> ObjectInfo:
        """Size and time; the key is the path."""

    def find(self, folder: str) -> Iterable[ObjectInfo]:
        """All objects whose path begins with `folder`, which ends with '/'; in any order; keys are paths."""

    def remove(self, path: str) -> None:
        """Remove; an absent object may be an error."""


def split_path(path: str) -> tuple[str, str]:
    """Bucket and key."""
    bucket, _, key = path.partition("/")
    return bucket, key


def range_header(start: int, end: int | None) -> dict[str, str]:
    """For bytes [start, end) of an object; nothing for all of them."""
    return {} if (start, end) == (0, None) else {"Range": f"bytes={start}-{'' if end is None else end - 1}"}


def most_bytes(start: int, end: int | None) -> int:
    """What an answer with bytes [start, end) may hold."""
    return 1 << 30 if end is None else end - start


def request_timeout_s(num_bytes: int, *, answer_timeout_s: float) -> float:
    """Bound on one request with all its bytes. The clients' own time-outs do not see a peer that stops reading."""
    return CONNECT_TIMEOUT_S + answer_timeout_s + num_bytes / _SLOWEST_BYTES_PER_S
