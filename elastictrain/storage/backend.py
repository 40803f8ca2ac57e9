"""What `RemoteStore` asks of a service: single requests, each tried once, failing with whatever its client raises."""

from collections.abc import Iterable
from typing import Protocol

from elastictrain.storage.store import ObjectInfo


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

    @property
    def parallel(self) -> int:
        """Requests for one object that may run at a time; 1 if parts of an upload must come in order and only once."""

    def get(self, path: str, *, start: int, end: int | None) -> bytes:
        """Bytes [start, end)."""

    def put(self, path: str, data: bytes) -> None:
        """Create or replace."""

    def create(self, path: str, data: bytes, *, mark: str) -> None:
        """Create, or fail if the object is there. `mark` is what `is_ours` later knows the object by."""

    def is_ours(self, path: str, data: bytes, *, mark: str) -> bool:
        """Whether an object that is there already comes from a `create` with this mark, whose answer was lost."""

    def begin(self, path: str) -> Upload:
        """Begin an upload in parts."""

    def info(self, path: str) -> ObjectInfo:
        """Size and time; the key is the path."""

    def find(self, folder: str) -> Iterable[ObjectInfo]:
        """All objects whose path begins with `folder`, which ends with '/'; in any order; keys are paths."""

    def remove(self, path: str) -> None:
        """Remove; an absent object may be an error."""
