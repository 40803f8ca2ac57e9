"""Store on a POSIX file system.

A write is a temporary file in the target's folder, fsync, rename, fsync of the folder. `create` links the finished temporary
file instead of renaming it, so that the name appears only once and never without its content.
Only the root itself may be a link, unless links are followed.
"""

import logging
import os
import stat as stat_modes
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import TypeVar
from urllib.parse import unquote

from elastictrain.errors import IrregularFileError, ObjectNotFoundError, PermanentStorageError
from elastictrain.storage.failures import Retrying
from elastictrain.storage.posix import (
    DurableFolders,
    Place,
    UnfinishedFile,
    describe,
    is_abandoned,
    opened_folder,
    sync_folder,
)
from elastictrain.storage.private import guard_secret, refuse_secret, who_else_may_write
from elastictrain.storage.store import TEMPORARY_PREFIX, Bytes, ObjectInfo, check_key, folder_of
from elastictrain.storage.writers import process_name

T = TypeVar("T")

_FOR_ALL = 0o666  # less the user's umask
SECRET = 0o600  # mode of a file that only this user can read

LOCAL_PROTOCOLS = ("file", "local")

_DEEPEST = 32  # folders below the root that a listing enters; no key of this package has so many parts
_TOLD_AT_MOST = 100

logger = logging.getLogger(__name__)


def local_path(url: str) -> str | None:
    """The folder on this host that a path or URL names; None for a remote URL."""
    protocol, separator, rest = url.partition("://")
    if not separator:
        return os.path.abspath(os.path.expanduser(url))  # noqa: PTH100, PTH111
    return unquote(rest) if protocol in LOCAL_PROTOCOLS and rest.startswith("/") else None


