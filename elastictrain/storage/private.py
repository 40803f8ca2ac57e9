"""Files and folders for this user alone, where every user of the host can create names: /tmp, host memory, a run's folder.

Another user can take such a name first, with a folder, a link or a FIFO. None of these is followed or used.
"""

import errno
import fcntl
import logging
import os
import pwd
import secrets
import stat
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress

from elastictrain.errors import HostUnfitError
from elastictrain.storage.failures import reason_of

logger = logging.getLogger(__name__)

_FOR_OTHERS = 0o077
_STALE_S = 3600.0


class NameTakenError(PermissionError):
    """A path that should be this user's alone is not; the message names what it is, and the remedy."""

    def __init__(self, why: str) -> None:
        super().__init__(errno.EACCES, why)


def why_not_private(path: str, found: os.stat_result, *, folder: bool, own_uid: int) -> str:
    """Why a path is not for user `own_uid` alone, and the remedy; '' if it is. `found` is from `lstat` or `fstat`. Pure."""
    right_kind = stat.S_ISDIR(found.st_mode) if folder else stat.S_ISREG(found.st_mode)
    if right_kind and found.st_uid == own_uid and not found.st_mode & _FOR_OTHERS:
        return ""
    kind, use = ("folder", "enter") if folder else ("file", "read and write")
    who = "its owner or root" if found.st_uid != own_uid else "you"
    return (
        f"{path} must be a {kind} that user {_user(own_uid)} alone can {use}, but it belongs to user {_user(found.st_uid)} and "
        f"is {stat.filemode(found.st_mode)}; it must be removed by {who}"
    )


def who_else_may_write(path: str, found: os.stat_result, *, own_uid: int) -> str:
    """Who besides root and user `own_uid` may write to a file or folder, as a sentence; '' if nobody. Pure."""
    if found.st_uid not in (own_uid, 0):
        return f"{path} belongs to user {_user(found.st_uid)}"
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not stat.S_ISLNK(found.st_mode):
        return f"others may write to {path} ({stat.filemode(found.st_mode)}); `chmod go-w` changes that"
    return ""


def make_private_folder(path: str) -> None:
    """Make a folder for this user alone, or use an existing one. Raises: OSError; NameTakenError if it is anything else."""
    with suppress(FileExistsError):
        os.mkdir(path, 0o700)  # noqa: PTH102
    # lstat, because a link would lead to a folder that another user may own.
    if why := why_not_private(path, os.lstat(path), folder=True, own_uid=os.getuid()):
        raise NameTakenError(why)


def make_private_folders(path: str) -> None:
    """The same for a folder and its parent, which the end of another run may remove meanwhile."""
    parent = os.path.dirname(path)  # noqa: PTH120
    try:
        make_private_folder(parent)
        make_private_folder(path)
    except FileNotFoundError:
        make_private_folder(parent)
        make_private_folder(path)


def clear_folder(path: str, *, last: str = "") -> None:
    """Remove a folder and its files, the file named `last` last, and its parent if that is empty; never raises."""
    with suppress(OSError):
        for entry in sorted(os.scandir(path), key=lambda entry: entry.name == last):
            with suppress(OSError):
                os.unlink(entry.path)  # noqa: PTH108
    remove_if_empty(path)


def remove_if_empty(path: str) -> None:
    """Remove a folder, and its parent, as far as they are empty; never raises."""
    for folder in (path, os.path.dirname(path)):  # noqa: PTH120
        with suppress(OSError):
            os.rmdir(folder)  # noqa: PTH106


def sweep_folders(parent: str, *, clear: Callable[[str], bool], now: float | None = None) -> list[str]:
    """Clear folders older than an hour that killed processes left below `parent`; return those for which `clear` is true.

    The age counts because a new folder is not locked at once. `clear` returns whether no process held the folder; OSError
    means that one did.
    """
    cleared = []
    with suppress(OSError):
        for entry in list(os.scandir(parent)):
            with suppress(OSError):
                age_s = (time.time() if now is None else now) - entry.stat(follow_symlinks=False).st_mtime
                if entry.is_dir(follow_symlinks=False) and age_s > _STALE_S and clear(entry.path):
                    cleared.append(entry.path)
    return cleared


def open_private_file(path: str) -> int:
    """Open or create a file for this user alone, for reading and writing. Raises: OSError; NameTakenError if it is not that."""
    try:
        # O_NONBLOCK: a FIFO of another user must not block this process.
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        descriptor = os.open(path, flags, 0o600)
    except OSError as error:
        with suppress(FileNotFoundError):
            if why := why_not_private(path, os.lstat(path), folder=False, own_uid=os.getuid()):
                raise NameTakenError(why) from error
        raise
    if why := why_not_private(path, os.fstat(descriptor), folder=False, own_uid=os.getuid()):
        os.close(descriptor)
        raise NameTakenError(why)
    return descriptor


def try_lock(descriptor: int, *, shared: bool = False) -> bool:
    """Lock an open file; False if another process holds the lock. The kernel releases it when the process ends."""
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def write_file(path: str, data: bytes) -> None:
    """Replace a file atomically by one for this user alone. Raises: OSError."""
    # An unpredictable name: in a folder for all, another user could have put a link there.
    unfinished = f"{path}.{os.getpid()}-{secrets.token_hex(4)}.tmp"
    try:
        descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        os.rename(unfinished, path)  # noqa: PTH104
    except BaseException:
        with suppress(OSError):
            os.unlink(unfinished)  # noqa: PTH108
        raise


def temporary_folder() -> str:
    """This user's own temporary folder, for names that libraries open without checks. Raises: HostUnfitError."""
    path = f"{tempfile.gettempdir()}/elastictrain-{os.getuid()}"
    try:
        make_private_folder(path)
    except OSError as error:
        raise HostUnfitError(f"{reason_of(error)}; or set TMPDIR to a folder of your own") from error
    return path


def guard_secret(descriptor: int, *, path: str, own_uid: Callable[[], int]) -> None:
    """Close an open secret file to other users, with a warning. Raises: NameTakenError if it belongs to another user.

    `own_uid` is called if another user seems to own it: a file server may have a number of its own for this user.
    """
    found = os.fstat(descriptor)
    refuse_secret(found, path=path, own_uid=own_uid)
    if not found.st_mode & _FOR_OTHERS:
        return
    with suppress(OSError):
        os.fchmod(descriptor, 0o600)
    if os.fstat(descriptor).st_mode & _FOR_OTHERS:
        # CIFS and some FUSE file systems show one mode for all files: every user who can enter the mount may read them.
        logger.warning("%s holds a secret, and its file system lets other users of this host read it", path)
    else:
        logger.warning(
            "%s holds a secret that other users of this host could read until now; if you do not trust them, delete it while "
            "nothing of this run is running",
            path,
        )


def refuse_secret(found: os.stat_result, *, path: str, own_uid: Callable[[], int]) -> None:
    """Raises: NameTakenError for a secret that belongs to another user."""
    if found.st_uid != os.getuid() and found.st_uid != (own := own_uid()):
        raise NameTakenError(why_not_private(path, found, folder=False, own_uid=own))


def _user(uid: int) -> str:
    try:
        return f"{uid} ({pwd.getpwuid(uid).pw_name})"
    except KeyError:
        return str(uid)
