"""One slot: a file in host memory for one snapshot of one rank. Its writer maps it; readers read it like a file.

The header describes the snapshot and its state:

    bytes 0-7    magic
    bytes 8-15   state: 0 empty, 1 being written, 2 complete
    bytes 16-19  length of the body
    bytes 20-35  xxh3_128 of the body
    bytes 36-    body: JSON

A writer sets the state to 1 before it changes anything, and to 2 when everything else is in place. Killed at any moment, it
leaves state 1 or a body without its digest: no reader takes either for a complete snapshot.
"""

import errno
import fcntl
import mmap
import os
import struct
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final, Literal, NamedTuple

import xxhash

from elastictrain.bounded_json import MalformedJsonError, encode_record, parse_record
from elastictrain.checkpoint.manifest import Count
from elastictrain.checkpoint.memory.huge_pages import make_huge_file, map_aligned
from elastictrain.checkpoint.memory.layout import HEADER_BYTES, RankLayout
from elastictrain.errors import CheckpointError, ObjectNotFoundError, TransientStorageError
from elastictrain.storage.private import try_lock

VERSION: Final = 1
_MAGIC = b"ETSNAP01"
_HEAD = struct.Struct("<8sQI16s")
_STATE_AT = 8
_POLL_S = 0.01


class SlotState(IntEnum):
    EMPTY = 0
    WRITING = 1
    COMPLETE = 2


class SnapshotId(NamedTuple):
    """The snapshots of all ranks of one step."""

    incarnation: str
    step: Count


@dataclass(frozen=True, slots=True)
class SnapshotFacts:
    version: Literal[1]
    run: str
    incarnation: str
    step: Count
    world_size: Count
    rank: Count
    layout: str
    config_digest: str
    created: float
    reason: str  # why the saver uploads it, such as `interval`; empty if it stays in memory
    state: Mapping[str, Any]  # JSON: `state` of the manifest

    def __post_init__(self) -> None:
        if self.rank >= self.world_size:
            raise ValueError(f"rank {self.rank} is not below the world size {self.world_size}")

    @property
    def id(self) -> SnapshotId:
        return SnapshotId(self.incarnation, self.step)


def mark(page: memoryview, state: SlotState) -> None:
    """Set the state: one aligned machine word, so that no reader sees half of it."""
    page[:_STATE_AT] = _MAGIC
    struct.pack_into("<Q", page, _STATE_AT, state)


def write_body(page: memoryview, facts: SnapshotFacts) -> None:
    """Raises: CheckpointError if the facts do not fit."""
    body = encode_record(facts)
    if _HEAD.size + len(body) > len(page):
        raise CheckpointError(f"the state of step {facts.step} must fit into {len(page)} bytes, but has {len(body)}")
    page[_HEAD.size : _HEAD.size + len(body)] = body
    struct.pack_into("<I16s", page, 16, len(body), xxhash.xxh3_128_digest(body))


def read_header(page: bytes | memoryview) -> SnapshotFacts | None:
    """The facts of a complete snapshot; None for anything else, also if it is garbled."""
    if len(page) < _HEAD.size:
        return None
    magic, state, length, digest = _HEAD.unpack_from(page, 0)
    body = bytes(page[_HEAD.size : _HEAD.size + length])
    if magic != _MAGIC or state != SlotState.COMPLETE or len(body) != length or xxhash.xxh3_128_digest(body) != digest:
        return None
    try:
        return parse_record(body, SnapshotFacts)
    except MalformedJsonError:
        return None


