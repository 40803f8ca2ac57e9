"""All regular files below a folder, and a word about what else is there."""

import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack
from threading import Lock

from elastictrain.errors import IrregularFileError, ObjectNotFoundError, PermanentStorageError
from elastictrain.storage.posix import Place, describe, opened_folder
from elastictrain.storage.retry import Retrying
from elastictrain.storage.store import TEMPORARY_PREFIX

_DEEPEST = 32
"""Folders below the root in which files are looked for; no key of ours has so many parts."""

_TOLD_AT_MOST = 100

logger = logging.getLogger(__name__)


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


def walk_files(root: str, prefix: str, *, passed_over: PassedOver, retrying: Retrying, url: str) -> Iterator[tuple[str, Place]]:
    """All files below `prefix`, which is '' or ends with '/', in order of their names relative to the root.

    With each name comes the file's place, which is good until the next file is asked for.

    Raises: StorageError; IrregularFileError if `prefix` itself, or a folder above it, is irregular.
    """
    with ExitStack() as handles:

        def scan() -> tuple[int, tuple[str, ...]]:
            handle = handles.enter_context(opened_folder(root, prefix.rstrip("/")))
            return handle, _names(handle, prefix=prefix, root=root, passed_over=passed_over)

        try:
            handle, names = retrying.call(scan, action="list", url=f"{url}/{prefix}")
        except ObjectNotFoundError:
            return
        except PermanentStorageError as error:
            if prefix and isinstance(error.__cause__, NotADirectoryError):
                return
            raise
        for name in names:
            if not name.endswith("/"):
                yield prefix + name, Place(handle, name, f"{root}/{prefix}{name}")
                continue
            try:
                yield from walk_files(root, prefix + name, passed_over=passed_over, retrying=retrying, url=url)
            except IrregularFileError:
                passed_over.tell(f"{root}/{prefix}{name[:-1]}", "is a folder no more")


def _names(handle: int, *, prefix: str, root: str, passed_over: PassedOver) -> tuple[str, ...]:
    """Names of files, and those of folders with a '/', in order."""
    names = []
    descriptor = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=handle)
    try:
        with os.scandir(descriptor) as entries:
            for entry in entries:
                is_folder = entry.is_dir(follow_symlinks=False)
                if why := _why_passed_over(entry, is_folder=is_folder, depth=prefix.count("/")):
                    passed_over.tell(f"{root}/{prefix}{entry.name}", why)
                else:
                    names.append(f"{entry.name}/" if is_folder else entry.name)
    finally:
        os.close(descriptor)
    return tuple(sorted(names))


def _why_passed_over(entry: "os.DirEntry[str]", *, is_folder: bool, depth: int) -> str | None:
    try:
        entry.name.encode()
    except UnicodeEncodeError:
        return "has a name that is not UTF-8"
    if is_folder and entry.name.startswith(TEMPORARY_PREFIX):
        return "is a folder with the name of a temporary file"
    if is_folder:
        return f"is a folder {depth + 1} levels down" if depth >= _DEEPEST else None
    if entry.is_file(follow_symlinks=False):
        return None
    try:
        kind = describe(entry.stat(follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return None
    return f"is {kind}" if kind else None
