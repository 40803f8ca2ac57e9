"""Files and folders below a root: opened without following links, written whole, and made to outlast a loss of power.

Below the root of a store there are folders and regular files. A link could lead to files of somebody else, and opening a FIFO
could take for ever, so that neither is read, written or deleted, nor is a socket or a device. Handles are opened from the root
down, one name at a time: a folder that somebody replaces with a link between two calls is not used either.
"""

import ctypes
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Self

from elastictrain.errors import IrregularFileError
from elastictrain.storage.store import TEMPORARY_PREFIX, Bytes
from elastictrain.storage.writers import is_dead, process_name

_RENAME_NOREPLACE = 1
_SYNC_FILE_RANGE_WRITE = 2
_GATHER_BYTES = 1 << 20
_WRITEBACK_BYTES = 16 << 20
_PRUNED_AT_MOST = 20  # how often others may remove the new file's folder, as an empty one, between our making and using it
_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC


_IRREGULAR = {stat.S_IFLNK: "a symbolic link", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}


def describe(mode: int) -> str | None:
    """What has the name, if it is neither a folder nor a regular file."""
    return None if stat.S_ISREG(mode) or stat.S_ISDIR(mode) else _IRREGULAR.get(stat.S_IFMT(mode), "a device")


@dataclass(frozen=True, slots=True)
class Place:
    """A name in an open folder. Its methods raise OSError, and IrregularFileError for what is neither file nor folder."""

    folder: int  # a handle
    name: str
    path: str  # for messages

    def look(self, *, follow: bool = False) -> os.stat_result:
        """Facts of what has the name. `follow`: a link may stand for a file, which is only read."""
        found = os.stat(self.name, dir_fd=self.folder, follow_symlinks=follow)
        self._refuse_irregular(found)
        return found

    def open(self, flags: int, *, mode: int = 0o666, follow: bool = False) -> int:
        """Descriptor of a regular file; `mode` is for one that is made, `follow` as in `look`.

        Raises: FileNotFoundError also where a folder has the name.
        """
        safe = os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
        descriptor = self._open(flags | safe, mode, follow=follow)
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            os.close(descriptor)
            self._refuse_irregular(found)
            raise FileNotFoundError(self.path)
        return descriptor

    def open_folder(self) -> int:
        """Handle of a folder."""
        return self._open(_FOLDER | os.O_NOFOLLOW, 0, follow=False)

    def _open(self, flags: int, mode: int, *, follow: bool) -> int:
        try:
            return os.open(self.name, flags, mode, dir_fd=self.folder)
        except OSError:
            # What has the name says more than its number, which is ELOOP, ENOTDIR or ENXIO.
            with suppress(OSError):
                self.look(follow=follow)
            raise

    def _refuse_irregular(self, found: os.stat_result) -> None:
        if kind := describe(found.st_mode):
            raise IrregularFileError(
                f"{self.path} must be a file or a folder, but is {kind}, which is neither followed nor read, written or "
                "deleted; remove it, or put what it stands for in its place"
            )


@contextmanager
def opened_folder(root: str, folder: str) -> Iterator[int]:
    """Handle of a folder below `root`; '' is `root` itself, which may be a link. Raises: OSError; IrregularFileError."""
    handle, path = os.open(root, _FOLDER), root
    try:
        for name in folder.split("/") if folder else ():
            path = f"{path}/{name}"
            child = Place(handle, name, path).open_folder()
            os.close(handle)
            handle = child
        yield handle
    finally:
        os.close(handle)


def sync_folder(handle: int) -> None:
    """Makes the names in a folder durable."""
    # A handle that may be opened without reading the folder cannot be synced.
    descriptor = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=handle)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network and FUSE file systems know no fsync of folders: there the server answers for names.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
            raise
    finally:
        os.close(descriptor)


def publish(finished: str, target: Place, *, new: bool) -> None:
    """Gives a finished file another name in its folder: a `new` one, or that of the file whose place it takes.

    Raises: FileExistsError if a new name is taken; OSError; IrregularFileError.
    """
    with suppress(FileNotFoundError):
        target.look()
    if not new:
        os.rename(finished, target.name, src_dir_fd=target.folder, dst_dir_fd=target.folder)
        return
    try:
        os.link(finished, target.name, src_dir_fd=target.folder, dst_dir_fd=target.folder, follow_symlinks=False)
        return
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK):
            raise
    # No hard links here (FAT, some FUSE file systems): a rename that refuses to replace is as good.
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        raise OSError(errno.ENOTSUP, "the file system has no hard links and this system no renameat2", target.name)
    names = os.fsencode(finished), os.fsencode(target.name)
    if renameat2(target.folder, names[0], target.folder, names[1], _RENAME_NOREPLACE) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), target.name)


