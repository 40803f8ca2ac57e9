"""Append-only logs: one growing file locally, numbered segment objects remotely, because objects cannot grow.

A log never disturbs the trainer: records that cannot be written are kept, reported once, and written with the next attempt.
"""

import logging
import os
from collections import deque
from threading import Condition, Lock, Thread

from elastictrain.errors import StorageError
from elastictrain.events import AppendLog
from elastictrain.storage.bounded_read import exists
from elastictrain.storage.failures import fault_of, reason_of, storage_error
from elastictrain.storage.local import LocalStore
from elastictrain.storage.store import Store

SEGMENT_BYTES = 1 << 20  # the newest segment is sent whole each time: small, so that little is sent twice
KEPT_BYTES = 64 << 20  # records kept while the store fails; further ones are dropped and counted
logger = logging.getLogger(__name__)


def open_append_log(store: Store, key: str, *, flush_s: float, close_s: float = 30.0) -> AppendLog:
    """Open the log under `key`. Raises: StorageError.

    Locally each record is in the file when `append` returns. Remotely a thread sends records every `flush_s` seconds as objects
    `STEM.part-00001.jsonl`, ..., and `close` takes at most `close_s`.
    """
    if isinstance(store, LocalStore):
        return _FileLog(store, key)
    return _SegmentLog(store, key, flush_s=flush_s, close_s=close_s)


def last_part(store: Store, stem: str, suffix: str = ".jsonl") -> int:
    """The number of the last segment of a remote log; 0 if there is none. Raises: StorageError.

    Segments are numbered without gaps, so this searches by name: the folder may hold many logs and is not listed.
    """
    missing = 1
    while exists(store, part_key(stem, missing, suffix)):
        missing *= 2
    there = missing // 2
    while missing - there > 1:
        middle = (there + missing) // 2
        there, missing = (middle, missing) if exists(store, part_key(stem, middle, suffix)) else (there, middle)
    return there


def part_key(stem: str, number: int, suffix: str = ".jsonl") -> str:
    return f"{stem}.part-{number:05d}{suffix}"


class LostLog:
    """Replaces a log that cannot be opened: records are dropped."""

    def append(self, data: bytes) -> None:
        pass

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


class _FileLog:
    """One write per record: the kernel has the record when `append` returns, whatever happens to the process."""

    def __init__(self, store: LocalStore, key: str) -> None:
        self._store = store
        self._key = key
        self._path = path = store.path(key)
        self._waiting = bytearray()
        self._failing = self._told_closed = False
        self._lost = 0
        self._lock = Lock()  # a snapshot's thread flushes while training appends
        try:
            # The content becomes durable at `close`, so the name need not be durable earlier: a start does not wait for it.
            self._descriptor = store.open_appended(key)
        except OSError as error:
            raise storage_error(fault_of(error), action="append to", url=path, reason=reason_of(error)) from error
        size_bytes = os.fstat(self._descriptor).st_size
        if key.endswith(".jsonl") and size_bytes and os.pread(self._descriptor, 1, size_bytes - 1) != b"\n":
            # A full disk or a lost host can truncate the last record; the next one must not become part of it.
            self._waiting += b"\n"

    def append(self, data: bytes) -> None:
        """Keeps what the disk does not take for the next attempt; beyond `KEPT_BYTES`, or once closed, a record is dropped."""
        with self._lock:
            if self._descriptor < 0:
                if not self._told_closed:
                    logger.warning("%s is closed: later records are lost", self._path)
                self._told_closed = True
                return
            if len(self._waiting) + len(data) > KEPT_BYTES:
                self._lost += 1
            else:
                self._waiting += data
            self._write()

    def flush(self) -> None:
        with self._lock:
            if self._descriptor >= 0:
                self._write()

    def close(self) -> None:
        """Only logs what fails, and what the file lacks. May be called again."""
        with self._lock:
            if self._descriptor < 0:
                return
            self._write()
            try:
                os.fsync(self._descriptor)
                self._store.make_durable(self._key)
            except (OSError, StorageError) as error:
                logger.warning("cannot make %s durable: %s", self._path, reason_of(error))
            if self._waiting or self._lost:
                logger.warning("%s lacks %d bytes and %d records at its end", self._path, len(self._waiting), self._lost)
            os.close(self._descriptor)
            self._descriptor = -1

    def _write(self) -> None:
        written = bytes(self._waiting)
        try:
            self._write_waiting()
            if written and os.fstat(self._descriptor).st_nlink == 0 and self._begin_again():
                self._waiting += written
                self._write_waiting()
        except OSError as error:
            if not self._failing:
                logger.warning("cannot append to %s: %s; its records are kept and tried again", self._path, error.strerror)
            self._failing = True
            return
        self._failing = False

    def _write_waiting(self) -> None:
        while self._waiting:
            count = os.write(self._descriptor, self._waiting)
            del self._waiting[:count]

    def _begin_again(self) -> bool:
        """Create the file again if the merge of idle logs deleted it; False if its folder, and so the run, was deleted too."""
        try:
            descriptor = self._store.open_appended(self._key, make=False)
        except (OSError, StorageError):
            return False
        os.close(self._descriptor)
        self._descriptor = descriptor
        return True


