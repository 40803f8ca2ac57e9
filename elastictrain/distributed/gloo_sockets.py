"""Ends the connections of this process's gloo groups, which wakes what is blocked in one of their collectives.

gloo has no abort: a rank that waits for a live rank waits until that one closes its connections, and a group closes them only
when its last reference is gone and none of its threads waits for a third rank. `shutdown(2)` on the sockets of this process
needs no other rank and no reference: each pending operation raises within milliseconds, here and at the other end.
"""

import os
import socket
from dataclasses import dataclass
from pathlib import Path

_DESCRIPTORS = Path("/proc/self/fd")
_DESCRIPTOR_MASK = 0xFFFFFFFF
_INTERNET = (socket.AF_INET, socket.AF_INET6)


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


def _descriptors(target: str) -> list[int]:
    try:
        names = [path.name for path in _DESCRIPTORS.iterdir()]
    except OSError:
        return []
    return [int(name) for name in names if _target_of(name) == target]


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
