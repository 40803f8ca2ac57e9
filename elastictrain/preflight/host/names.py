"""Checks `name`, `lookup` and `ports`: the host's own name, the time of look-ups, and ports that must be free."""

import errno
import ipaddress
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import psutil

from elastictrain.distributed.bounded import each_within
from elastictrain.net.interfaces import find_route, is_loopback
from elastictrain.net.listening import bind_everywhere
from elastictrain.preflight.verdict import Reporter, Verdict
from elastictrain.surroundings import Surroundings

SLOW_S = 1.0  # a healthy look-up takes milliseconds; a name server that does not answer costs seconds (5: resolv.conf(5))
LIMIT_S = 2.0  # for an answer; longer than `SLOW_S`, so a slow one shows
MAPPED_LOOPBACK = "::ffff:127.0.0.1"  # a rank on the own host, as torch's store sees and looks it up when it listens on IPv6

Holder = tuple[int, str, bool]  # pid and command of a process, and whether it is this one or an ancestor, such as torchrun
Ask = Callable[[str], Sequence[str]]  # addresses of a name, or the name of an address. Raises: OSError


def ask_resolver(question: str) -> Sequence[str]:
    """As every program on this host asks: addresses in order of preference, or the name of an address."""
    with suppress(ValueError):
        ipaddress.ip_address(question)
        # The question that torch's store asks for each connection.
        return [socket.getnameinfo((question, 0), 0)[0]]
    found = socket.getaddrinfo(question, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(one[4][0]) for one in found))


@dataclass(frozen=True, slots=True)
class LookUp:
    question: str
    answers: tuple[str, ...] | None  # None: the resolver failed with `error`, or gave no answer for `seconds`
    seconds: float
    error: str = ""

    @property
    def stalled(self) -> bool:
        return self.answers is None and not self.error


def look_up(questions: Sequence[str], *, limit_s: float, ask: Ask = ask_resolver) -> list[LookUp]:
    """Ask all questions at once, for at most `limit_s`."""

    def look(question: str) -> LookUp:
        """The resolver's error is part of the result, and is not raised."""
        began = time.monotonic()
        answers, error = None, ""
        try:
            answers = tuple(ask(question))
        except (OSError, UnicodeError) as problem:
            # A name that no host may have (an empty part, one too long) is a UnicodeError.
            error = str(getattr(problem, "strerror", None) or problem) or type(problem).__name__
        return LookUp(question, answers, time.monotonic() - began, error)

    answers = each_within([(limit_s, partial(look, question)) for question in questions])
    return [answer or LookUp(question, None, limit_s) for question, answer in zip(questions, answers, strict=True)]


@dataclass(frozen=True, slots=True)
class NameFacts:
    """How the own name and addresses resolve."""

    name: str
    own: LookUp  # look-up of `name`
    reverse: tuple[LookUp, ...] = ()  # look-ups of the addresses under which ranks of this host appear
    address: str | None = None  # by which other hosts reach this one, if known
    lines: Mapping[int, Sequence[str]] = field(default_factory=dict)  # of /etc/hosts: address and names, by number from 1
    servers: tuple[str, ...] = ()  # name servers of /etc/resolv.conf


def read_names(surroundings: Surroundings, *, towards: str | None, ask: Ask = ask_resolver) -> NameFacts:
    """`towards`: the rendezvous, which shows the own address: the default route may lead elsewhere. None: unknown."""
    name, address = surroundings.host, find_route(towards, interfaces=(), surroundings=surroundings).local if towards else None
    own, *others = look_up([name, MAPPED_LOOPBACK, *([address] if address else [])], limit_s=LIMIT_S, ask=ask)
    servers = [line.split() for line in (surroundings.read("etc/resolv.conf") or "").splitlines()]
    return NameFacts(
        name=name,
        own=own,
        reverse=tuple(others),
        address=None if address is None or is_loopback(address) else address,
        lines=parse_hosts(surroundings.read("etc/hosts") or ""),
        servers=tuple(words[1] for words in servers if len(words) >= 2 and words[0] == "nameserver"),
    )


