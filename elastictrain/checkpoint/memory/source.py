"""Reads a set of snapshots as if it were a checkpoint in a store: its files are slots here, or on other hosts."""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from elastictrain.checkpoint.memory.layout import RankLayout
from elastictrain.checkpoint.memory.slot import Slot
from elastictrain.errors import ObjectNotFoundError, TransientStorageError


@dataclass(frozen=True, slots=True)
class SnapshotFile:
    """One shard file of a snapshot; `base` is its offset in the snapshot's bytes."""

    read_snapshot: Callable[[memoryview, int], None]
    """Fills a buffer with the snapshot's bytes from an offset. Raises: StorageError."""

    base: int
    size_bytes: int
    remote: bool


def snapshot_files(
    layout: RankLayout, read_snapshot: Callable[[memoryview, int], None], *, incarnation: str, rank: int, remote: bool
) -> dict[str, SnapshotFile]:
    """The files of one rank's snapshot by name, read through `read_snapshot`."""
    files = layout.files(incarnation=incarnation, rank=rank)
    return {
        file.name: SnapshotFile(read_snapshot, base, file.size_bytes, remote)
        for file, base in zip(files, layout.starts, strict=True)
    }


def files_in_slot(slot: Slot, layout: RankLayout, *, incarnation: str, rank: int) -> dict[str, SnapshotFile]:
    """The files of a snapshot on this host, read as copies: nothing changes between their verification and their use."""

    def read_slot(buffer: memoryview, start: int) -> None:
        try:
            slot.read_into(buffer, start=start)
        except OSError as error:
            raise TransientStorageError(f"{slot.path} cannot be read: {error}") from error

    return snapshot_files(layout, read_slot, incarnation=incarnation, rank=rank, remote=False)


class SnapshotSource:
    """The part of a store that verified reading needs; keys are names of files."""

    def __init__(self, url: str, files: Mapping[str, SnapshotFile], *, close: Callable[[], None]) -> None:
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

    def _fetch(self, file: SnapshotFile, buffer: memoryview, start: int) -> None:
        file.read_snapshot(buffer, file.base + start)
        if file.remote:
            with self._lock:
                self.remote_bytes += len(buffer)

    def _file(self, key: str) -> SnapshotFile:
        file = self._files.get(key)
        if file is None:
            raise ObjectNotFoundError(f"{self._url}/{key} is in no host's memory")
        return file
