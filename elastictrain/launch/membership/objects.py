"""What a registry needs of the place where hosts meet; a Store is one."""

from collections.abc import Iterator
from typing import Protocol

from elastictrain.storage.store import ObjectInfo


class Objects(Protocol):
    """Small objects under names, as in `Store`: the same promises, and the same errors."""

    @property
    def url(self) -> str:
        """Where they are, for people."""

    def write(self, key: str, data: bytes) -> None:
        """Create or replace one."""

    def create(self, key: str, data: bytes) -> None:
        """Only one of several concurrent creators succeeds. Raises: ObjectExistsError."""

    def read(self, key: str) -> bytes:
        """The whole of it. Raises: ObjectNotFoundError."""

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Every one below the folder `prefix`, in key order."""

    def delete(self, key: str) -> None:
        """Remove one; no error if it is not there."""
