"""One slot: a file in host memory with room for one snapshot of one rank; its writer maps it, others read it like a file."""

import errno
import fcntl
import mmap
import os
from contextlib import suppress

from elastictrain.checkpoint.memory.header import SlotState, SnapshotFacts, mark, read_header, write_body
from elastictrain.checkpoint.memory.layout import HEADER_BYTES
from elastictrain.errors import CheckpointError


class Slot:
    """An open slot.

    Locks are flock's, which end with the process that holds them, however it ends: a writer holds the slot alone, readers
    share it.
    """

    def __init__(self, path: str, *, descriptor: int, writable: bool) -> None:
        self.path = path
        self._descriptor = descriptor
        self._access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        self._map: mmap.mmap | None = None
        self.locked = False

    @classmethod
    def make(cls, path: str, *, size_bytes: int) -> "Slot":
        """The slot at `path` with room for `size_bytes`; an existing one of that size is kept with what is in it.

        Raises: CheckpointError if the memory is not there.
        """
        total_bytes = HEADER_BYTES + size_bytes
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            if os.fstat(descriptor).st_size != total_bytes:
                # Another layout: what is in it is of no use to anybody, and a new file lets readers keep the old one.
                os.close(descriptor)
                with suppress(FileNotFoundError):
                    os.unlink(path)  # noqa: PTH108
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
                try:
                    # All of it now: memory that runs out later would end the process with SIGBUS in the middle of a copy.
                    os.posix_fallocate(descriptor, 0, total_bytes)
                except BaseException:
                    os.close(descriptor)
                    with suppress(OSError):
                        os.unlink(path)  # noqa: PTH108
                    raise
            return cls(path, descriptor=descriptor, writable=True)
        except OSError as error:
            # What was there before stays: a slot that could not be opened may hold a good snapshot.
            raise CheckpointError(f"{path} cannot get {total_bytes} bytes of host memory: {error.strerror}") from error

    @classmethod
    def open(cls, path: str) -> "Slot":
        """An existing slot, for reading. Raises: OSError, also if it is too short to be one."""
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            if os.fstat(descriptor).st_size < HEADER_BYTES:
                raise OSError(errno.EINVAL, "it is no slot", path)
            return cls(path, descriptor=descriptor, writable=False)
        except BaseException:
            os.close(descriptor)
            raise

    def is_current(self) -> bool:
        """Whether the file is still the one of that name."""
        try:
            named, own = os.stat(self.path, follow_symlinks=False), os.fstat(self._descriptor)  # noqa: PTH116
        except FileNotFoundError:
            return False
        return (named.st_dev, named.st_ino) == (own.st_dev, own.st_ino)

    @property
    def map(self) -> mmap.mmap:
        """The whole file in this process's memory. The first touch of each page takes longer than reading it."""
        if self._map is None:
            self._map = mmap.mmap(self._descriptor, os.fstat(self._descriptor).st_size, access=self._access)
        return self._map

    @property
    def data(self) -> memoryview:
        """The snapshot's bytes, mapped."""
        return memoryview(self.map)[HEADER_BYTES:]

    def read_into(self, buffer: memoryview, *, start: int) -> None:
        """Fill `buffer` with the snapshot's bytes from `start`. Raises: OSError, also if there are fewer."""
        done = 0
        while done < len(buffer):
            count = os.preadv(self._descriptor, [buffer[done:]], HEADER_BYTES + start + done)
            if count == 0:
                raise OSError(errno.EIO, "it ends too early", self.path)
            done += count

    @property
    def facts(self) -> SnapshotFacts | None:
        """What is in the slot now, if it is whole."""
        return read_header(os.pread(self._descriptor, HEADER_BYTES, 0))

    def lock(self, *, shared: bool) -> bool:
        """Try to lock; False if somebody else holds the slot."""
        try:
            fcntl.flock(self._descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        self.locked = True
        return True

    def unlock(self) -> None:
        """Let go."""
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        self.locked = False

    def begin(self) -> None:
        """From now on what is in the slot is torn. Only with the lock held alone."""
        mark(memoryview(self.map)[:HEADER_BYTES], SlotState.WRITING)

    def complete(self, facts: SnapshotFacts) -> None:
        """All bytes are in place: from now on it is a whole snapshot."""
        page = memoryview(self.map)[:HEADER_BYTES]
        write_body(page, facts)
        mark(page, SlotState.COMPLETE)

    def close(self) -> None:
        """Unmap and let go."""
        if self._map is not None:
            # Tensors over the map keep it mapped until they go.
            with suppress(BufferError):
                self._map.close()
        os.close(self._descriptor)
