"""Making files and folders so that they outlast a loss of power."""

import ctypes
import errno
import os
import stat
from contextlib import suppress
from threading import Lock

_AT_FDCWD = -100
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


def sync_folder(folder: str) -> None:
    """Makes the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network and FUSE file systems know no fsync of folders: there the server answers for names.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
            raise
    finally:
        os.close(descriptor)


def publish_new(finished: str, target: str) -> None:
    """Gives a finished file a second or another name, unless that name is taken.

    Raises: FileExistsError.
    """
    try:
        os.link(finished, target)
        return
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK):
            raise
    # No hard links here (FAT, some FUSE file systems): a rename that refuses to replace is as good.
    _rename_new(finished, target)


def _rename_new(finished: str, target: str) -> None:
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        raise OSError(errno.ENOTSUP, "the file system has no hard links and this system no renameat2", target)
    if renameat2(_AT_FDCWD, os.fsencode(finished), _AT_FDCWD, os.fsencode(target), _RENAME_NOREPLACE) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), target)


def _is_no_folder(path: str) -> bool:
    """Whether something else has that name. One look: two could see a folder that goes in between as something else."""
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        return False
    return not os.path.isdir(path) if stat.S_ISLNK(mode) else not stat.S_ISDIR(mode)  # noqa: PTH112


class DurableFolders:
    """Makes folders under a root, and each one's name durable the first time that this process uses it."""

    def __init__(self, root: str, *, sync: bool = True) -> None:
        """Without `sync` no more is made durable than the root, if it is new: for what a loss of power may take."""
        self._root = root
        self.sync = sync
        self._durable: set[str] = set()
        self._lock = Lock()

    def make(self, folder: str) -> None:
        """Makes `folder`, which is the root or below it, and what is missing above it."""
        with self._lock:
            if folder in self._durable:
                return
            chain = [folder]
            while chain[-1] != "/" and (chain[-1].startswith(f"{self._root}/") or not os.path.lexists(chain[-1])):
                chain.append(os.path.dirname(chain[-1]))  # noqa: PTH120
            sync = self.sync or not os.path.isdir(self._root)  # noqa: PTH112
            try:
                os.makedirs(folder, exist_ok=True)  # noqa: PTH103
            except FileExistsError as error:
                if not any(_is_no_folder(one) for one in chain):
                    # Somebody has made it and removed it again while it was made here.
                    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), folder) from error
                # A file is where a folder must be; nobody may take this for an object that exists.
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), folder) from error
            for parent in chain[1:] if sync else ():
                # Also where the folder was there: another process may have made it a moment ago and not got to its fsync.
                sync_folder(parent)
            self._durable.add(folder)

    def forget(self, folder: str) -> None:
        """`folder` turned out to be gone: somebody deleted the last object in it."""
        with self._lock:
            self._durable = {known for known in self._durable if known != folder and not known.startswith(f"{folder}/")}

    def prune(self, folder: str) -> None:
        """Removes `folder` and folders above it as long as they are empty and below the root."""
        while folder.startswith(f"{self._root}/"):
            self.forget(folder)
            with suppress(FileNotFoundError):
                try:
                    os.rmdir(folder)  # noqa: PTH106
                except OSError as error:
                    if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.EBUSY):
                        return
                    raise
            folder = os.path.dirname(folder)  # noqa: PTH120
