"""A local file under construction: nobody sees it before it is whole and durable."""

import os
from contextlib import suppress
from typing import Protocol

from elastictrain.storage.nofollow import open_regular
from elastictrain.storage.posix import DurableFolders, begin_writeback, sync_folder, write_all
from elastictrain.storage.store import Bytes
from elastictrain.storage.temporaries import temporary_name, this_writer

_GATHER_BYTES = 1 << 20
_WRITEBACK_BYTES = 16 << 20
_PRUNED_AT_MOST = 20
"""How often others may remove the new file's folder, as an empty one, between our making and using it."""


class PublishFile(Protocol):
    """Gives a finished file its name, in the same folder: `publish` or `publish_new`."""

    def __call__(self, finished: str, target: str, /, *, folder: int, path: str) -> None:
        """`folder` is a handle; `path` is for messages."""


class UnfinishedFile:
    """A temporary file in the folder of its target; `finish` or `discard` ends it.

    It keeps a handle of the folder: what somebody puts in the folder's place meanwhile is not touched.
    """

    def __init__(self, key: str, *, folders: DurableFolders, mode: int = 0o666) -> None:
        """Raises: OSError; IrregularFileError."""
        folder, _, self._name = key.rpartition("/")
        self._path = f"{folders.root}/{key}"
        self._sync = folders.sync
        self._mode = mode
        self._temporary = temporary_name(this_writer())
        self._gathered = bytearray()
        self._written = self._on_its_way = 0
        self._folder = self._descriptor = -1
        for chance in range(_PRUNED_AT_MOST):
            try:
                self._begin(folders, folder)
                break
            except FileNotFoundError:
                folders.forget(folder)
                if chance == _PRUNED_AT_MOST - 1:
                    raise

    def _begin(self, folders: DurableFolders, folder: str) -> None:
        self._folder = folders.make(folder)
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
            self._descriptor = open_regular(self._temporary, flags, parent=self._folder, path=self._path, mode=self._mode)
        except BaseException:
            self._close()
            raise

    @property
    def owner(self) -> int:
        """The user that the file system takes this process for."""
        return os.fstat(self._descriptor).st_uid

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

    def finish(self, publish: PublishFile) -> None:
        """Makes the content durable, gives it its name, and makes the name durable."""
        self._flush()
        if self._sync:
            os.fsync(self._descriptor)
        descriptor, self._descriptor = self._descriptor, -1
        # A network file system sends what is left when a file is closed, and tells only then that there is no room for it.
        os.close(descriptor)
        publish(self._temporary, self._name, folder=self._folder, path=self._path)
        with suppress(FileNotFoundError):
            os.unlink(self._temporary, dir_fd=self._folder)
        if self._sync:
            sync_folder(self._folder)
        self._close()

    def discard(self) -> None:
        """Removes the file; never raises, because it runs when something else already has gone wrong."""
        if self._folder >= 0:
            with suppress(OSError):
                os.unlink(self._temporary, dir_fd=self._folder)
        self._close()

    def _close(self) -> None:
        descriptors, self._descriptor, self._folder = (self._descriptor, self._folder), -1, -1
        for descriptor in descriptors:
            with suppress(OSError):
                if descriptor >= 0:
                    os.close(descriptor)

    def _flush(self) -> None:
        gathered, self._gathered = self._gathered, bytearray()
        write_all(self._descriptor, memoryview(gathered))
        self._written += len(gathered)
