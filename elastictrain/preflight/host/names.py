"""The host's own name, and how long it takes to look names up."""

import ipaddress
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from elastictrain.preflight.surroundings import Surroundings
from elastictrain.preflight.verdict import Reporter, Verdict


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


SLOW_S = 1.0
"""A healthy look-up takes milliseconds; a name server that does not answer costs whole seconds, 5 by default.
Source: resolv.conf(5), option `timeout`."""

LIMIT_S = 2.0
"""How long an answer is waited for: what takes longer than `SLOW_S` is known to be bad by then."""

MAPPED_LOOPBACK = "::ffff:127.0.0.1"
"""What torch's store, listening on IPv6, sees of a rank on its own host, and looks up for its log."""

_ROUTED = "192.0.2.1"
"""An address that nobody has: the way to it is the way out. Source: RFC 5737."""


@dataclass(frozen=True, slots=True)
class HostsLine:
    """A line of /etc/hosts: its number from 1, its address, its names."""

    number: int
    address: str
    names: tuple[str, ...]

    def __str__(self) -> str:
        return " ".join((self.address, *self.names))


@dataclass(frozen=True, slots=True)
class NameFacts:
    """What the own name means. `address` is the one by which other hosts reach this one, if known."""

    name: str
    own: LookUp
    lines: tuple[HostsLine, ...]
    address: str | None


@dataclass(frozen=True, slots=True)
class LookupFacts:
    """How long questions take. `servers` are those of /etc/resolv.conf."""

    forward: tuple[LookUp, ...]
    reverse: tuple[LookUp, ...]
    servers: tuple[str, ...]


def read_name(surroundings: Surroundings, *, resolver: Resolver, address: str | None, towards: str | None) -> NameFacts:
    """`towards` is an address of another host, for finding out the own one."""
    (own,), _ = look_up([surroundings.host], [], resolver=resolver, limit_s=LIMIT_S)
    known = address or address_towards(towards or _ROUTED)
    return NameFacts(
        name=surroundings.host,
        own=own,
        lines=tuple(parse_hosts(surroundings.read("etc/hosts") or "")),
        address=None if known is None or is_loopback(known) else known,
    )


def read_lookups(surroundings: Surroundings, *, resolver: Resolver, address: str | None) -> LookupFacts:
    """Asks for the own name, and for the names of the addresses under which ranks of this host appear."""
    own = address or address_towards(_ROUTED)
    asked = [MAPPED_LOOPBACK, *([own] if own else [])]
    forward, reverse = look_up([surroundings.host], asked, resolver=resolver, limit_s=LIMIT_S)
    return LookupFacts(tuple(forward), tuple(reverse), tuple(_servers(surroundings.read("etc/resolv.conf") or "")))


def judge_name(facts: NameFacts, *, several_hosts: bool) -> Verdict:
    """Loopback is right for a host that is alone, and only for that."""
    report = Reporter("name", facts.name)
    expected = "an address that other hosts reach" if several_hosts else "an address"
    address = facts.address or "ADDRESS"
    where = "" if facts.address else " (ADDRESS: the one that `ip -brief address` shows and other hosts reach)"
    adding = f"add the line `{address} {facts.name}` to /etc/hosts on {facts.name}{where}"
    if facts.own.answers is None:
        measured = f"no answer in {facts.own.seconds:.1f} s" if facts.own.stalled else facts.own.error
        if several_hosts:
            return report.warned(measured, expected=expected, remedy=adding)
        return report.skipped(measured, remedy=f"only needed with several hosts; then {adding}")
    measured = ", ".join(facts.own.answers)
    loopback = [answer for answer in facts.own.answers if is_loopback(answer)]
    if not several_hosts or not loopback:
        return report.passed(measured, expected=expected)
    line = _wrong_line(facts)
    remedy = adding if line is None else _changing(line, facts.name, address) + where
    # The first answer is the one that programs take.
    if is_loopback(facts.own.answers[0]):
        return report.failed(measured, expected=expected, remedy=remedy)
    return report.warned(measured, expected=expected, remedy=remedy)


def judge_lookups(facts: LookupFacts, *, host: str) -> Verdict:
    """Whether any answer takes longer than `SLOW_S`; which answer does not matter here."""
    report = Reporter("lookup", host)
    slow_forward = [one for one in facts.forward if one.seconds > SLOW_S]
    slow_reverse = [one for one in facts.reverse if one.seconds > SLOW_S]
    slowest = max((*facts.forward, *facts.reverse), key=lambda one: one.seconds, default=None)
    if slowest is None:
        return report.skipped("nothing was asked", remedy="look at /etc/resolv.conf")
    if not slow_forward and not slow_reverse:
        return report.passed(round(slowest.seconds, 3), expected=SLOW_S, unit="s")
    servers = f"; the name server ({', '.join(facts.servers)} in /etc/resolv.conf) must answer" if facts.servers else ""
    lines = [f"`ADDRESS {one.question}`" for one in slow_forward]
    lines += [f"`{one.question} {'localhost' if is_loopback(one.question) else host}`" for one in slow_reverse]
    remedy = f'export RES_OPTIONS="timeout:1 attempts:1", and add {" and ".join(lines)} to /etc/hosts on {host}{servers}'
    measured = f"{slowest.question}: {'no answer in ' if slowest.stalled else ''}{slowest.seconds:.1f} s"
    return report.warned(measured, expected=f"under {SLOW_S:g} s", remedy=remedy)


def is_loopback(address: str) -> bool:
    """Whether an address means the host that uses it (127.0.0.0/8, ::1, and the first written as IPv6)."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return (mapped or parsed).is_loopback


def parse_hosts(text: str) -> list[HostsLine]:
    """The lines of /etc/hosts that say something. Source: hosts(5)."""
    found = []
    for number, line in enumerate(text.split("\n"), start=1):
        words = line.partition("#")[0].split()
        if len(words) >= 2:
            found.append(HostsLine(number, words[0], tuple(words[1:])))
    return found


def _wrong_line(facts: NameFacts) -> HostsLine | None:
    """The line that says the own name is loopback."""
    for line in facts.lines:
        if facts.name in line.names and is_loopback(line.address):
            return line
    return None


def _changing(line: HostsLine, name: str, address: str) -> str:
    # Other names in the line (localhost) may well be loopback, and stay.
    ours = tuple(one for one in line.names if one == name or one.startswith(f"{name}."))
    others = tuple(one for one in line.names if one not in ours)
    new = [HostsLine(line.number, address, ours), *([HostsLine(line.number, line.address, others)] if others else [])]
    lines = " and ".join(f"`{one}`" for one in new)
    return f"in /etc/hosts on {name}, change line {line.number} from `{line}` to {lines}"


def _servers(text: str) -> Sequence[str]:
    """Source: resolv.conf(5)."""
    lines = [line.split() for line in text.splitlines()]
    return [words[1] for words in lines if len(words) >= 2 and words[0] == "nameserver"]
