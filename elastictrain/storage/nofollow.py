"""Opening folders and files relative to a folder's handle, waiting for nobody, and following no link unless told to.

Below the root of a store there are folders and regular files. A link could lead to files of somebody else, and opening a FIFO
could take for ever, so that neither is read, written or deleted, nor is a socket or a device. Handles are opened from the root
down, one name at a time: a folder that somebody replaces with a link between two calls is not used either.
"""

import logging
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import NoReturn

from elastictrain.errors import IrregularFileError

_TOLD_AT_MOST = 100

logger = logging.getLogger(__name__)


def describe(mode: int) -> str | None:
    """What has the name, if it is neither a folder nor a regular file."""
    if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
        return None
    if stat.S_ISLNK(mode):
        return "a symbolic link"
    if stat.S_ISFIFO(mode):
        return "a FIFO"
    return "a socket" if stat.S_ISSOCK(mode) else "a device"


@contextmanager
def opened_folder(root: str, folder: str) -> Iterator[int]:
    """Handle of a folder below `root`; '' is `root` itself, which may be a link.

    Raises: OSError; IrregularFileError.
    """
    handle = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        path = root
        for name in folder.split("/") if folder else ():
            path = f"{path}/{name}"
            child = open_subfolder(name, parent=handle, path=path)
            os.close(handle)
            handle = child
        yield handle
    finally:
        os.close(handle)


def open_subfolder(name: str, *, parent: int, path: str) -> int:
    """Handle of a folder in `parent`; `path` is for messages. Raises: OSError; IrregularFileError."""
    try:
        return os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    except OSError as error:
        _raise_explained(error, name, parent=parent, path=path)


def open_regular(name: str, flags: int, *, parent: int, path: str, mode: int = 0o666, follow: bool = False) -> int:
    """Descriptor of a regular file in `parent`; `path` is for messages, `mode` for a file that is made.

    `follow`: a link may stand for the file, which is only read.

    Raises: OSError, FileNotFoundError also where a folder has the name; IrregularFileError.
    """
    safe = os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    try:
        descriptor = os.open(name, flags | safe, mode, dir_fd=parent)
    except OSError as error:
        _raise_explained(error, name, parent=parent, path=path, follow=follow)
    found = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(found):
        os.close(descriptor)
        refuse_irregular(found, path=path)
        raise FileNotFoundError(path)
    return descriptor


def look_at(name: str, *, parent: int, path: str, follow: bool = False) -> os.stat_result:
    """Facts of a regular file or folder in `parent`; `path` is for messages, `follow` as in `open_regular`.

    Raises: OSError; IrregularFileError.
    """
    found = os.stat(name, dir_fd=parent, follow_symlinks=follow)
    refuse_irregular(found.st_mode, path=path)
    return found


def refuse_irregular(mode: int, *, path: str) -> None:
    """Raises: IrregularFileError if the mode is of neither a folder nor a regular file."""
    if kind := describe(mode):
        raise IrregularFileError(
            f"{path} must be a file or a folder, but is {kind}, which is neither followed nor read, written or deleted; "
            "remove it, or put what it stands for in its place"
        )


def _raise_explained(error: OSError, name: str, *, parent: int, path: str, follow: bool = False) -> NoReturn:
    """The reason in words, where it is what has the name: its number is ELOOP, ENOTDIR or ENXIO."""
    try:
        look_at(name, parent=parent, path=path, follow=follow)
    except OSError:
        raise error from None
    raise error


class PassedOver:
    """Tells of what a listing leaves out, once each."""

    def __init__(self) -> None:
        self._told: set[str] = set()
        self._lock = Lock()

    def tell(self, path: str, why: str) -> None:
        """`why` completes the sentence that starts with the path."""
        with self._lock:
            if path in self._told or len(self._told) > _TOLD_AT_MOST:
                return
            self._told.add(path)
            last = len(self._told) > _TOLD_AT_MOST
        if last:
            logger.warning("more is passed over than is told here")
        else:
            # A name may hold any bytes.
            logger.warning("%s %s: passed over", path.encode(errors="backslashreplace").decode(), why)