def judge_name(facts: NameFacts, *, several_hosts: bool) -> Verdict:
    """Check `name`: the own name resolves, with several hosts not to a loopback address. It fails only if such an address is
    the first one. Pure."""
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
    if not several_hosts or not any(map(is_loopback, facts.own.answers)):
        return report.passed(measured, expected=expected)
    remedy = adding
    wrong = (number for number, (first, *named) in facts.lines.items() if facts.name in named and is_loopback(first))
    if number := next(wrong, None):
        line = facts.lines[number]
        # Other names in the line (localhost) may be loopback, and stay.
        ours = [one for one in line[1:] if one == facts.name or one.startswith(f"{facts.name}.")]
        others = [one for one in line if one not in ours]
        new = f"`{' '.join([address, *ours])}`" + (f" and `{' '.join(others)}`" if len(others) > 1 else "")
        remedy = f"in /etc/hosts on {facts.name}, change line {number} from `{' '.join(line)}` to {new}{where}"
    # Programs take the first answer.
    return report.failed(measured, fatal=is_loopback(facts.own.answers[0]), expected=expected, remedy=remedy)


def judge_lookups(facts: NameFacts, *, host: str) -> Verdict:
    """Whether an answer takes longer than `SLOW_S`, whatever it is."""
    report = Reporter("lookup", host)
    slowest = max((facts.own, *facts.reverse), key=lambda one: one.seconds)
    if slowest.seconds <= SLOW_S:
        return report.passed(round(slowest.seconds, 3), expected=SLOW_S, unit="s")
    servers = f"; the name server ({', '.join(facts.servers)} in /etc/resolv.conf) must answer" if facts.servers else ""
    lines = [f"`{facts.address or 'ADDRESS'} {facts.own.question}`"] if facts.own.seconds > SLOW_S else []
    slow = [one.question for one in facts.reverse if one.seconds > SLOW_S]
    lines += [f"`{address} {'localhost' if is_loopback(address) else host}`" for address in slow]
    remedy = f'export RES_OPTIONS="timeout:1 attempts:1", and add {" and ".join(lines)} to /etc/hosts on {host}{servers}'
    measured = f"{slowest.question}: {'no answer in ' if slowest.stalled else ''}{slowest.seconds:.1f} s"
    return report.warned(measured, expected=f"under {SLOW_S:g} s", remedy=remedy)


def parse_hosts(text: str) -> dict[int, list[str]]:
    """The words of the lines of /etc/hosts by number, without comments and empty ones. Source: hosts(5)."""
    lines = {number: line.partition("#")[0].split() for number, line in enumerate(text.split("\n"), start=1)}
    return {number: words for number, words in lines.items() if len(words) >= 2}


def try_port(port: int) -> int | None:
    """None if the port is free, else the errno."""
    try:
        bind_everywhere(port)
    except OSError as error:
        return error.errno or errno.EINVAL
    return None


def find_holder(port: int) -> Holder | None:
    """The process that listens on a port; None if /proc does not show it, as for other users' processes."""
    with suppress(psutil.Error, OSError):
        sockets = psutil.net_connections("tcp")
        pids = [one.pid for one in sockets if one.status == psutil.CONN_LISTEN and one.laddr.port == port and one.pid]
        if pids:
            process, own = psutil.Process(max(pids)), psutil.Process()
            # Later arguments may be secret.
            command = " ".join(process.cmdline()[:3]) or process.name()
            command = command if len(command) <= 80 else f"{command[:77]}..."
            return process.pid, command, process.pid > 1 and process in (own, *own.parents())
    return None


def check_port(port: int, *, host: str) -> Verdict:
    """Try a port of `preflight.ports` briefly, on all addresses, without listening: no peer can connect meanwhile."""
    problem = try_port(port)
    return judge_port(port, problem, find_holder(port) if problem == errno.EADDRINUSE else None, host=host)


def judge_port(number: int, problem: int | None, holder: Holder | None, *, host: str) -> Verdict:
    """`problem`: None for a free port, else the errno."""
    report, expected = Reporter("ports", host), f"port {number} free"
    pid, command, ours = holder or (0, "", False)
    who = f"pid {pid} ({command})" if holder else ""
    if problem is None or ours:
        return report.passed(f"held by our own {who}" if who else "free", expected=expected)
    remedy = "choose another port from 1024 up: preflight.ports"
    if problem == errno.EADDRINUSE:
        ending = f"end {who}: `kill {pid}`" if holder else f"find who listens: `ss -ltnp sport = :{number}` as root"
        remedy = f"on {host} {ending}; or {remedy}"
    measured = f"port {number} (checks of links): {f'held by {who}' if who else os.strerror(problem)}"
    return report.failed(measured, expected=expected, remedy=remedy)
