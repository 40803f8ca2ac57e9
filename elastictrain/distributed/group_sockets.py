"""Ends the connections of this process's groups, so that nothing in them waits for another rank.

gloo has no abort: a rank that waits for a live rank waits until that one closes its connections, and a group closes them only
when its last reference is gone and none of its threads waits for a third rank. NCCL has one, but it ends only when each rank
that had connected to this process's proxy has closed the connection, and a killed process holds its own until the driver has
taken down its device: 0.9 s. `shutdown(2)` on the sockets of this process needs no other rank and no reference.
"""

import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_DESCRIPTORS = Path("/proc/self/fd")
_DESCRIPTOR_MASK = 0xFFFFFFFF
_INTERNET = (socket.AF_INET, socket.AF_INET6)
_NCCL_NAME = "nccl-socket"
_ANY_ADDRESS = ("0.0.0.0", "::")  # noqa: S104


@dataclass(frozen=True, slots=True)
class WatchedDescriptor:
    """One line of an epoll instance: the descriptor, what it is, and the 64 bits that its owner gave the kernel."""

    descriptor: int
    target: str
    data: int


def is_gloo(watched: list[WatchedDescriptor]) -> bool:
    """Whether an epoll instance is gloo's: it watches one pipe and otherwise only sockets, and gives the kernel the address of
    a handler. Python's selectors, libuv (torch's store) and asyncio give it the descriptor, and wake through an eventfd or a
    socket pair."""
    pipes = sum(one.target.startswith("pipe:") for one in watched)
    sockets = sum(one.target.startswith("socket:") for one in watched)
    addresses = all(one.data & _DESCRIPTOR_MASK != one.descriptor for one in watched)
    return pipes == 1 and sockets == len(watched) - 1 > 0 and addresses


def cut_gloo_connections() -> int:
    """Shut down every connection of gloo in this process, from any thread. Returns how many; 0 where the kernel does not show
    what an epoll instance watches."""
    cut = 0
    for descriptor in _descriptors("anon_inode:[eventpoll]"):
        watched = _watched_by(descriptor)
        if is_gloo(watched):
            cut += sum(_shut_down(one.descriptor) for one in watched if one.target.startswith("socket:"))
    return cut


def cut_nccl_connections() -> int:
    """Wake NCCL's proxies, which look for an abort twice a second: shut down what this process has accepted at an address of
    one interface, as NCCL listens, and NCCL's datagram sockets. From any thread, while the groups are aborted. Returns how
    many. Source: `ncclProxyService` and `ncclProxyServiceUDS` of NCCL's proxy.cc."""
    connections: dict[Any, list[int]] = {}
    listening, cut = set[Any](), 0
    for descriptor in _descriptors("socket:"):
        try:
            with socket.socket(fileno=os.dup(descriptor)) as one:
                if one.family in _INTERNET and one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    listening.add(one.getsockname())
                elif one.family in _INTERNET and one.type == socket.SOCK_STREAM:
                    connections.setdefault(one.getsockname(), []).append(descriptor)
                elif one.family == socket.AF_UNIX and _NCCL_NAME in str(one.getsockname()):
                    one.shutdown(socket.SHUT_RDWR)
                    cut += 1
        except OSError:  # closed meanwhile
            continue
    # A server at all addresses is none of NCCL's: metrics, a debugger, a store.
    accepted = [one for name in listening if name[0] not in _ANY_ADDRESS for one in connections.get(name, ())]
    return cut + sum(map(_shut_down, accepted))


def _descriptors(target: str) -> list[int]:
    """Those whose target begins so."""
    try:
        names = [path.name for path in _DESCRIPTORS.iterdir()]
    except OSError:
        return []
    return [int(name) for name in names if _target_of(name).startswith(target)]


def _target_of(descriptor: int | str) -> str:
    try:
        return str((_DESCRIPTORS / str(descriptor)).readlink())
    except OSError:  # closed meanwhile
        return ""


def _watched_by(descriptor: int) -> list[WatchedDescriptor]:
    try:
        lines = Path(f"/proc/self/fdinfo/{descriptor}").read_text(encoding="ascii").splitlines()
    except (OSError, ValueError):
        return []
    # tfd:       18 events:       19 data:     5651bb8b0620  pos:0 ino:754a3d sdev:9
    fields = [line.split() for line in lines if line.startswith("tfd:")]
    watched = [WatchedDescriptor(int(one[1]), _target_of(one[1]), int(one[5], 16)) for one in fields]
    return [one for one in watched if one.target]  # the connection to a dead rank may be closed meanwhile


def _shut_down(descriptor: int) -> bool:
    try:
        # A copy of the descriptor refers to the same socket even if its owner closes it now and the number is given away.
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            if connection.family not in _INTERNET or connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                return False
            connection.shutdown(socket.SHUT_RDWR)
    except OSError:  # closed, or never connected
        return False
    return True
