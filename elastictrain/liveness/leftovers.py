"""What the workers of a host and their watcher leave in memory when all of them are killed, and its removal."""

import fcntl
import os
import time
from contextlib import suppress

_STALE_S = 3600.0
"""A folder is not locked at once when it is made."""


def hold(folder: str) -> int:
    """Keep a folder from being swept, for the life of this process or of the returned descriptor. Raises: OSError."""
    descriptor = _open(folder)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def remove_folder(folder: str, *, with_files: bool) -> None:
    """Removes what is empty, or all of an incarnation; never raises."""
    with suppress(OSError):
        for entry in list(os.scandir(folder)) if with_files else ():
            with suppress(OSError):
                os.unlink(entry.path)  # noqa: PTH108
        os.rmdir(folder)  # noqa: PTH106
        os.rmdir(os.path.dirname(folder))  # noqa: PTH106, PTH120


def sweep(parent: str, *, now: float | None = None) -> list[str]:
    """Removes folders whose workers were all killed long ago, and their watcher with them; returns their paths."""
    removed = []
    with suppress(OSError):
        for entry in list(os.scandir(parent)):
            with suppress(OSError):
                age_s = (time.time() if now is None else now) - entry.stat(follow_symlinks=False).st_mtime
                if entry.is_dir(follow_symlinks=False) and age_s > _STALE_S:
                    _remove_if_abandoned(entry.path)
                    removed.append(entry.path)
    return removed


def _remove_if_abandoned(folder: str) -> None:
    """Raises: OSError if somebody holds it."""
    # By locks, not by process numbers: containers that share this memory do not know each other's numbers.
    descriptor = _open(folder)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        remove_folder(folder, with_files=True)
    finally:
        os.close(descriptor)


def _open(folder: str) -> int:
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
