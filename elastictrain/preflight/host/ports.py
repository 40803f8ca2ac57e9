"""Check `ports`: whether ports that this host must listen on are free, and who holds them if not."""

import errno
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from elastictrain.preflight.surroundings import Surroundings
from elastictrain.preflight.verdict import Reporter, Verdict

_LISTENING = "0A"


@dataclass(frozen=True, slots=True)
class WantedPort:
    """A port that something of ours will listen on. `setting` says how to choose another one."""

    port: int
    use: str
    setting: str


@dataclass(frozen=True, slots=True)
class Holder:
    """The process that listens on a port. `ours`: it is this process or one that led to it, such as torchrun."""

    pid: int
    command: str
    ours: bool = False


@dataclass(frozen=True, slots=True)
class PortFacts:
    """Whether one port can be listened on: `problem` is None, or the number of the error."""

    wanted: WantedPort
    problem: int | None
    holder: Holder | None = None


def read_ports(surroundings: Surroundings, wanted: Sequence[WantedPort]) -> list[PortFacts]:
    """Tries each port for a moment, on all addresses; nobody can connect meanwhile."""
    found = []
    for one in wanted:
        problem = try_port(one.port)
        holder = find_holder(surroundings, one.port) if problem == errno.EADDRINUSE else None
        found.append(PortFacts(one, problem, holder))
    return found


def try_port(port: int) -> int | None:
    """None if the port can be had, or the number of the error."""
    # As torch's store does it: on IPv6 and IPv4 at once, and a connection of yesterday is no hindrance.
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            probe.bind(("", port))
    except OverflowError:
        return errno.EINVAL
    except OSError as error:
        return error.errno or errno.EINVAL
    return None


def find_holder(surroundings: Surroundings, port: int) -> Holder | None:
    """Who listens on a port; None if /proc does not tell, as with processes of other users."""
    inodes = {f"socket:[{inode}]" for table in ("tcp", "tcp6") for inode in listeners(surroundings, table, port)}
    if not inodes:
        return None
    pids = sorted((int(name) for name in surroundings.names("proc") if name.isascii() and name.isdecimal()), reverse=True)
    for pid in pids:
        if any(link in inodes for link in _open_files(surroundings, pid)):
            return Holder(pid, _command(surroundings, pid), ours=pid in _lineage(surroundings))
    return None


def listeners(surroundings: Surroundings, table: str, port: int) -> Iterator[int]:
    """Inodes of the sockets that listen on a port. Source: proc_net_tcp(5)."""
    for line in (surroundings.read(f"proc/net/{table}") or "").splitlines()[1:]:
        fields = line.split()
        if len(fields) >= 10 and fields[3] == _LISTENING and fields[9].isdecimal():
            with suppress(ValueError):
                if int(fields[1].rpartition(":")[2], 16) == port:
                    yield int(fields[9])


def judge_ports(facts: Sequence[PortFacts], *, host: str) -> list[Verdict]:
    """One verdict for each port."""
    return [_judge(one, Reporter("ports", host)) for one in facts]


def _judge(facts: PortFacts, report: Reporter) -> Verdict:
    wanted, expected = facts.wanted, f"port {facts.wanted.port} free"
    if facts.problem is None:
        return report.passed("free", expected=expected)
    if facts.problem == errno.EADDRINUSE:
        if facts.holder is None:
            remedy = (
                f"find who listens with `ss -ltnp sport = :{wanted.port}` as root, or choose another port: {wanted.setting}"
            )
            return report.failed(f"port {wanted.port} ({wanted.use}) taken", expected=expected, remedy=remedy)
        holder = f"pid {facts.holder.pid} ({facts.holder.command})"
        if facts.holder.ours:
            return report.passed(f"held by our own {holder}", expected=expected)
        remedy = f"on {report.subject} end {holder}: `kill {facts.holder.pid}`, or choose another port: {wanted.setting}"
        return report.failed(f"port {wanted.port} ({wanted.use}) held by {holder}", expected=expected, remedy=remedy)
    if facts.problem in (errno.EACCES, errno.EPERM):
        remedy = f"choose a port from 1024 up: {wanted.setting}"
        return report.failed(f"port {wanted.port} ({wanted.use}) not permitted", expected=expected, remedy=remedy)
    remedy = f"choose another port: {wanted.setting}"
    return report.failed(f"port {wanted.port} ({wanted.use}): {os.strerror(facts.problem)}", expected=expected, remedy=remedy)


def _open_files(surroundings: Surroundings, pid: int) -> Iterator[str]:
    folder = surroundings.root / f"proc/{pid}/fd"
    for name in surroundings.names(f"proc/{pid}/fd"):
        with suppress(OSError):
            yield str((folder / name).readlink())


def _command(surroundings: Surroundings, pid: int) -> str:
    """The beginning of the command line (what follows may be secret); the name of the program where there is none."""
    words = (surroundings.read(f"proc/{pid}/cmdline") or "").split("\0")
    text = " ".join(words[:3]).strip() or surroundings.read(f"proc/{pid}/comm") or "unknown"
    return text if len(text) <= 80 else f"{text[:77]}..."


def _lineage(surroundings: Surroundings) -> set[int]:
    """This process and all that it descends from."""
    found: set[int] = set()
    pid = os.getpid()
    while pid > 1 and pid not in found:
        found.add(pid)
        # The second field is the name of the program, in parentheses, and may itself contain spaces and parentheses.
        fields = (surroundings.read(f"proc/{pid}/stat") or "").rpartition(")")[2].split()
        pid = int(fields[1]) if len(fields) > 1 and fields[1].isdecimal() else 0
    return found
