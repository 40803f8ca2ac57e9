"""A roster that is served over loopback, and connections to it."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager

from elastictrain.config.roster_address import RosterAddress
from elastictrain.launch.membership.objects import Objects
from elastictrain.launch.membership.tcp_roster import TcpRoster
from elastictrain.launch.membership.tcp_server import RosterServer, ServerLimits

TOKEN = b"t" * 32
CLOSE_S = 5.0


def free_address(host: str = "127.0.0.1") -> RosterAddress:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind((host, 0))
        return RosterAddress(host, probe.getsockname()[1])


@contextmanager
def served(
    store: Objects, address: RosterAddress | None = None, *, token: bytes = TOKEN, limits: ServerLimits | None = None
) -> Iterator[RosterServer]:
    server = RosterServer(address or free_address(), store, token=token, limits=limits)
    server.start()
    try:
        yield server
    finally:
        server.close(limit_s=CLOSE_S)
        assert not server._thread.is_alive()


@contextmanager
def connected(server: RosterServer | RosterAddress, *, token: bytes = TOKEN, limit_s: float = 4.0) -> Iterator[TcpRoster]:
    address = server._address if isinstance(server, RosterServer) else server
    roster = TcpRoster(address, token=token, limit_s=limit_s)
    try:
        yield roster
    finally:
        roster.close()