class _SegmentLog:
    """A thread sends the newest segment again and again while it grows, then begins the next one."""

    def __init__(self, store: Store, key: str, *, flush_s: float, close_s: float) -> None:
        self._store = store
        self._stem = key.removesuffix(".jsonl")
        self._suffix = key.removeprefix(self._stem)
        self._flush_s = flush_s
        self._close_s = close_s
        self._changed = Condition()
        # The condition guards all of these. Segments not sent yet, oldest first; only the last one grows.
        self._segments = deque([bytearray()])
        self._sent_bytes = 0  # of the first segment
        self._lost = 0
        self._closing = self._told_closed = False
        self._flushes_wanted = 0
        self._flushes_done = 0
        # Only the thread uses these.
        self._number: int | None = None
        self._failing = False
        self._thread = Thread(target=self._run, name="append-log", daemon=True)
        self._thread.start()

    def append(self, data: bytes) -> None:
        """Returns at once: the thread sends. Beyond `KEPT_BYTES` of unsent segments, or once closed, a record is dropped."""
        with self._changed:
            if self._closing:
                if not self._told_closed:
                    logger.warning("%s/%s is closed: later records are lost", self._store.url, self._stem)
                self._told_closed = True
                return
            if sum(map(len, self._segments)) + len(data) > KEPT_BYTES:
                self._lost += 1
                return
            self._segments[-1] += data
            if len(self._segments[-1]) >= SEGMENT_BYTES:
                self._segments.append(bytearray())

    def flush(self) -> None:
        with self._changed:
            self._flushes_wanted += 1
            wanted = self._flushes_wanted
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._flushes_done >= wanted or not self._thread.is_alive(), self._close_s)

    def close(self) -> None:
        """Takes at most `close_s`; only logs what was not sent. May be called again."""
        with self._changed:
            if self._closing:
                return
            self._closing = True
            self._changed.notify_all()
        self._thread.join(self._close_s)
        with self._changed:
            waiting_bytes = sum(map(len, self._segments)) - self._sent_bytes
            if waiting_bytes or self._lost:
                url = f"{self._store.url}/{self._stem}"
                logger.warning("%s lacks its last %d bytes, and %d records before them", url, waiting_bytes, self._lost)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._flushes_wanted > self._flushes_done, self._flush_s)
                closing, wanted = self._closing, self._flushes_wanted
            try:
                self._send_all()
            except StorageError as error:
                if not self._failing:
                    logger.warning("%s; records are kept and sent later", error)
                self._failing = True
            except Exception as error:  # noqa: BLE001  the edge of the thread
                logger.warning("%s/%s ends here: %s", self._store.url, self._stem, reason_of(error))
                return
            else:
                self._failing = False
            with self._changed:
                self._flushes_done = wanted
                self._changed.notify_all()
            if closing:
                return

    def _send_all(self) -> None:
        if self._number is None:
            # Segments of an earlier log under the same key stay.
            self._number = last_part(self._store, self._stem, self._suffix) + 1
        while True:
            with self._changed:
                segment = bytes(self._segments[0])
                if len(segment) == self._sent_bytes:
                    return
            self._store.write(part_key(self._stem, self._number, self._suffix), segment)
            with self._changed:
                self._sent_bytes = len(segment)
                # If it has grown meanwhile, the next round sends it again.
                if len(self._segments) > 1 and len(self._segments[0]) == len(segment):
                    self._segments.popleft()
                    self._sent_bytes = 0
                    self._number += 1
