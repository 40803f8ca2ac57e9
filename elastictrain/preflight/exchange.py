"""Where hosts, or ranks, leave word for each other during a preflight."""

from typing import Protocol


class Exchange(Protocol):
    """A shared table of small values, for example the store of torchrun. Every question has a limit in time."""

    def put(self, key: str, value: bytes) -> None:
        """Leave word under a key that is used once; visible to all. Raises: TransportError if the table cannot be reached."""

    def get(self, key: str, *, limit_s: float) -> bytes | None:
        """Wait for word; None if nobody has left it in time. Raises: TransportError if the table cannot be reached."""