class DurableFolders:
    """Opens and makes folders under a root, and makes each one's name durable the first time that this process uses it.

    Folders are named relative to the root, which is ''.
    """

    def __init__(self, root: str, *, sync: bool = True) -> None:
        """Without `sync` no more is made durable than the root, if it is new: for what a loss of power may take."""
        self.root = root
        self.sync = sync
        self._durable: set[str] = set()
        self._lock = Lock()

    def make(self, folder: str) -> int:
        """Makes `folder` and what is missing above it; returns its handle, for the caller to close.

        Raises: OSError, FileNotFoundError if somebody removes it meanwhile; IrregularFileError.
        """
        handle, made = self._make_root(), ""
        for name in folder.split("/") if folder else ():
            made = f"{made}/{name}".lstrip("/")
            try:
                child = self._make_in(Place(handle, name, f"{self.root}/{made}"), folder=made)
            finally:
                os.close(handle)
            handle = child
        return handle

    def _make_in(self, place: Place, *, folder: str) -> int:
        try:
            child = place.open_folder()
        except FileNotFoundError:
            self.forget(folder)
            with suppress(FileExistsError):
                os.mkdir(place.name, dir_fd=place.folder)
            child = place.open_folder()
        if self.sync and folder not in self._durable:
            try:
                # Also where the folder was there: another process may have made it a moment ago and not got to its fsync.
                sync_folder(place.folder)
            except BaseException:
                os.close(child)
                raise
            with self._lock:
                self._durable.add(folder)
        return child

    def _make_root(self) -> int:
        with suppress(FileNotFoundError):
            return os.open(self.root, _FOLDER)
        missing = [self.root]
        while not os.path.lexists(above := os.path.dirname(missing[-1])):  # noqa: PTH120
            missing.append(above)
        # Somebody may make one of them, as a folder or not, and remove it again: opening the root tells.
        with suppress(FileExistsError):
            os.makedirs(self.root, exist_ok=True)  # noqa: PTH103
        for one in missing:
            with opened_folder(os.path.dirname(one), "") as handle:  # noqa: PTH120
                sync_folder(handle)
        return os.open(self.root, _FOLDER)

    def forget(self, folder: str) -> None:
        """`folder` turned out to be gone: somebody deleted the last object in it."""
        with self._lock:
            self._durable = {known for known in self._durable if known != folder and not known.startswith(f"{folder}/")}

    def prune(self, folder: str) -> None:
        """Removes `folder` and folders above it as long as they are empty and below the root."""
        while folder:
            self.forget(folder)
            above, _, name = folder.rpartition("/")
            try:
                with opened_folder(self.root, above) as handle:
                    os.rmdir(name, dir_fd=handle)
            except FileNotFoundError:
                pass
            except OSError as error:
                if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.EBUSY):
                    return
                raise
            folder = above


class UnfinishedFile:
    """A temporary file in the folder of its target; unless `finish` ended it, its context leaves nothing of it.

    It keeps a handle of the folder: what somebody puts in the folder's place meanwhile is not touched.
    """

    def __init__(self, key: str, *, folders: DurableFolders, mode: int = 0o666) -> None:
        """Raises: OSError; IrregularFileError."""
        folder, _, self._name = key.rpartition("/")
        self._path = f"{folders.root}/{key}"
        self._sync = folders.sync
        self._temporary = temporary_name(process_name())
        self._gathered = bytearray()
        self._written = self._on_its_way = 0
        self._folder = self._descriptor = -1
        for chances_left in reversed(range(_PRUNED_AT_MOST)):
            try:
                self._folder = folders.make(folder)
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
                self._descriptor = Place(self._folder, self._temporary, self._path).open(flags, mode=mode)
                break
            except BaseException as error:
                self._close()
                if not isinstance(error, FileNotFoundError) or not chances_left:
                    raise
                folders.forget(folder)

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
            self._write_through(view)
            if self._written - self._on_its_way >= _WRITEBACK_BYTES:
                self._begin_writeback()

    def finish(self, *, new: bool) -> None:
        """Makes the content durable, gives it its name as `publish` does, and makes the name durable."""
        self._flush()
        if self._sync:
            os.fsync(self._descriptor)
        descriptor, self._descriptor = self._descriptor, -1
        # A network file system sends what is left when a file is closed, and tells only then that there is no room for it.
        os.close(descriptor)
        publish(self._temporary, Place(self._folder, self._name, self._path), new=new)
        with suppress(FileNotFoundError):
            os.unlink(self._temporary, dir_fd=self._folder)
        if self._sync:
            sync_folder(self._folder)
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # Never raises: it runs when something else already has gone wrong.
        if self._folder >= 0:
            with suppress(OSError):
                os.unlink(self._temporary, dir_fd=self._folder)
        self._close()

    def _begin_writeback(self) -> None:
        """Asks the kernel, where it can, to begin now: it would let gigabytes wait for the fsync, and the disk be idle."""
        sync_file_range = getattr(ctypes.CDLL(None), "sync_file_range", None)
        if sync_file_range is not None:
            start, size_bytes = ctypes.c_int64(self._on_its_way), ctypes.c_int64(self._written - self._on_its_way)
            sync_file_range(ctypes.c_int(self._descriptor), start, size_bytes, ctypes.c_uint(_SYNC_FILE_RANGE_WRITE))
        self._on_its_way = self._written

    def _close(self) -> None:
        descriptors, self._descriptor, self._folder = (self._descriptor, self._folder), -1, -1
        for descriptor in descriptors:
            with suppress(OSError):
                if descriptor >= 0:
                    os.close(descriptor)

    def _flush(self) -> None:
        gathered, self._gathered = self._gathered, bytearray()
        self._write_through(memoryview(gathered))

    def _write_through(self, view: memoryview) -> None:
        self._written += len(view)
        # Linux moves at most 2 GiB in one call.
        while len(view) > 0:
            view = view[os.write(self._descriptor, view) :]


def temporary_name(writer: str) -> str:
    """A name that no other write has; it says which process writes, if that is known."""
    return f"{TEMPORARY_PREFIX}{writer}.{secrets.token_hex(8)}"


def is_abandoned(name: str, *, here: str, proc: Path = Path("/proc")) -> bool:
    """Whether the writer of the temporary file `name` is certainly gone; `here` names this process.

    Age says nothing: a write may take long, and clocks of hosts differ.
    """
    writer = name.removeprefix(TEMPORARY_PREFIX).rpartition(".")[0]
    return name.startswith(TEMPORARY_PREFIX) and is_dead(writer, here=here, proc=proc)
