"""The narrow protocol for every durable byte of a run.

Rename, append, lock and in-place modification are missing on purpose: not every backend has them, so no caller may rely on
them. URLs are `str`; a `Path` would mangle `s3://`.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from elastictrain.errors import PermanentStorageError

Bytes = bytes | bytearray | memoryview

TEMPORARY_PREFIX = ".tmp-"  # begins the names of unfinished files; no part of a key begins with it


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """An object that `stat` or `list` has found."""

    key: str  # relative to the store's root
    size_bytes: int
    modified: float  # unix seconds of the last write


class ObjectWriter(Protocol):
    """An object under construction; it becomes visible, complete, when its context ends without an exception."""

    def write(self, data: Bytes, /) -> None:
        """Append `data`; the buffer may be reused after the call."""


class ReadableStore(Protocol):
    """The read-only part of a store."""

    @property
    def url(self) -> str:
        """The root, as the user wrote it, without a trailing '/'."""

    def read(self, key: str, *, start: int = 0, end: int | None = None) -> bytes:
        """Bytes [start, end) of the object; short only where the object ends. Raises: ObjectNotFoundError."""

    def read_into(self, key: str, buffer: memoryview, *, start: int = 0) -> int:
        """Fill `buffer` from offset `start`; returns the bytes read, fewer only where the object ends."""


@runtime_checkable
class MappedStore(ReadableStore, Protocol):
    """A store of which parts lie in memory of this process."""

    def mapped(self, key: str, start: int, end: int) -> memoryview | None:
        """Bytes [start, end) of the object, if they are there. Raises: ObjectNotFoundError."""


class Store(ReadableStore, Protocol):
    """Objects under one root URL. Keys are relative, '/'-separated, without '.', '..' or empty parts.

    Every method raises `TransientStorageError` (after its own retries are used up) or a leaf of `PermanentStorageError`; the
    message names the full URL. Implementations are thread-safe.
    """

    def write(self, key: str, data: Bytes) -> None:
        """Create or replace the object atomically and durably: after a crash it is the complete old or new one."""

    def create(self, key: str, data: Bytes) -> None:
        """Like `write`, but only one of several concurrent creators succeeds. Raises: ObjectExistsError."""

    def open_writer(self, key: str) -> AbstractContextManager[ObjectWriter]:
        """Write a large object in pieces with bounded memory; durable and visible when the context ends, gone if it raises."""

    def stat(self, key: str) -> ObjectInfo:
        """Size and time of one object. Raises: ObjectNotFoundError."""

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Every object below the folder `prefix` ('' for all), recursively, in key order; empty if there is none."""

    def delete(self, key: str) -> None:
        """Delete the object; a missing object is no error."""


def check_key(key: str, *, url: str) -> None:
    """Raises: PermanentStorageError if `key` is not a relative, '/'-separated name that means the same on every backend."""
    for part in key.split("/"):
        if part in ("", ".", "..") or part.startswith(TEMPORARY_PREFIX) or "\0" in part:
            raise PermanentStorageError(
                f"{url}: {key!r} cannot name an object: a key is relative, and its parts are neither empty nor '.' nor '..' "
                f"and do not start with {TEMPORARY_PREFIX!r}"
            )


def folder_of(prefix: str, *, url: str = "") -> str:
    """The prefix as a folder: '' or ending with '/'. Raises: PermanentStorageError as `check_key`."""
    prefix = prefix.strip("/")
    if prefix:
        check_key(prefix, url=url)
    return f"{prefix}/" if prefix else ""
