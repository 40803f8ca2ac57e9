"""Listeners on given ports, and on ports that are spread over those from which the kernel picks."""

import errno
import random
import socket
from collections.abc import Sequence
from pathlib import Path

_PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_USUAL_RANGE = (32768, 60999)  # of Linux
_TRIES = 50

BACKLOG = 1024


def read_port_range() -> tuple[int, int]:
    """The first and the last port that the kernel picks from."""
    try:
        first, last = map(int, _PORT_RANGE.read_text().split())
    except (OSError, ValueError):
        return _USUAL_RANGE
    return first, last


def bind_everywhere(port: int) -> int:
    """Try a TCP port (0: any free one) on all addresses, without listening; returns it. Raises: OSError if it is taken."""
    # As torch's store does: on IPv6 and IPv4 at once, and a connection in TIME_WAIT does not block it.
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        if port:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        probe.bind(("", port))
        bound: int = probe.getsockname()[1]
        return bound


def listen(address: str, ports: Sequence[int]) -> list[socket.socket]:
    """A listener for each port. A port of 0 is any; each of several such is picked from a part of its own of the kernel's
    range, as a firewall may let through only a part of it. Raises: OSError; no listener remains then."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    (first, last), num_any = read_port_range(), ports.count(0)
    # Not the generator that a task may have seeded.
    made, chance = list[socket.socket](), random.SystemRandom()
    try:
        for place, port in enumerate(ports):
            index = ports[:place].count(0)
            # In the end whatever is free.
            picks = [first + int((last - first) * (index + chance.random()) / num_any) for _ in range(_TRIES) if not port]
            for pick in (*picks, port):
                try:
                    made.append(socket.create_server((address, pick), family=family, backlog=BACKLOG))
                    break
                except OSError as error:
                    if pick == port or error.errno != errno.EADDRINUSE:
                        raise
    except OSError:
        for one in made:
            one.close()
        raise
    return made
