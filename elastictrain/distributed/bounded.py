"""Calls that may never return, made from where waiting for ever is not an option."""

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def within(limit_s: float, act: Callable[[], T]) -> T | None:
    """What `act` returns; None if it does not return within `limit_s` or raises. Its thread is then left behind."""
    results: list[T] = []

    def run() -> None:
        try:
            results.append(act())
        except Exception:  # noqa: BLE001  # the edge of a thread; the caller reports that there is no result
            return

    thread = threading.Thread(target=run, name="bounded", daemon=True)
    thread.start()
    thread.join(limit_s)
    return results[0] if results else None
