"""Store on a POSIX file system.

A write is a temporary file in the folder of its target, fsync, rename, fsync of the folder. `create` links the finished
temporary file instead of renaming it, so that the name appears once only and never without its content.
"""

import os
import stat as stat_modes
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

from elastictrain.errors import ObjectNotFoundError
from elastictrain.storage.keys import TEMPORARY_PREFIX, check_key, folder_of
from elastictrain.storage.posix import DurableFolders, publish_new, sync_folder
from elastictrain.storage.retry import Retrying
from elastictrain.storage.store import Bytes, ObjectInfo
from elastictrain.storage.temporaries import is_abandoned, start_of, this_writer
from elastictrain.storage.unfinished import UnfinishedFile

T = TypeVar("T")


class LocalStore:
    """Objects are files below a folder, which the first write makes. See `Store` for what each method promises."""

    def __init__(self, root: str, *, url: str, retrying: Retrying, sync: bool = True) -> None:
        """`root` is an absolute path; `url` is what the user wrote for it; `sync`: what is written outlasts a loss of power."""
        self._root = root.rstrip("/")
        self._url = url
        self._retrying = retrying
        self._folders = DurableFolders(self._root, sync=sync)

    @property
    def url(self) -> str:
        return self._url

    @property
    def root(self) -> str:
        """The folder that holds all objects."""
        return self._root

    def path(self, key: str) -> str:
        """The file that holds the object."""
        check_key(key, url=self._url)
        return f"{self._root}/{key}"

    def without_sync(self) -> "LocalStore":
        """The same store for what need not outlast a loss of power: still whole or not there, but nothing waits for the disk.

        While gigabytes are on their way to that disk, an fsync of a few bytes takes seconds.
        """
        return LocalStore(self._root, url=self._url, retrying=self._retrying, sync=False)

    def read(self, key: str, *, start: int = 0, end: int | None = None) -> bytes:
        path = self.path(key)

        def request(_: int) -> bytes:
            with _opened(path) as (descriptor, size_bytes):
                position, last = start, size_bytes if end is None else min(end, size_bytes)
                pieces = []
                while position < last and (piece := os.pread(descriptor, last - position, position)):
                    pieces.append(piece)
                    position += len(piece)
                return pieces[0] if len(pieces) == 1 else b"".join(pieces)

        return self._try("read", key, request)

    def read_into(self, key: str, buffer: memoryview, *, start: int = 0) -> int:
        path, view = self.path(key), buffer.cast("B")

        def request(_: int) -> int:
            with _opened(path) as (descriptor, _size):
                done = 0
                while done < len(view) and (count := os.preadv(descriptor, [view[done:]], start + done)):
                    done += count
                return done

        return self._try("read", key, request)

    def write(self, key: str, data: Bytes) -> None:
        path = self.path(key)
        self._try("write", key, lambda _: self._put(path, data, os.rename))

    def create(self, key: str, data: Bytes) -> None:
        path = self.path(key)

        def request(attempt: int) -> None:
            try:
                self._put(path, data, publish_new)
            except FileExistsError:
                # On a network file system an attempt may have succeeded although its answer was lost.
                if attempt == 1 or self.read(key) != data:
                    raise

        self._try("create", key, request)

    @contextmanager
    def open_writer(self, key: str) -> Iterator["_Writer"]:
        path = self.path(key)
        file = self._try("write", key, lambda _: UnfinishedFile(path, folders=self._folders))
        # A failed write of a stream has no second chance: nobody has the earlier bytes any more.
        once = self._retrying.once()

        def act(request: Callable[[], None]) -> None:
            once.call(lambda _: request(), action="write", url=f"{self._url}/{key}")

        try:
            yield _Writer(file, act)
            act(lambda: file.finish(os.rename))
        except BaseException:
            file.discard()
            raise

    def stat(self, key: str) -> ObjectInfo:
        path = self.path(key)

        def request(_: int) -> ObjectInfo:
            found = os.stat(path)  # noqa: PTH116
            if stat_modes.S_ISDIR(found.st_mode):
                raise FileNotFoundError(path)
            return ObjectInfo(key, found.st_size, found.st_mtime)

        return self._try("find", key, request)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        folder = folder_of(prefix)
        if folder:
            check_key(folder[:-1], url=self._url)
        for key in self._walk(folder):
            if not _is_temporary(key):
                try:
                    yield self.stat(key)
                except ObjectNotFoundError:
                    continue

    def delete(self, key: str) -> None:
        path = self.path(key)
        folder = os.path.dirname(path)  # noqa: PTH120

        def request(_: int) -> None:
            try:
                os.unlink(path)  # noqa: PTH108
                if self._folders.sync:
                    sync_folder(folder)
            except FileNotFoundError:
                pass
            # A folder is no object: none may be left where the last object of it was.
            self._folders.prune(folder)

        self._try("delete", key, request)

    def sweep_temporaries(self, prefix: str = "") -> tuple[str, ...]:
        """Removes unfinished files below `prefix` whose writers certainly are dead; returns their names."""
        here = this_writer()
        names = [
            name
            for name in self._walk(folder_of(prefix))
            if is_abandoned(name.rpartition("/")[2], here=here, start_of=start_of)
        ]
        for name in names:
            with suppress(FileNotFoundError):
                os.unlink(f"{self._root}/{name}")  # noqa: PTH108
            self._folders.prune(os.path.dirname(f"{self._root}/{name}"))  # noqa: PTH120
        return tuple(names)

    def _put(self, path: str, data: Bytes, publish: Callable[[str, str], None]) -> None:
        file = UnfinishedFile(path, folders=self._folders)
        try:
            file.write(data)
            file.finish(publish)
        except BaseException:
            file.discard()
            raise

    def _walk(self, folder: str) -> Iterator[str]:
        """Names of all files below `folder` relative to the root, in order of their whole names."""

        def request(_: int) -> list[str]:
            try:
                with os.scandir(f"{self._root}/{folder}") as entries:
                    return sorted(f"{entry.name}/" if entry.is_dir() else entry.name for entry in entries)
            except FileNotFoundError:
                return []
            except NotADirectoryError:
                if folder == "":
                    raise
                return []

        for name in self._try("list", folder, request):
            if name.endswith("/"):
                yield from self._walk(folder + name)
            else:
                yield folder + name

    def _try(self, action: str, key: str, request: Callable[[int], T]) -> T:
        return self._retrying.call(request, action=action, url=f"{self._url}/{key}")


class _Writer:
    """What callers of `open_writer` get."""

    def __init__(self, file: UnfinishedFile, act: Callable[[Callable[[], None]], None]) -> None:
        self._file = file
        self._act = act

    def write(self, data: Bytes) -> None:
        self._act(lambda: self._file.write(data))


def _is_temporary(key: str) -> bool:
    return key.rpartition("/")[2].startswith(TEMPORARY_PREFIX)


@contextmanager
def _opened(path: str) -> Iterator[tuple[int, int]]:
    """Descriptor and size of a file."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        found = os.fstat(descriptor)
        if stat_modes.S_ISDIR(found.st_mode):
            raise FileNotFoundError(path)
        yield descriptor, found.st_size
    finally:
        os.close(descriptor)
