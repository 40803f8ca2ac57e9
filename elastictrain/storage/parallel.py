"""Requests side by side: an object store takes as long for one as for many. Acts."""

import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

from elastictrain.errors import ObjectNotFoundError
from elastictrain.storage.bounded_read import read_record
from elastictrain.storage.store import Store

T = TypeVar("T")

_AT_ONCE = 64


def side_by_side(calls: Iterable[Callable[[], T]]) -> list[T]:
    """What each call returns, in their order; a few run at once, the rest as these end.

    Raises: what the first of them raised that did, once all have ended. Threads are left to die with the process: one that a
    store keeps waiting must not keep the process from ending.
    """
    waiting = list(enumerate(calls))
    results: dict[int, T] = {}
    errors: dict[int, BaseException] = {}
    lock = threading.Lock()
    todo = iter(waiting)

    def work() -> None:
        while True:
            with lock:
                number, call = next(todo, (-1, None))
            if call is None:
                return
            try:
                results[number] = call()
            except BaseException as error:  # noqa: BLE001  # the edge of a thread; raised again below
                errors[number] = error

    others = [threading.Thread(target=work, name="storage", daemon=True) for _ in range(min(_AT_ONCE, len(waiting)) - 1)]
    for thread in others:
        thread.start()
    work()
    for thread in others:
        thread.join()
    if errors:
        raise errors[min(errors)]
    return [results[number] for number, _ in waiting]


def read_all(store: Store, keys: Iterable[str]) -> dict[str, bytes]:
    """The records that exist, by key; nothing of an object that is larger than any. Raises: StorageError."""

    def read(key: str) -> tuple[str, bytes | None]:
        try:
            return key, read_record(store, key)
        except ObjectNotFoundError:
            return key, None

    found = side_by_side([lambda key=key: read(key) for key in keys])  # type: ignore[misc]  # mypy cannot infer the default
    return {key: data for key, data in found if data is not None}
