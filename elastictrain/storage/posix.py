"""Making files and folders so that they outlast a loss of power."""

import ctypes
import errno
import os
from contextlib import AbstractContextManager, suppress
from threading import Lock

from elastictrain.storage.nofollow import look_at, open_subfolder, opened_folder

_RENAME_NOREPLACE = 1
_SYNC_FILE_RANGE_WRITE = 2


def write_all(descriptor: int, view: memoryview) -> None:
    """Writes every byte, in as many calls as it takes (Linux moves at most 2 GiB in one)."""
    while len(view) > 0:
        view = view[os.write(descriptor, view) :]


def begin_writeback(descriptor: int, start: int, size_bytes: int) -> None:
    """Asks the kernel to begin to write a range to disk, where it can; waits for nothing and promises nothing."""
    sync_file_range = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if sync_file_range is not None:
        offset = ctypes.c_int64
        sync_file_range(ctypes.c_int(descriptor), offset(start), offset(size_bytes), ctypes.c_uint(_SYNC_FILE_RANGE_WRITE))


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


def publish(finished: str, target: str, *, folder: int, path: str) -> None:
    """Gives a finished file in a folder another name there, in the place of the file that has it; `path` is for messages.

    Raises: OSError; IrregularFileError.
    """
    with suppress(FileNotFoundError):
        look_at(target, parent=folder, path=path)
    os.rename(finished, target, src_dir_fd=folder, dst_dir_fd=folder)


def publish_new(finished: str, target: str, *, folder: int, path: str) -> None:
    """Gives a finished file in a folder a second or another name there, unless that is taken; `path` is for messages.

    Raises: FileExistsError; OSError; IrregularFileError.
    """
    try:
        _link_new(finished, target, folder=folder)
    except FileExistsError:
        with suppress(FileNotFoundError):
            look_at(target, parent=folder, path=path)
        raise


def _link_new(finished: str, target: str, *, folder: int) -> None:
    try:
        os.link(finished, target, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
        return
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK):
            raise
    # No hard links here (FAT, some FUSE file systems): a rename that refuses to replace is as good.
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        raise OSError(errno.ENOTSUP, "the file system has no hard links and this system no renameat2", target)
    if renameat2(folder, os.fsencode(finished), folder, os.fsencode(target), _RENAME_NOREPLACE) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), target)


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

    def opened(self, folder: str) -> AbstractContextManager[int]:
        """Handle of a folder that is there. Raises: OSError; IrregularFileError."""
        return opened_folder(self.root, folder)

    def make(self, folder: str) -> int:
        """Makes `folder` and what is missing above it; returns its handle, for the caller to close.

        Raises: OSError, FileNotFoundError if somebody removes it meanwhile; IrregularFileError.
        """
        handle, made = self._make_root(), ""
        try:
            for name in folder.split("/") if folder else ():
                made = f"{made}/{name}".lstrip("/")
                child = self._make_in(handle, name, folder=made)
                os.close(handle)
                handle = child
        except BaseException:
            os.close(handle)
            raise
        return handle

    def _make_in(self, parent: int, name: str, *, folder: str) -> int:
        path = f"{self.root}/{folder}"
        try:
            child = open_subfolder(name, parent=parent, path=path)
        except FileNotFoundError:
            self.forget(folder)
            with suppress(FileExistsError):
                os.mkdir(name, dir_fd=parent)
            child = open_subfolder(name, parent=parent, path=path)
        with self._lock:
            durable = folder in self._durable or not self.sync
        if not durable:
            try:
                # Also where the folder was there: another process may have made it a moment ago and not got to its fsync.
                sync_folder(parent)
            except BaseException:
                os.close(child)
                raise
            with self._lock:
                self._durable.add(folder)
        return child

    def _make_root(self) -> int:
        flags = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
        with suppress(FileNotFoundError):
            return os.open(self.root, flags)
        missing = [self.root]
        while not os.path.lexists(above := os.path.dirname(missing[-1])):  # noqa: PTH120
            missing.append(above)
        # Somebody may make one of them, as a folder or not, and remove it again: opening the root tells.
        with suppress(FileExistsError):
            os.makedirs(self.root, exist_ok=True)  # noqa: PTH103
        for one in missing:
            with opened_folder(os.path.dirname(one), "") as handle:  # noqa: PTH120
                sync_folder(handle)
        return os.open(self.root, flags)

    def forget(self, folder: str) -> None:
        """`folder` turned out to be gone: somebody deleted the last object in it."""
        with self._lock:
            self._durable = {known for known in self._durable if known != folder and not known.startswith(f"{folder}/")}

    def prune(self, folder: str) -> None:
        """Removes `folder` and folders above it as long as they are empty and below the root."""
        while folder:
            self.forget(folder)
            above, _, name = folder.rpartition("/")
            with suppress(FileNotFoundError), self.opened(above) as handle:
                try:
                    os.rmdir(name, dir_fd=handle)
                except OSError as error:
                    if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.EBUSY):
                        return
                    raise
            folder = above
