"""Store on a POSIX file system.

A write is a temporary file in the folder of its target, fsync, rename, fsync of the folder. `create` links the finished
temporary file instead of renaming it, so that the name appears once only and never without its content.

Only the root itself may be a link, unless links are followed. Every folder and file is opened by `nofollow`.
"""

import os
import stat as stat_modes
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

from elastictrain.errors import IrregularFileError, ObjectNotFoundError
from elastictrain.storage.keys import TEMPORARY_PREFIX, check_key, folder_of
from elastictrain.storage.nofollow import PassedOver, look_at, open_regular
from elastictrain.storage.posix import DurableFolders, publish, publish_new, sync_folder
from elastictrain.storage.private import guard_secret, refuse_secret
from elastictrain.storage.retry import Retrying
from elastictrain.storage.store import Bytes, ObjectInfo
from elastictrain.storage.temporaries import is_abandoned, start_of, this_writer
from elastictrain.storage.unfinished import PublishFile, UnfinishedFile
from elastictrain.storage.walk import walk_files

T = TypeVar("T")

_FOR_ALL = 0o666
"""Less what the user's umask takes away."""

_SECRET = 0o600


class LocalStore:
    """Objects are files below a folder, which the first write makes. See `Store` for what each method promises."""

    def __init__(
        self,
        root: str,
        *,
        url: str,
        retrying: Retrying,
        sync: bool = True,
        follow_links: bool = False,
        passed_over: PassedOver | None = None,
    ) -> None:
        """`root` is an absolute path; `url` is what the user wrote for it; `sync`: what is written outlasts a loss of power.

        `follow_links`: an object may be a link to a regular file, when it is read by its name. Writes and deletions refuse it.
        """
        self._root = os.path.realpath(root)
        self._url = url
        self._retrying = retrying
        self._follow_links = follow_links
        self._folders = DurableFolders(self._root, sync=sync)
        self._passed_over = passed_over or PassedOver()

    @property
    def url(self) -> str:
        return self._url

    @property
    def root(self) -> str:
        """The folder that holds all objects; no part of it is a link."""
        return self._root

    def path(self, key: str) -> str:
        """The file that holds the object."""
        check_key(key, url=self._url)
        return f"{self._root}/{key}"

    def without_sync(self) -> "LocalStore":
        """The same store for what need not outlast a loss of power: still whole or not there, but nothing waits for the disk.

        While gigabytes are on their way to that disk, an fsync of a few bytes takes seconds.
        """
        return LocalStore(
            self._root,
            url=self._url,
            retrying=self._retrying,
            sync=False,
            follow_links=self._follow_links,
            passed_over=self._passed_over,
        )

    def read(self, key: str, *, start: int = 0, end: int | None = None) -> bytes:
        check_key(key, url=self._url)

        def request(_: int) -> bytes:
            with self._opened(key) as (descriptor, size_bytes):
                position, last = start, size_bytes if end is None else min(end, size_bytes)
                pieces = []
                while position < last and (piece := os.pread(descriptor, last - position, position)):
                    pieces.append(piece)
                    position += len(piece)
                return pieces[0] if len(pieces) == 1 else b"".join(pieces)

        return self._try("read", key, request)

    def read_into(self, key: str, buffer: memoryview, *, start: int = 0) -> int:
        check_key(key, url=self._url)
        view = buffer.cast("B")

        def request(_: int) -> int:
            with self._opened(key) as (descriptor, _size):
                done = 0
                while done < len(view) and (count := os.preadv(descriptor, [view[done:]], start + done)):
                    done += count
                return done

        return self._try("read", key, request)

    def write(self, key: str, data: Bytes) -> None:
        check_key(key, url=self._url)
        self._try("write", key, lambda _: self._put(key, data, publish))

    def create(self, key: str, data: Bytes) -> None:
        self._create(key, data, mode=_FOR_ALL)

    def create_secret(self, key: str, data: Bytes) -> None:
        """Like `create`, but this user alone can read it."""
        self._create(key, data, mode=_SECRET)

    def read_secret(self, key: str, *, most_bytes: int) -> bytes:
        """At most so many bytes of what `create_secret` made. Raises: AccessDeniedError if it may be of another user."""
        path = self.path(key)

        def own_uid() -> int:
            probe = UnfinishedFile(key, folders=self._folders, mode=_SECRET)
            try:
                return probe.owner
            finally:
                probe.discard()

        def request(_: int) -> bytes:
            try:
                with self._opened(key) as (descriptor, _size):
                    guard_secret(descriptor, path=path, own_uid=own_uid)
                    return os.pread(descriptor, most_bytes, 0)
            except PermissionError:
                refuse_secret(self._look_at(key), path=path, own_uid=own_uid)
                raise

        return self._try("read", key, request)

    @contextmanager
    def open_writer(self, key: str) -> Iterator["_Writer"]:
        check_key(key, url=self._url)
        file = self._try("write", key, lambda _: UnfinishedFile(key, folders=self._folders))
        # A failed write of a stream has no second chance: nobody has the earlier bytes any more.
        once = self._retrying.once()

        def act(request: Callable[[], None]) -> None:
            once.call(lambda _: request(), action="write", url=f"{self._url}/{key}")

        try:
            yield _Writer(file, act)
            act(lambda: file.finish(publish))
        except BaseException:
            file.discard()
            raise

    def open_appended(self, key: str, *, make: bool = True) -> int:
        """Descriptor of a file that grows, for reading and appending; without `make` only if its folder is there.

        The file's name is not made durable: `make_durable` does that.

        Raises: OSError; IrregularFileError.
        """
        path = self.path(key)
        folder, _, name = key.rpartition("/")
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND
        if not make:
            with self._folders.opened(folder) as handle:
                return open_regular(name, flags, parent=handle, path=path)
        handle = DurableFolders(self._root, sync=False).make(folder)
        try:
            return open_regular(name, flags, parent=handle, path=path)
        finally:
            os.close(handle)

    def make_durable(self, key: str) -> None:
        """Makes the name of an object durable, unless its folder is gone. Raises: OSError; IrregularFileError."""
        folder = key.rpartition("/")[0]
        # Somebody may have deleted the run: its folder must not be made again.
        with self._folders.opened(folder) as handle:
            os.close(DurableFolders(self._root).make(folder))
            sync_folder(handle)

    def is_blocked(self, key: str) -> bool:
        """Whether the object can be neither there nor written: something else has its name, or that of its folder.

        Raises: StorageError, also if something else has the name of a folder further up: no other folder beside this one would
            help then.
        """
        check_key(key, url=self._url)
        folder, _, name = key.rpartition("/")

        def request(_: int) -> bool:
            try:
                with self._folders.opened(folder.rpartition("/")[0]):
                    pass
            except FileNotFoundError:
                return False
            try:
                with self._folders.opened(folder) as handle:
                    return stat_modes.S_ISDIR(look_at(name, parent=handle, path=self.path(key)).st_mode)
            except FileNotFoundError:
                return False
            except (IrregularFileError, NotADirectoryError):
                return True

        return self._try("find", key, request)

    def stat(self, key: str) -> ObjectInfo:
        check_key(key, url=self._url)

        def request(_: int) -> ObjectInfo:
            found = self._look_at(key)
            if stat_modes.S_ISDIR(found.st_mode):
                raise FileNotFoundError(key)
            return ObjectInfo(key, found.st_size, found.st_mtime)

        return self._try("find", key, request)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        folder = folder_of(prefix)
        if folder:
            check_key(folder[:-1], url=self._url)
        for key, handle in self._walk(folder):
            if not _is_temporary(key) and (info := self._find_listed(key, handle)):
                yield info

    def delete(self, key: str) -> None:
        check_key(key, url=self._url)

        def request(_: int) -> None:
            folder = self._delete(key)
            # A folder is no object: none may be left where the last object of it was.
            self._folders.prune(folder)

        self._try("delete", key, request)

    def sweep_temporaries(self, prefix: str = "") -> tuple[str, ...]:
        """Removes unfinished files below `prefix` whose writers certainly are dead; returns their names."""
        here = this_writer()
        names = [
            name
            for name, _ in self._walk(folder_of(prefix))
            if is_abandoned(name.rpartition("/")[2], here=here, start_of=start_of)
        ]
        for name in names:
            with suppress(FileNotFoundError):
                self._folders.prune(self._delete(name))
        return tuple(names)

    def _create(self, key: str, data: Bytes, *, mode: int) -> None:
        check_key(key, url=self._url)

        def request(attempt: int) -> None:
            try:
                self._put(key, data, publish_new, mode=mode)
            except FileExistsError:
                # On a network file system an attempt may have succeeded although its answer was lost.
                if attempt == 1 or self.read(key) != data:
                    raise

        self._try("create", key, request)

    def _put(self, key: str, data: Bytes, publish: PublishFile, *, mode: int = _FOR_ALL) -> None:
        file = UnfinishedFile(key, folders=self._folders, mode=mode)
        try:
            file.write(data)
            file.finish(publish)
        except BaseException:
            file.discard()
            raise

    @contextmanager
    def _opened(self, key: str) -> Iterator[tuple[int, int]]:
        """Descriptor and size of a file."""
        folder, _, name = key.rpartition("/")
        with self._folders.opened(folder) as handle:
            path = f"{self._root}/{key}"
            descriptor = open_regular(name, os.O_RDONLY, parent=handle, path=path, follow=self._follow_links)
        try:
            yield descriptor, os.fstat(descriptor).st_size
        finally:
            os.close(descriptor)

    def _look_at(self, key: str) -> os.stat_result:
        folder, _, name = key.rpartition("/")
        with self._folders.opened(folder) as handle:
            return look_at(name, parent=handle, path=f"{self._root}/{key}", follow=self._follow_links)

    def _find_listed(self, key: str, handle: int) -> ObjectInfo | None:
        """What a listing came upon, if it still is there; `handle` is of its folder."""
        path = f"{self._root}/{key}"
        try:
            found = self._try("find", key, lambda _: look_at(key.rpartition("/")[2], parent=handle, path=path))
        except ObjectNotFoundError:
            return None
        except IrregularFileError:
            self._passed_over.tell(path, "is a file no more")
            return None
        return None if stat_modes.S_ISDIR(found.st_mode) else ObjectInfo(key, found.st_size, found.st_mtime)

    def _delete(self, key: str) -> str:
        """Deletes the file if it is there; returns its folder."""
        folder, _, name = key.rpartition("/")
        with suppress(FileNotFoundError), self._folders.opened(folder) as handle:
            look_at(name, parent=handle, path=f"{self._root}/{key}")
            os.unlink(name, dir_fd=handle)
            if self._folders.sync:
                sync_folder(handle)
        return folder

    def _walk(self, prefix: str) -> Iterator[tuple[str, int]]:
        return walk_files(self._folders, prefix, passed_over=self._passed_over, retrying=self._retrying, url=self._url)

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