class Slot:
    """An open slot. Its writer locks it alone, readers share the lock. Locks are flock's: the kernel releases them when the
    process ends, however it ends."""

    def __init__(self, path: str, *, descriptor: int, writable: bool) -> None:
        self.path = path
        self._descriptor = descriptor
        self._writable = writable
        self._map: memoryview | None = None
        self.locked = False

    @classmethod
    def make(cls, path: str, *, size_bytes: int) -> "Slot":
        """The slot at `path`; an existing one of that size keeps its content. Raises: CheckpointError if there is no memory."""
        total_bytes = HEADER_BYTES + size_bytes
        try:
            if (found := cls.find(path, size_bytes=size_bytes)) is not None:
                return found
            # Another layout: the content is of no use, and a new file lets readers keep the old one.
            with suppress(FileNotFoundError):
                os.unlink(path)  # noqa: PTH108
            # While it is empty, it is being allocated.
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            made = os.fstat(descriptor)
            try:
                if (huge := make_huge_file(os.path.dirname(path), total_bytes)) is not None:  # noqa: PTH120
                    os.close(descriptor)
                    descriptor = huge
                # Allocate all of it now: if memory ran out during a copy, SIGBUS would end the process.
                os.posix_fallocate(descriptor, 0, total_bytes)
                if huge is not None:
                    if os.stat(path).st_ino != made.st_ino:  # noqa: PTH116
                        raise OSError(errno.EEXIST, "another process has made it meanwhile")
                    os.unlink(path)  # noqa: PTH108
                    # With a folder's descriptor, which an absolute path does not use, Python follows the link.
                    os.link(f"/proc/self/fd/{huge}", path, src_dir_fd=huge, follow_symlinks=True)
            except BaseException:
                os.close(descriptor)
                with suppress(OSError):
                    if os.stat(path).st_ino == made.st_ino:  # noqa: PTH116
                        os.unlink(path)  # noqa: PTH108
                raise
            return cls(path, descriptor=descriptor, writable=True)
        except OSError as error:
            # An existing file stays: a slot that could not be opened may hold a good snapshot.
            raise CheckpointError(f"{path} cannot get {total_bytes} bytes of host memory: {error.strerror}") from error

    @classmethod
    def find(cls, path: str, *, size_bytes: int) -> "Slot | None":
        """An existing slot of that size, to write; None if there is none. Raises: OSError."""
        with suppress(FileNotFoundError):
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            if os.fstat(descriptor).st_size == HEADER_BYTES + size_bytes:
                return cls(path, descriptor=descriptor, writable=True)
            os.close(descriptor)
        return None

    @classmethod
    def open(cls, path: str) -> "Slot":
        """An existing slot, for reading. Raises: OSError, also if it is too short."""
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        if os.fstat(descriptor).st_size < HEADER_BYTES:
            os.close(descriptor)
            raise OSError(errno.EINVAL, "it is no slot", path)
        return cls(path, descriptor=descriptor, writable=False)

    @classmethod
    def hold(cls, path: str, *, wait_s: float = 0.0) -> "Slot | None":
        """An existing slot, locked against its writer; None if the writer keeps the lock for `wait_s`. Raises: OSError."""
        slot, deadline = cls.open(path), time.monotonic() + wait_s
        with ExitStack() as undo:
            undo.callback(slot.close)
            while not slot.lock(shared=True):
                if time.monotonic() >= deadline:
                    return None
                time.sleep(_POLL_S)
            undo.pop_all()
        return slot

    def is_current(self) -> bool:
        """Whether `path` still names this file."""
        try:
            named, own = os.stat(self.path, follow_symlinks=False), os.fstat(self._descriptor)  # noqa: PTH116
        except FileNotFoundError:
            return False
        return (named.st_dev, named.st_ino) == (own.st_dev, own.st_ino)

    @property
    def map(self) -> memoryview:
        """The whole file, mapped. The first touch of each page takes longer than reading it. Tensors over it keep it mapped."""
        if self._map is None:
            size_bytes = os.fstat(self._descriptor).st_size
            if self._writable:
                self._map = map_aligned(self._descriptor, size_bytes)
            else:
                self._map = memoryview(mmap.mmap(self._descriptor, size_bytes, access=mmap.ACCESS_READ))
        return self._map

    @property
    def data(self) -> memoryview:
        return self.map[HEADER_BYTES:]

    def read_into(self, buffer: memoryview, *, start: int) -> None:
        """Fill `buffer` with the snapshot's bytes from `start`. Raises: OSError, also if there are fewer."""
        done = 0
        while done < len(buffer):
            count = os.preadv(self._descriptor, [buffer[done:]], HEADER_BYTES + start + done)
            if count == 0:
                raise OSError(errno.EIO, "it ends too early", self.path)
            done += count

    def read_snapshot(self, buffer: memoryview, start: int) -> None:
        """`read_into` for readers that verify: a copy does not change afterwards. Raises: TransientStorageError."""
        try:
            self.read_into(buffer, start=start)
        except OSError as error:
            raise TransientStorageError(f"{self.path} cannot be read: {error}") from error

    @property
    def facts(self) -> SnapshotFacts | None:
        return read_header(os.pread(self._descriptor, HEADER_BYTES, 0))

    def lock(self, *, shared: bool) -> bool:
        """Try to lock; False if another process holds the lock."""
        taken = try_lock(self._descriptor, shared=shared)
        self.locked = self.locked or taken
        return taken

    def unlock(self) -> None:
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        self.locked = False

    def begin(self) -> None:
        """Mark the content as torn. The caller holds the exclusive lock."""
        mark(self.map[:HEADER_BYTES], SlotState.WRITING)

    def complete(self, facts: SnapshotFacts) -> None:
        """Mark the snapshot as complete. The caller has put all bytes in place."""
        page = self.map[:HEADER_BYTES]
        write_body(page, facts)
        mark(page, SlotState.COMPLETE)

    def close(self) -> None:
        """Unmap and close, which releases the lock. May be called again."""
        self._map = None
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def facts_in(path: str) -> SnapshotFacts | None:
    """The facts of the snapshot in the slot at `path`, if it exists and is complete."""
    try:
        with closing(Slot.open(path)) as slot:
            return slot.facts
    except OSError:
        return None


