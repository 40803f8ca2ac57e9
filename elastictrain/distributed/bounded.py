"""Runs calls that may never return, with a time limit."""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TypeVar

_POLL_S = 0.1
_LEAST_S = 0.001

T = TypeVar("T")


def call_until(act: Callable[[], T], *, left_s: Callable[[], float], poll: Callable[[], None] = lambda: None) -> T:
    """Return or raise what `act` does, in a thread that is abandoned without an answer in time. `left_s` returns the seconds
    left. The waiting thread calls `poll` repeatedly, which may raise to leave early. Raises: TimeoutError."""
    answers: SimpleQueue[tuple[T] | BaseException] = SimpleQueue()

    def run() -> None:
        try:
            answers.put((act(),))
        except BaseException as error:  # noqa: BLE001  # the edge of a thread; it is raised where it was asked for
            answers.put(error)

    threading.Thread(target=run, name="bounded", daemon=True).start()
    while True:
        try:
            answer = answers.get(timeout=max(_LEAST_S, min(_POLL_S, left_s())))
        except Empty:
            poll()
            if left_s() <= 0:
                raise TimeoutError from None
            continue
        if isinstance(answer, BaseException):
            raise answer
        return answer[0]


def within(limit_s: float, act: Callable[[], T]) -> T | None:
    """What `act` returns; None if it does not return within `limit_s` or raises."""
    return each_within([(limit_s, act)])[0]


def each_within(calls: Sequence[tuple[float, Callable[[], T]]]) -> list[T | None]:
    """What each call returns, all in parallel; None for one that does not return within its limit, or raises."""
    began_s = time.monotonic()
    answers: dict[int, T] = {}

    def run(index: int, act: Callable[[], T]) -> None:
        with suppress(Exception):
            answer = act()
            if time.monotonic() - began_s <= calls[index][0]:
                answers[index] = answer

    threads = [
        threading.Thread(target=run, args=(index, act), name="bounded", daemon=True) for index, (_, act) in enumerate(calls)
    ]
    for thread in threads:
        # A control group may have no room for another thread: no answer, as from a call that is late.
        with suppress(RuntimeError):
            thread.start()
    for thread, (limit_s, _) in zip(threads, calls, strict=True):
        if thread.ident is not None:
            thread.join(max(0.0, began_s + limit_s - time.monotonic()))
    return [answers.get(index) for index in range(len(calls))]
