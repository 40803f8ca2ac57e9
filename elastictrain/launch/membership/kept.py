"""What the host that serves the roster keeps: the lines of hosts in its memory only, the rest also in the run's storage.

A line says that a host lives, and is worth nothing a few seconds later. A generation outlives everybody: commits carry its
number, and none may ever be given away twice, by a server that has started again, by a second one that holds itself for the
first, or by one that begins when all have ended. So it is created in storage before anyone is told. Ends go there as well, from
a thread: whoever starts when all are gone goes on from them, but nobody who is there has to wait for storage.
"""

import logging
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from elastictrain.errors import (
    ObjectExistsError,
    ObjectNotFoundError,
    PermanentStorageError,
    StorageError,
    TransientStorageError,
)
from elastictrain.launch.membership.objects import Objects
from elastictrain.launch.membership.registry import ENDS, GENERATIONS, HOSTS
from elastictrain.storage.keys import folder_of
from elastictrain.storage.store import ObjectInfo

logger = logging.getLogger(__name__)

LINES_KEPT_S = 3600.0
"""A line that was not written for so long is dropped: every launcher that was ever started has had one."""

_NAMES = {
    HOSTS: re.compile(rf"{HOSTS}/[A-Za-z0-9.-]{{1,300}}\.json"),
    GENERATIONS: re.compile(rf"{GENERATIONS}/\d{{9}}\.json"),
    ENDS: re.compile(rf"{ENDS}/\d{{9}}/[A-Za-z0-9.-]{{1,300}}\.json"),
}
_RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class Kept:
    """One object. `data` is None while it is only known to be in storage."""

    info: ObjectInfo
    data: bytes | None
    written_s: float


class KeptObjects:
    """As a registry needs them; from many threads, and none waits for storage longer than `patience_s` for its turn."""

    def __init__(
        self, store: Objects, *, url: str, patience_s: float = 3.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.url = url
        self._store = store
        self._patience_s = patience_s
        self._clock = clock
        self._lock = threading.Lock()
        self._objects: dict[str, Kept] = {}
        self._turn = threading.Lock()
        """Held by the one that asks storage: more of them would only pile up behind a store that stalls."""

        self._unsaved: deque[tuple[str, bytes]] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._save, name="roster ends", daemon=True)

    def load(self) -> None:
        """Learn what storage holds; to be called once, before anything else. Raises: StorageError."""
        for folder in (GENERATIONS, ENDS):
            for info in self._store.list(folder):
                if _NAMES[folder].fullmatch(info.key):
                    self._objects[info.key] = Kept(info, None, self._clock())

    def start(self) -> None:
        """Begin to bring ends to storage."""
        self._thread.start()

    def close(self, *, limit_s: float) -> None:
        """Bring to storage what is still to come there, as far as that is possible within `limit_s`."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(timeout=limit_s)

    def write(self, key: str, data: bytes) -> None:
        """Replace a line, or an end."""
        self._check(key, HOSTS, ENDS)
        self._put(key, data)
        if key.startswith(f"{ENDS}/"):
            with self._changed:
                self._unsaved.append((key, data))
                self._changed.notify_all()

    def create(self, key: str, data: bytes) -> None:
        """A generation. When this returns it is in storage."""
        self._check(key, GENERATIONS)
        with self._asking_storage():
            with self._lock:
                if key in self._objects:
                    raise ObjectExistsError(f"{self.url}/{key} exists already")
            try:
                self._store.create(key, data)
            except ObjectExistsError:
                # An earlier try that seemed to fail, or another server: whichever it was, that one counts.
                self._put(key, self._store.read(key))
                raise
            self._put(key, data)

    def read(self, key: str) -> bytes:
        """One object; an old one may have to come from storage."""
        with self._lock:
            kept = self._objects.get(key)
        if kept is None:
            raise ObjectNotFoundError(f"{self.url}/{key} does not exist")
        if kept.data is not None:
            return kept.data
        with self._asking_storage():
            data = self._store.read(key)
        with self._lock:
            # Whatever was written in the meantime is newer.
            if (now := self._objects[key]).data is None:
                self._objects[key] = Kept(kept.info, data, kept.written_s)
            else:
                data = now.data or data
        return data

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Names and sizes."""
        return iter([kept.info for kept in self.below(prefix)])

    def below(self, prefix: str) -> Sequence[Kept]:
        """Everything below a folder, with what is in memory of it."""
        folder, now_s = folder_of(prefix), self._clock()
        with self._lock:
            old = [key for key, kept in self._objects.items() if _is_line(key) and now_s - kept.written_s > LINES_KEPT_S]
            for key in old:
                del self._objects[key]
            return [kept for key, kept in sorted(self._objects.items()) if key.startswith(folder)]

    def delete(self, key: str) -> None:
        """Remove a line."""
        self._check(key, HOSTS)
        with self._lock:
            self._objects.pop(key, None)

    def _check(self, key: str, *folders: str) -> None:
        if not any(_NAMES[folder].fullmatch(key) for folder in folders):
            raise PermanentStorageError(f"{self.url}: {key!r} does not belong into {' or '.join(folders)}")

    def _put(self, key: str, data: bytes) -> None:
        with self._lock:
            self._objects[key] = Kept(ObjectInfo(key, len(data), time.time()), data, self._clock())

    @contextmanager
    def _asking_storage(self) -> Iterator[None]:
        if not self._turn.acquire(timeout=self._patience_s):
            raise TransientStorageError(f"{self.url} waits for {self._store.url}, which does not answer")
        try:
            yield
        finally:
            self._turn.release()

    def _save(self) -> None:
        """The thread that brings ends to storage, in the order in which they came."""
        trouble = ""
        while True:
            with self._changed:
                while not self._unsaved and not self._closed:
                    self._changed.wait()
                if not self._unsaved:
                    return
                key, data = self._unsaved[0]
            try:
                self._store.write(key, data)
            except StorageError as error:
                if str(error) != trouble:
                    trouble = str(error)
                    logger.warning("the roster's ends of generations cannot be saved, which is tried again: %s", trouble)
                with self._changed:
                    if self._closed:
                        return
                    self._changed.wait(_RETRY_S)
                continue
            trouble = ""
            self._unsaved.popleft()


def _is_line(key: str) -> bool:
    return key.startswith(f"{HOSTS}/")