class LocalStore:
    """Objects are files below a folder that the first write makes. `Store` documents the methods."""

    def __init__(self, root: str, *, url: str, retrying: Retrying, follow_links: bool = False) -> None:
        """`root` is absolute. `follow_links`: a read by name may follow a link to a regular file; writes and deletes never."""
        self.root = os.path.realpath(root)  # the folder of all objects; no part of it is a link
        self.url = url
        self._retrying = retrying
        self._follow_links = follow_links
        self._folders = DurableFolders(self.root)
        self._passed_over: set[str] = set()

    def path(self, key: str) -> str:
        check_key(key, url=self.url)
        return f"{self.root}/{key}"

    def without_sync(self) -> "LocalStore":
        """The same store for objects that need not survive a power loss: writes stay atomic but do not wait for the disk.

        While gigabytes are being written to that disk, an fsync of a few bytes takes seconds.
        """
        volatile = copy(self)
        volatile._folders = DurableFolders(self.root, sync=False)
        return volatile

    def read(self, key: str, *, start: int = 0, end: int | None = None) -> bytes:
        """Raises: ObjectNotFoundError, also if a folder has the name; else as `Store`."""

        def request() -> bytes:
            with self._opened(key) as (descriptor, size_bytes):
                position, last = start, size_bytes if end is None else min(end, size_bytes)
                pieces = []
                while position < last and (piece := os.pread(descriptor, last - position, position)):
                    pieces.append(piece)
                    position += len(piece)
                return pieces[0] if len(pieces) == 1 else b"".join(pieces)

        return self._try("read", key, request)

    def read_into(self, key: str, buffer: memoryview, *, start: int = 0) -> int:
        """Reads into `buffer` itself. Raises: as `read`."""
        view = buffer.cast("B")

        def request() -> int:
            with self._opened(key) as (descriptor, _size):
                done = 0
                while done < len(view) and (count := os.preadv(descriptor, [view[done:]], start + done)):
                    done += count
                return done

        return self._try("read", key, request)

    def write(self, key: str, data: Bytes) -> None:
        self._try("write", key, lambda: self._put(key, data, new=False))

    def create(self, key: str, data: Bytes, *, mode: int = _FOR_ALL) -> None:
        """`mode`: less the umask. A retry that finds a file with `data` counts it as made by this call."""
        repeated = False

        def request() -> None:
            """Raises: FileExistsError, unless an earlier attempt of this call may have made the file; OSError."""
            nonlocal repeated
            first, repeated = not repeated, True
            try:
                self._put(key, data, new=True, mode=mode)
            except FileExistsError:
                # On a network file system an earlier attempt may have succeeded although its answer was lost.
                if first or self.read(key) != data:
                    raise

        self._try("create", key, request)

    def read_secret(self, key: str, *, max_bytes: int) -> bytes:
        """The first `max_bytes` of a file of mode `SECRET`. Raises: AccessDeniedError if it may belong to another user."""
        path = self.path(key)

        def own_uid() -> int:
            with UnfinishedFile(key, folders=self._folders, mode=SECRET) as probe:
                return probe.owner

        def request() -> bytes:
            with self._place(key) as place:
                refuse_secret(place.look(follow=self._follow_links), path=path, own_uid=own_uid)
            with self._opened(key) as (descriptor, _size):
                guard_secret(descriptor, path=path, own_uid=own_uid)
                return os.pread(descriptor, max_bytes, 0)

        return self._try("read", key, request)

    @contextmanager
    def open_writer(self, key: str) -> Iterator["_Writer"]:
        # A failed write of a stream cannot be retried: its earlier bytes are no longer held.
        act = partial(self._retrying.once().call, action="write", url=f"{self.url}/{key}")
        with self._try("write", key, lambda: UnfinishedFile(key, folders=self._folders)) as file:
            yield _Writer(lambda data: act(lambda: file.write(data)))
            act(lambda: file.finish(new=False))

    def open_appended(self, key: str, *, make: bool = True) -> int:
        """Open a growing file for reading and appending; without `make` only in an existing folder.

        Its name is durable only after `make_durable`. Raises: OSError; IrregularFileError.
        """
        path, flags = self.path(key), os.O_RDWR | os.O_CREAT | os.O_APPEND
        if not make:
            with self._place(key) as place:
                return place.open(flags)
        folder, _, name = key.rpartition("/")
        handle = DurableFolders(self.root, sync=False).make(folder)
        try:
            return Place(handle, name, path).open(flags)
        finally:
            os.close(handle)

    def make_durable(self, key: str) -> None:
        """Make the name of an object durable, unless its folder was deleted. Raises: OSError; IrregularFileError."""
        folder = key.rpartition("/")[0]
        # If the run was deleted, its folder must not be made again.
        with opened_folder(self.root, folder) as handle:
            os.close(DurableFolders(self.root).make(folder))
            sync_folder(handle)

    def is_blocked(self, key: str) -> bool:
        """Whether the object can neither exist nor be written, because something else has its name or that of its folder.

        Raises: StorageError, also if something else has the name of a folder further up: then no other folder beside this one
            would help.
        """

        def request() -> bool:
            """Raises: OSError of what is further up."""
            try:
                with self._place(key) as place:
                    return stat_modes.S_ISDIR(place.look().st_mode)
            except FileNotFoundError:
                return False
            except (IrregularFileError, NotADirectoryError):
                with opened_folder(self.root, key.rpartition("/")[0].rpartition("/")[0]):
                    return True

        return self._try("find", key, request)

    def who_else_may_write(self, key: str) -> str:
        """Who besides this user and root may write to the file, its folders or the root, as far as they exist; '' if nobody.
        Raises: StorageError."""

        def request() -> str:
            path = self.root
            for part in ("", *key.split("/")):
                path = f"{path}/{part}" if part else path
                with suppress(FileNotFoundError):
                    if why := who_else_may_write(path, os.lstat(path), own_uid=os.getuid()):
                        return why
            return ""

        return self._try("find", key, request)

    def stat(self, key: str) -> ObjectInfo:
        def request() -> ObjectInfo:
            with self._place(key) as place:
                return _info(key, place, follow=self._follow_links)

        return self._try("find", key, request)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Lazy: leaves out what is deleted meanwhile. Passes over unfinished files, and logs irregular ones."""
        folder = folder_of(prefix, url=self.url)
        for key, place in self._walk(folder):
            if place.name.startswith(TEMPORARY_PREFIX):
                continue
            try:
                yield self._try("find", key, partial(_info, key, place, follow=False))
            except ObjectNotFoundError:
                continue
            except IrregularFileError:
                self._pass_over(place.path, "is a file no more")

    def delete(self, key: str) -> None:
        self._try("delete", key, lambda: self._delete(key))

    def sweep_temporaries(self, prefix: str = "") -> tuple[str, ...]:
        """Delete unfinished files below `prefix` whose writers are certainly dead; return their names."""
        abandoned = partial(is_abandoned, here=process_name())
        names = [name for name, place in self._walk(folder_of(prefix)) if abandoned(place.name)]
        for name in names:
            with suppress(FileNotFoundError):
                self._delete(name)
        return tuple(names)

    def _put(self, key: str, data: Bytes, *, new: bool, mode: int = _FOR_ALL) -> None:
        with UnfinishedFile(key, folders=self._folders, mode=mode) as file:
            file.write(data)
            file.finish(new=new)

    @contextmanager
    def _opened(self, key: str) -> Iterator[tuple[int, int]]:
        with self._place(key) as place:
            descriptor = place.open(os.O_RDONLY, follow=self._follow_links)
        try:
            yield descriptor, os.fstat(descriptor).st_size
        finally:
            os.close(descriptor)

    @contextmanager
    def _place(self, key: str) -> Iterator[Place]:
        """The file's place, whether the file exists or not. Its folder must exist."""
        folder, _, name = key.rpartition("/")
        with opened_folder(self.root, folder) as handle:
            yield Place(handle, name, f"{self.root}/{key}")

    def _delete(self, key: str) -> None:
        """Delete the file if it exists, and folders that become empty."""
        with suppress(FileNotFoundError), self._place(key) as place:
            place.look()
            os.unlink(place.name, dir_fd=place.folder)
            if self._folders.sync:
                sync_folder(place.folder)
        self._folders.prune(key.rpartition("/")[0])

    def _walk(self, prefix: str) -> Iterator[tuple[str, Place]]:
        """Yield name (relative to the root) and place of each file below `prefix` ('' or ending with '/'), in name order.

        A place is valid until the next one is requested.
        Raises: StorageError; IrregularFileError if `prefix` itself, or a folder above it, is irregular.
        """
        with ExitStack() as handles:

            def scan() -> tuple[int, tuple[str, ...]]:
                handle = handles.enter_context(opened_folder(self.root, prefix.rstrip("/")))
                return handle, self._names(handle, prefix=prefix)

            try:
                handle, names = self._retrying.call(scan, action="list", url=f"{self.url}/{prefix}")
            except ObjectNotFoundError:
                return
            except PermanentStorageError as error:
                if prefix and isinstance(error.__cause__, NotADirectoryError):
                    return
                raise
            for name in names:
                if not name.endswith("/"):
                    yield prefix + name, Place(handle, name, f"{self.root}/{prefix}{name}")
                    continue
                try:
                    yield from self._walk(prefix + name)
                except IrregularFileError:
                    self._pass_over(f"{self.root}/{prefix}{name[:-1]}", "is a folder no more")

    def _names(self, handle: int, *, prefix: str) -> tuple[str, ...]:
        """Names in order; those of folders end with '/'."""
        names = []
        descriptor = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=handle)
        try:
            with os.scandir(descriptor) as entries:
                for entry in entries:
                    is_folder = entry.is_dir(follow_symlinks=False)
                    if why := _why_passed_over(entry, is_folder=is_folder, depth=prefix.count("/")):
                        self._pass_over(f"{self.root}/{prefix}{entry.name}", why)
                    else:
                        names.append(f"{entry.name}/" if is_folder else entry.name)
        finally:
            os.close(descriptor)
        return tuple(sorted(names))

    def _pass_over(self, path: str, why: str) -> None:
        """Log once per path what a listing skips; `why` completes the sentence that starts with the path."""
        if path in self._passed_over or len(self._passed_over) > _TOLD_AT_MOST:
            return
        self._passed_over.add(path)
        if len(self._passed_over) > _TOLD_AT_MOST:
            logger.warning("more objects are skipped than are listed here")
        else:
            # A name may hold any bytes.
            logger.warning("%s %s: skipped", path.encode(errors="backslashreplace").decode(), why)

    def _try(self, action: str, key: str, request: Callable[[], T]) -> T:
        check_key(key, url=self.url)
        return self._retrying.call(request, action=action, url=f"{self.url}/{key}")


@dataclass(frozen=True, slots=True)
class _Writer:
    write: Callable[[Bytes], None]


def _info(key: str, place: Place, *, follow: bool) -> ObjectInfo:
    found = place.look(follow=follow)
    if stat_modes.S_ISDIR(found.st_mode):
        raise FileNotFoundError(key)
    return ObjectInfo(key, found.st_size, found.st_mtime)


def _why_passed_over(entry: "os.DirEntry[str]", *, is_folder: bool, depth: int) -> str | None:
    try:
        entry.name.encode()
    except UnicodeEncodeError:
        return "has a name that is not UTF-8"
    if is_folder and entry.name.startswith(TEMPORARY_PREFIX):
        return "is a folder with the name of a temporary file"
    if is_folder and depth >= _DEEPEST:
        return f"is a folder {depth + 1} levels down"
    kind = None
    if not is_folder and not entry.is_file(follow_symlinks=False):
        with suppress(FileNotFoundError):
            kind = describe(entry.stat(follow_symlinks=False).st_mode)
    return f"is {kind}" if kind else None
