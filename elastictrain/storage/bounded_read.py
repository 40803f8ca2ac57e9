"""Bounded reads of small objects (a file can claim 30 GB and hold nothing), many in parallel to pay the latency once."""

import logging
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import TypeVar

from elastictrain.bounded_json import DOCUMENT, RECORD
from elastictrain.errors import ObjectNotFoundError, ObjectTooLargeError
from elastictrain.storage.store import ReadableStore, Store

T = TypeVar("T")

logger = logging.getLogger(__name__)

RECORD_BYTES = RECORD.max_bytes
DOCUMENT_BYTES = DOCUMENT.max_bytes
_AT_ONCE = 64


def read_bounded(store: ReadableStore, key: str, *, max_bytes: int = RECORD_BYTES) -> bytes:
    """Read the whole object. Raises: ObjectTooLargeError if it has more than `max_bytes`; what `Store.read` raises."""
    data = store.read(key, end=max_bytes + 1)
    if len(data) > max_bytes:
        raise ObjectTooLargeError(f"{store.url}/{key} must have at most {max_bytes} bytes, but has more")
    return data


def read_record(store: ReadableStore, key: str) -> bytes:
    """Read a small object; b"", which decodes as no record, if it is larger than any record. Raises: as `Store.read`."""
    try:
        return read_bounded(store, key)
    except ObjectTooLargeError as error:
        logger.warning("%s", error)
        return b""


def exists(store: Store, key: str) -> bool:
    """Raises: StorageError."""
    try:
        store.stat(key)
    except ObjectNotFoundError:
        return False
    return True


def read_all(store: Store, keys: Iterable[str]) -> dict[str, bytes]:
    """The records that exist, by key; b"" for an object larger than any record. Raises: StorageError."""
    found: dict[str, bytes] = {}

    def read(key: str) -> None:
        with suppress(ObjectNotFoundError):
            found[key] = read_record(store, key)

    run_concurrently([partial(read, key) for key in keys])
    return found


def run_concurrently(calls: Iterable[Callable[[], T]]) -> list[T]:
    """Run the calls in parallel, at most 64 at once; return their results in order.

    Raises the first error in that order, after all calls have ended. The threads are daemons: a store that does not answer
    must not keep the process alive.
    """
    futures = [(call, Future[T]()) for call in calls]
    # The threads share one list iterator: each takes a call that no other has taken.
    todo = iter(futures)

    def work() -> None:
        for call, future in todo:
            try:
                future.set_result(call())
            except BaseException as error:  # noqa: BLE001  # the edge of a thread; raised again below
                future.set_exception(error)

    others = [threading.Thread(target=work, name="storage", daemon=True) for _ in range(min(_AT_ONCE, len(futures)) - 1)]
    for thread in others:
        thread.start()
    work()
    for thread in others:
        thread.join()
    return [future.result() for _, future in futures]
