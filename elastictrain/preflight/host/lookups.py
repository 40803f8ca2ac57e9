"""Questions to the resolver of this host, each under a limit, because a resolver cannot be interrupted."""

import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol


class Resolver(Protocol):
    """Names to addresses, and back."""

    def addresses(self, name: str) -> Sequence[str]:
        """In the order of preference. Raises: OSError if there are none."""

    def name(self, address: str) -> str:
        """The name, or the address where it has none. Raises: OSError."""


class SystemResolver:
    """The one that every other program on this host asks, too."""

    def addresses(self, name: str) -> Sequence[str]:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        return list(dict.fromkeys(str(one[4][0]) for one in found))

    def name(self, address: str) -> str:
        # The same question that torch's store asks for each connection.
        return socket.getnameinfo((address, 0), 0)[0]


@dataclass(frozen=True, slots=True)
class LookUp:
    """One question. `answers` is None where there was none: the resolver said `error`, or nothing for `seconds`."""

    question: str
    answers: tuple[str, ...] | None
    seconds: float
    error: str = ""

    @property
    def stalled(self) -> bool:
        """Whether there was no answer at all."""
        return self.answers is None and not self.error


def look_up(
    names: Sequence[str], addresses: Sequence[str], *, resolver: Resolver, limit_s: float
) -> tuple[list[LookUp], list[LookUp]]:
    """All questions at once: what each name and each address led to. Takes no longer than `limit_s`."""
    questions: list[tuple[str, Callable[[], Sequence[str]]]] = [
        *((name, lambda name=name: resolver.addresses(name)) for name in names),
        *((address, lambda address=address: [resolver.name(address)]) for address in addresses),
    ]
    answers: queue.SimpleQueue[tuple[int, LookUp]] = queue.SimpleQueue()

    def ask(index: int) -> None:
        question, request = questions[index]
        began = time.monotonic()
        try:
            found: tuple[str, ...] | None = tuple(request())
            error = ""
        except (OSError, UnicodeError) as problem:
            # A name that no host may have (an empty part, one too long) is a UnicodeError.
            found, error = None, str(getattr(problem, "strerror", None) or problem) or type(problem).__name__
        answers.put((index, LookUp(question, found, time.monotonic() - began, error)))

    deadline = time.monotonic() + limit_s
    for index in range(len(questions)):
        threading.Thread(target=ask, args=(index,), name="look-up", daemon=True).start()
    found: dict[int, LookUp] = {}
    while len(found) < len(questions):
        try:
            index, answer = answers.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            break
        found[index] = answer
    ordered = [found.get(index, LookUp(question, None, limit_s)) for index, (question, _) in enumerate(questions)]
    return ordered[: len(names)], ordered[len(names) :]


def address_towards(target: str, *, port: int = 9) -> str | None:
    """The address that this host uses towards another; None if there is no way. Sends nothing: connecting UDP only asks the
    kernel for its route."""
    family = socket.AF_INET6 if ":" in target else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((target, port))
            return str(probe.getsockname()[0])
    except OSError:
        return None