ReadSnapshot = Callable[[memoryview, int], None]  # fills a buffer from an offset of a snapshot. Raises: StorageError


class SnapshotSource:
    """A snapshot set, read like a checkpoint in a store; keys are file names."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.resources = ExitStack()
        self.remote = False  # whether anything was read from other hosts
        # By name: the snapshot's reader, the file's offset in it, its size in bytes, and whether it is on another host.
        self._files: dict[str, tuple[ReadSnapshot, int, int, bool]] = {}
        self._mapped: dict[str, memoryview] = {}  # by name: the snapshot, if it is mapped in this process

    def add(
        self,
        layout: RankLayout,
        read: ReadSnapshot,
        *,
        incarnation: str,
        rank: int,
        remote: bool,
        mapped: memoryview | None = None,
    ) -> None:
        """Add the files of one rank's snapshot. `mapped`: all of its bytes, if they are mapped in this process."""
        for file, base in zip(layout.files(incarnation=incarnation, rank=rank), layout.starts, strict=True):
            self._files[file.name] = (read, base, file.size_bytes, remote)
            if mapped is not None:
                self._mapped[file.name] = mapped

    def mapped(self, key: str, start: int, end: int) -> memoryview | None:
        """Bytes [start, end) of a file, if its snapshot is mapped in this process. Raises: ObjectNotFoundError."""
        _, base, size_bytes, _ = self._file(key)
        data = self._mapped.get(key)
        return data[base + start : base + end] if data is not None and end <= size_bytes else None

    def read(self, key: str, *, start: int = 0, end: int | None = None) -> bytes:
        """Bytes [start, end) of a file. Raises: ObjectNotFoundError, StorageError."""
        size_bytes = self._file(key)[2]
        buffer = bytearray(max(0, min(size_bytes if end is None else end, size_bytes) - start))
        self.read_into(key, memoryview(buffer), start=start)
        return bytes(buffer)

    def read_into(self, key: str, buffer: memoryview, *, start: int = 0) -> int:
        """Fill `buffer` from offset `start`; returns the bytes read. Raises: ObjectNotFoundError, StorageError."""
        read, base, size_bytes, remote = self._file(key)
        view = buffer.cast("B")
        count = max(0, min(len(view), size_bytes - start))
        if count:
            read(view[:count], base + start)
            self.remote = self.remote or remote
        return count

    def _file(self, key: str) -> tuple[ReadSnapshot, int, int, bool]:
        if key not in self._files:
            raise ObjectNotFoundError(f"{self.url}/{key} is in no host's memory")
        return self._files[key]
