"""Files and folders below a root: opened without following links, written atomically, made to survive a power loss.

Links, FIFOs, sockets and devices are neither read, written nor deleted: a link could lead to files of another user, and opening
a FIFO can block for ever. Handles are opened from the root down, one name at a time, so that a folder which is replaced by a
link between two calls is not used either.
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
_PRUNED_AT_MOST = 20  # how often others may remove the new, still empty folder before this process uses it
_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC


_IRREGULAR = {stat.S_IFLNK: "a symbolic link", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}


def describe(mode: int) -> str | None:
    """The type of an irregular file; None for a folder or a regular file."""
    return None if stat.S_ISREG(mode) or stat.S_ISDIR(mode) else _IRREGULAR.get(stat.S_IFMT(mode), "a device")


@dataclass(frozen=True, slots=True)
class Place:
    """A name in an open folder. Its methods raise OSError, and IrregularFileError for what is neither file nor folder."""

    folder: int  # an O_PATH handle
    name: str
    path: str  # for messages

    def look(self, *, follow: bool = False) -> os.stat_result:
        """`lstat` of the name, or `stat` with `follow`, for a file that is only read."""
        found = os.stat(self.name, dir_fd=self.folder, follow_symlinks=follow)
        self._refuse_irregular(found)
        return found

    def open(self, flags: int, *, mode: int = 0o666, follow: bool = False) -> int:
        """Descriptor of a regular file; `mode` is for a new one, `follow` as in `look`. FileNotFoundError also for a folder."""
        safe = os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
        descriptor = self._open(flags | safe, mode, follow=follow)
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            os.close(descriptor)
            self._refuse_irregular(found)
            raise FileNotFoundError(self.path)
        return descriptor

    def open_folder(self) -> int:
        return self._open(_FOLDER | os.O_NOFOLLOW, 0, follow=False)

    def _open(self, flags: int, mode: int, *, follow: bool) -> int:
        try:
            return os.open(self.name, flags, mode, dir_fd=self.folder)
        except OSError:
            # The file type explains more than the errno, which is ELOOP, ENOTDIR or ENXIO.
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
    """Make the names in an open folder durable, if its file system can do so. `handle` may be O_PATH. Raises: OSError."""
    # An O_PATH handle cannot be synced.
    descriptor = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=handle)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network and FUSE file systems do not support fsync of folders: there the server answers for names.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
            raise
    finally:
        os.close(descriptor)


def publish(finished: str, target: Place, *, new: bool) -> None:
    """Rename a finished file within its folder to `target`; with `new` only if that name is free.

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
    # No hard links here (FAT, some FUSE file systems): a rename that refuses to replace does the same.
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        raise OSError(errno.ENOTSUP, "the file system has no hard links and this system no renameat2", target.name)
    names = os.fsencode(finished), os.fsencode(target.name)
    if renameat2(target.folder, names[0], target.folder, names[1], _RENAME_NOREPLACE) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), target.name)


class DurableFolders:
    """Makes folders under a root, each name durable at its first use in this process. Names are relative to the root, ''."""

    def __init__(self, root: str, *, sync: bool = True) -> None:
        """Without `sync` only a new root is made durable: for objects that need not survive a power loss."""
        self.root = root
        self.sync = sync
        self._durable: set[str] = set()
        self._lock = Lock()

    def make(self, folder: str) -> int:
        """Make `folder` and its missing parents; return its handle, which the caller closes.

        Raises: OSError, FileNotFoundError if another process removes it meanwhile; IrregularFileError.
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
                # Also for an existing folder: the process that made it may not have reached its fsync.
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
        # Another process may make one of them, as a folder or not, and remove it again: opening the root shows which.
        with suppress(FileExistsError):
            os.makedirs(self.root, exist_ok=True)  # noqa: PTH103
        for one in missing:
            with opened_folder(os.path.dirname(one), "") as handle:  # noqa: PTH120
                sync_folder(handle)
        return os.open(self.root, _FOLDER)

    def forget(self, folder: str) -> None:
        """`folder` no longer exists: another process deleted the last object in it."""
        with self._lock:
            self._durable = {known for known in self._durable if known != folder and not known.startswith(f"{folder}/")}

    def prune(self, folder: str) -> None:
        """Remove `folder` and its parents as long as they are empty and below the root."""
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
    """A temporary file in the target's folder; its context deletes it unless `finish` published it.

    It keeps a handle of the folder: a folder that another process puts in its place is not touched.
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
        """The uid that the file system assigns to this process."""
        return os.fstat(self._descriptor).st_uid

    def write(self, data: Bytes) -> None:
        """Append; small pieces are buffered."""
        view = memoryview(data).cast("B")
        if len(self._gathered) + len(view) <= _GATHER_BYTES:
            self._gathered += view
        else:
            self._flush()
            self._write_through(view)
            if self._written - self._on_its_way < _WRITEBACK_BYTES:
                return
            # Start writeback now: the kernel would let gigabytes wait for the fsync while the disk is idle.
            sync_file_range = getattr(ctypes.CDLL(None), "sync_file_range", None)
            if sync_file_range is not None:
                start, size_bytes = ctypes.c_int64(self._on_its_way), ctypes.c_int64(self._written - self._on_its_way)
                sync_file_range(ctypes.c_int(self._descriptor), start, size_bytes, ctypes.c_uint(_SYNC_FILE_RANGE_WRITE))
            self._on_its_way = self._written

    def finish(self, *, new: bool) -> None:
        """Make the content durable, give it its name as `publish` does, and make the name durable."""
        self._flush()
        if self._sync:
            os.fsync(self._descriptor)
        descriptor, self._descriptor = self._descriptor, -1
        # A network file system sends the rest when the file is closed, and only then reports a full disk.
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
        # Never raises: it may run while another exception propagates.
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
        self._write_through(memoryview(gathered))

    def _write_through(self, view: memoryview) -> None:
        self._written += len(view)
        # Linux moves at most 2 GiB in one call.
        while len(view) > 0:
            view = view[os.write(self._descriptor, view) :]


def temporary_name(writer: str) -> str:
    """A unique name, which contains the name of the writing process if that is known."""
    return f"{TEMPORARY_PREFIX}{writer}.{secrets.token_hex(8)}"


def is_abandoned(name: str, *, here: str, proc: Path = Path("/proc")) -> bool:
    """Whether the writer of temporary file `name` has certainly ended; `here` names this process.

    Age proves nothing: a write may take long, and clocks of hosts differ.
    """
    writer = name.removeprefix(TEMPORARY_PREFIX).rpartition(".")[0]
    return name.startswith(TEMPORARY_PREFIX) and is_dead(writer, here=here, proc=proc)
