"""A local file under construction: nobody sees it before it is whole and durable."""

import os
from collections.abc import Callable
from contextlib import suppress

from elastictrain.storage.posix import DurableFolders, begin_writeback, sync_folder, write_all
from elastictrain.storage.store import Bytes
from elastictrain.storage.temporaries import temporary_name, this_writer

_GATHER_BYTES = 1 << 20
_WRITEBACK_BYTES = 16 << 20
_PRUNED_AT_MOST = 20
"""How often others may remove the new file's folder, as an empty one, between our making and using it."""


class UnfinishedFile:
    """A temporary file in the folder of its target; `finish` or `discard` ends it."""

    def __init__(self, path: str, *, folders: DurableFolders) -> None:
        self._path = path
        self._folder = os.path.dirname(path)  # noqa: PTH120
        self._sync = folders.sync
        self._temporary = f"{self._folder}/{temporary_name(this_writer())}"
        self._gathered = bytearray()
        self._written = self._on_its_way = 0
        for chance in range(_PRUNED_AT_MOST):
            try:
                folders.make(self._folder)
                self._descriptor = os.open(self._temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
                break
            except FileNotFoundError:
                folders.forget(self._folder)
                if chance == _PRUNED_AT_MOST - 1:
                    raise

    def write(self, data: Bytes) -> None:
        """Appends; small pieces are gathered."""
        view = memoryview(data).cast("B")
        if len(self._gathered) + len(view) <= _GATHER_BYTES:
            self._gathered += view
        else:
            self._flush()
            write_all(self._descriptor, view)
            self._written += len(view)
            if self._written - self._on_its_way >= _WRITEBACK_BYTES:
                # The kernel would let gigabytes wait for the fsync, and the disk would be idle until then.
                begin_writeback(self._descriptor, self._on_its_way, self._written - self._on_its_way)
                self._on_its_way = self._written

    def finish(self, publish: Callable[[str, str], None]) -> None:
        """Makes the content durable, gives it its name by `publish(temporary, path)`, and makes the name durable."""
        self._flush()
        if self._sync:
            os.fsync(self._descriptor)
        descriptor, self._descriptor = self._descriptor, -1
        # A network file system sends what is left when a file is closed, and tells only then that there is no room for it.
        os.close(descriptor)
        publish(self._temporary, self._path)
        with suppress(FileNotFoundError):
            os.unlink(self._temporary)  # noqa: PTH108
        if self._sync:
            sync_folder(self._folder)

    def discard(self) -> None:
        """Removes the file; never raises, because it runs when something else already has gone wrong."""
        with suppress(OSError):
            if self._descriptor >= 0:
                os.close(self._descriptor)
        with suppress(OSError):
            os.unlink(self._temporary)  # noqa: PTH108

    def _flush(self) -> None:
        gathered, self._gathered = self._gathered, bytearray()
        write_all(self._descriptor, memoryview(gathered))
        self._written += len(gathered)
