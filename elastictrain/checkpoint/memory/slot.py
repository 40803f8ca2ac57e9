"""One slot: a file in host memory with room for one snapshot of one rank, mapped by whoever reads or writes it."""

import fcntl
import mmap
import os
from contextlib import suppress

from elastictrain.checkpoint.memory.header import SlotState, SnapshotFacts, mark, read_header, write_body
from elastictrain.checkpoint.memory.layout import HEADER_BYTES
from elastictrain.errors import CheckpointError


class Slot:
    """A mapped slot.

    Locks are flock's, which end with the process that holds them, however it ends: a writer holds the slot alone, readers
    share it.
    """

    def __init__(self, path: str, *, descriptor: int, writable: bool) -> None:
        self.path = path
        self._descriptor = descriptor
        size_bytes = os.fstat(descriptor).st_size
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        self.map = mmap.mmap(descriptor, size_bytes, access=access)
        self._view = memoryview(self.map)
        self.locked = False

    @classmethod
    def make(cls, path: str, *, size_bytes: int) -> "Slot":
        """The slot at `path` with room for `size_bytes`; an existing one of that size is kept with what is in it.

        Raises: CheckpointError if the memory is not there.
        """
        total_bytes = HEADER_BYTES + size_bytes
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                if os.fstat(descriptor).st_size != total_bytes:
                    # Another layout: what is in it is of no use to anybody, and a new file lets readers keep the old one.
                    os.close(descriptor)
                    with suppress(FileNotFoundError):
                        os.unlink(path)  # noqa: PTH108
                    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
                    # All of it now: memory that runs out later would end the process with SIGBUS in the middle of a copy.
                    os.posix_fallocate(descriptor, 0, total_bytes)
                return cls(path, descriptor=descriptor, writable=True)
            except BaseException:
                with suppress(OSError):
                    os.close(descriptor)
                raise
        except OSError as error:
            with suppress(OSError):
                os.unlink(path)  # noqa: PTH108
            raise CheckpointError(f"{path} cannot get {total_bytes} bytes of host memory: {error.strerror}") from error

    @classmethod
    def open(cls, path: str) -> "Slot":
        """An existing slot, for reading. Raises: OSError, also if it is too short to be one."""
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            if os.fstat(descriptor).st_size < HEADER_BYTES:
                raise OSError(0, "it is no slot", path)
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
    def data(self) -> memoryview:
        """The snapshot's bytes."""
        return self._view[HEADER_BYTES:]

    @property
    def facts(self) -> SnapshotFacts | None:
        """What is in the slot now, if it is whole."""
        return read_header(self._view[:HEADER_BYTES])

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
        mark(self._view[:HEADER_BYTES], SlotState.WRITING)

    def complete(self, facts: SnapshotFacts) -> None:
        """All bytes are in place: from now on it is a whole snapshot."""
        page = self._view[:HEADER_BYTES]
        write_body(page, facts)
        mark(page, SlotState.COMPLETE)

    def close(self) -> None:
        """Unmap and let go."""
        self._view.release()
        # Tensors over the map keep it mapped until they go.
        with suppress(BufferError):
            self.map.close()
        os.close(self._descriptor)
