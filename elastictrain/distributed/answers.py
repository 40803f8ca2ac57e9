"""Answers of the store that ranks meet through, each waited for until one deadline: of a frozen host none ever comes.

torch's client of that store has no limit of its own where a host accepts a connection and then says nothing, whatever time-out
it is given.
"""

import os
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

from elastictrain.distributed.incarnation import SharedStore
from elastictrain.errors import TransportError
from elastictrain.identity import STORE_HOST

_POLL_S = 0.1
_LEAST_S = 0.001

T = TypeVar("T")


class StoreAnswers:
    """Asks in a thread of its own, which is left behind where no answer comes."""

    def __init__(
        self, *, limit_s: float, poll: Callable[[], None] = lambda: None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`limit_s` is for all questions together. `poll` is called while one is asked, and may raise to leave early."""
        self._poll = poll
        self._clock = clock
        self._deadline_s = clock() + limit_s
        self._questions: SimpleQueue[Callable[[], None]] = SimpleQueue()
        threading.Thread(target=self._run, name="store answers", daemon=True).start()

    @property
    def left_s(self) -> float:
        """Until the deadline."""
        return max(0.0, self._deadline_s - self._clock())

    def put_off(self, seconds: float) -> None:
        """Have the deadline that much after now, if it is earlier."""
        self._deadline_s = max(self._deadline_s, self._clock() + seconds)

    def ask(self, act: Callable[[], T]) -> T:
        """What `act` returns. Raises: TransportError that names the store's host, in time or where the store fails."""
        answer: SimpleQueue[_Answer[T]] = SimpleQueue()
        asked_s = self._clock()
        self._questions.put(lambda: answer.put(_answer(act)))
        while True:
            try:
                found = answer.get(timeout=max(_LEAST_S, min(_POLL_S, self.left_s)))
            except Empty:
                self._poll()
                if self.left_s:
                    continue
                seconds = self._clock() - asked_s
                raise TransportError(
                    f"the store that the ranks meet through, on {store_host()}, has not answered for {seconds:.0f} s: "
                    "that host is frozen, cut off or gone, or a firewall drops what is sent to it"
                ) from None
            if isinstance(found.error, RuntimeError):
                first = next(iter(str(found.error).splitlines()), "")
                message = f"the store that the ranks meet through, on {store_host()}, cannot be used: {first}"
                raise TransportError(message) from found.error
            return found.value()

    def _run(self) -> None:
        while True:
            self._questions.get()()


class BoundedStore:
    """A store whose answers are waited for as `StoreAnswers` does."""

    def __init__(self, store: SharedStore, answers: StoreAnswers) -> None:
        self._store = store
        self._answers = answers

    def set(self, key: str, value: str, /) -> None:
        """As in torch's stores. Raises: TransportError."""
        self._answers.ask(lambda: self._store.set(key, value))

    def get(self, key: str, /) -> bytes:
        """As in torch's stores. Raises: TransportError."""
        return self._answers.ask(lambda: self._store.get(key))

    def check(self, keys: list[str], /) -> bool:
        """As in torch's stores. Raises: TransportError."""
        return self._answers.ask(lambda: self._store.check(keys))

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """As in torch's stores. Raises: TransportError."""
        return self._answers.ask(lambda: self._store.compare_set(key, expected, desired))


def store_host() -> str:
    """The host of the store that torchrun named, for people."""
    place = f"{os.environ.get('MASTER_ADDR', '?')}:{os.environ.get('MASTER_PORT', '?')} (MASTER_ADDR, MASTER_PORT)"
    name = os.environ.get(STORE_HOST)
    return f"{name} at {place}" if name else place


class _Answer(Generic[T]):
    def __init__(self, found: tuple[T] | None, error: BaseException | None) -> None:
        self._found = found
        self.error = error

    def value(self) -> T:
        if self._found is None:
            assert self.error is not None  # noqa: S101
            raise self.error
        return self._found[0]


def _answer(act: Callable[[], T]) -> _Answer[T]:
    try:
        return _Answer((act(),), None)
    except BaseException as error:  # noqa: BLE001  # the edge of a thread; it is raised where it was asked for
        return _Answer(None, error)
