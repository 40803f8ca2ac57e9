"""Check `ports`: whether ports that this host must listen on are free, and who holds them if not."""

import errno
import os
import socket
from contextlib import suppress
from dataclasses import dataclass

import psutil

from elastictrain.preflight.verdict import Reporter, Verdict


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


def check_port(wanted: WantedPort, *, host: str) -> Verdict:
    """Tries the port for a moment, on all addresses; nobody can connect meanwhile."""
    problem = try_port(wanted.port)
    return judge_port(wanted, problem, find_holder(wanted.port) if problem == errno.EADDRINUSE else None, host=host)


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


def find_holder(port: int) -> Holder | None:
    """Who listens on a port; None if /proc does not tell, as with processes of other users."""
    with suppress(psutil.Error, OSError):
        sockets = psutil.net_connections("tcp")
        pids = [one.pid for one in sockets if one.status == psutil.CONN_LISTEN and one.laddr.port == port and one.pid]
        if pids:
            process, own = psutil.Process(max(pids)), psutil.Process()
            # What follows in a command line may be secret.
            command = " ".join(process.cmdline()[:3]) or process.name()
            command = command if len(command) <= 80 else f"{command[:77]}..."
            return Holder(process.pid, command, ours=process.pid > 1 and process in (own, *own.parents()))
    return None


def judge_port(wanted: WantedPort, problem: int | None, holder: Holder | None, *, host: str) -> Verdict:
    """`problem` is None for a port that can be had, or the number of an error."""
    report, port, expected = Reporter("ports", host), f"port {wanted.port} ({wanted.use})", f"port {wanted.port} free"
    another = f"choose another port: {wanted.setting}"
    if problem is None:
        return report.passed("free", expected=expected)
    if problem == errno.EADDRINUSE and holder is None:
        remedy = f"find who listens with `ss -ltnp sport = :{wanted.port}` as root, or {another}"
        return report.failed(f"{port} taken", expected=expected, remedy=remedy)
    if problem == errno.EADDRINUSE and holder is not None:
        who = f"pid {holder.pid} ({holder.command})"
        if holder.ours:
            return report.passed(f"held by our own {who}", expected=expected)
        remedy = f"on {host} end {who}: `kill {holder.pid}`, or {another}"
        return report.failed(f"{port} held by {who}", expected=expected, remedy=remedy)
    if problem in (errno.EACCES, errno.EPERM):
        remedy = f"choose a port from 1024 up: {wanted.setting}"
        return report.failed(f"{port} not permitted", expected=expected, remedy=remedy)
    return report.failed(f"{port}: {os.strerror(problem)}", expected=expected, remedy=another)
