"""Reads a set of snapshots as if it were a checkpoint in a store: its files are slots here, or on other hosts."""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from elastictrain.checkpoint.memory.layout import RankLayout
from elastictrain.checkpoint.memory.slot import Slot
from elastictrain.errors import ObjectNotFoundError, TransientStorageError


class FileBytes(Protocol):
    """One file of a snapshot."""

    @property
    def size_bytes(self) -> int:
        """Of the file."""

    def read_into(self, buffer: memoryview, *, start: int) -> None:
        """Fill `buffer` from offset `start`. Raises: StorageError."""


@dataclass(frozen=True, slots=True)
class SlotFile:
    """A file in a slot on this host; `base` is its offset in the snapshot's bytes."""

    slot: Slot
    base: int
    size_bytes: int

    def read_into(self, buffer: memoryview, *, start: int) -> None:
        """A copy, so that nothing can change between its verification and its use."""
        try:
            self.slot.read_into(buffer, start=self.base + start)
        except OSError as error:
            raise TransientStorageError(f"{self.slot.path} cannot be read: {error}") from error


def files_in_slot(slot: Slot, layout: RankLayout, *, incarnation: str, rank: int) -> dict[str, FileBytes]:
    """The files of a snapshot on this host, by name."""
    files = layout.files(incarnation=incarnation, rank=rank)
    return {file.name: SlotFile(slot, base, file.size_bytes) for file, base in zip(files, layout.starts, strict=True)}


class SnapshotSource:
    """The part of a store that verified reading needs; keys are names of files."""

    def __init__(self, url: str, files: Mapping[str, FileBytes], *, close: Callable[[], None]) -> None:
        self._url = url
        self._files = files
        self._close = close
        self._lock = threading.Lock()
        self.remote_bytes = 0
        """Read from other hosts so far."""

    @property
    def url(self) -> str:
        """For messages."""
        return self._url

    def read(self, key: str, *, start: int = 0, end: int | None = None) -> bytes:
        """Bytes [start, end) of a file. Raises: ObjectNotFoundError, StorageError."""
        file = self._file(key)
        last = file.size_bytes if end is None else min(end, file.size_bytes)
        buffer = bytearray(max(0, last - start))
        if buffer:
            self._fetch(file, memoryview(buffer), start)
        return bytes(buffer)

    def read_into(self, key: str, buffer: memoryview, *, start: int = 0) -> int:
        """Fill `buffer` from offset `start`; returns the bytes read. Raises: ObjectNotFoundError, StorageError."""
        file, view = self._file(key), buffer.cast("B")
        count = max(0, min(len(view), file.size_bytes - start))
        if count:
            self._fetch(file, view[:count], start)
        return count

    def close(self) -> None:
        """Let go of slots and connections."""
        self._close()

    def _fetch(self, file: FileBytes, buffer: memoryview, start: int) -> None:
        file.read_into(buffer, start=start)
        if not isinstance(file, SlotFile):
            with self._lock:
                self.remote_bytes += len(buffer)

    def _file(self, key: str) -> FileBytes:
        file = self._files.get(key)
        if file is None:
            raise ObjectNotFoundError(f"{self._url}/{key} is in no host's memory")
        return file
