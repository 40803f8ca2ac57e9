"""A group of hosts in one process: threads on loopback, and a shared table in memory."""

import secrets
import threading
from collections.abc import Callable, Sequence
from typing import Any

from elastictrain.config.preflight import PreflightLimits
from elastictrain.preflight.links.messages import HostIntroduction
from elastictrain.preflight.links.probes import LinkOptions
from elastictrain.preflight.links.responder import responder_secret, start_responder
from elastictrain.preflight.links.session import LinkReport, LinkSession
from tests.unit.preflight.table import Table

QUICK = LinkOptions(roster_s=5.0, limits=PreflightLimits(stream_s=0.05))
"""Short streams: on loopback, bytes flow at once."""


class Responding:
    """The responder of one host, with a nonce of its own."""

    def __init__(self, address: str, ports: Sequence[int] = (0,)) -> None:
        self._server, self.nonce = start_responder(address, ports), secrets.token_bytes(16)
        self.tcp_ports = tuple(listener.getsockname()[1] for listener in self._server.listeners)

    def set_token(self, token: bytes) -> None:
        self._server.set_secret(responder_secret(token, self.nonce))

    def close(self) -> None:
        self._server.close()


def host(rank: int, **changed: Any) -> HostIntroduction:
    """Host `h1` of node rank 0, `h2` of 1 and so on: with addresses of their own on loopback."""
    facts: dict[str, Any] = {
        "name": f"h{rank + 1}",
        "node_rank": rank,
        "address": f"127.0.0.{rank + 1}",
        "interface": "lo",
        "mtu": 65536,
    }
    return HostIntroduction(**{**facts, **changed})


def names(num_hosts: int) -> tuple[str, ...]:
    return tuple(f"h{rank + 1}" for rank in range(num_hosts))


def run_group(
    num_hosts: int,
    *,
    options: LinkOptions = QUICK,
    started: tuple[int, ...] | None = None,
    session: Callable[[LinkSession], None] = lambda session: None,
    table: Table | None = None,
    **changed: Any,
) -> list[LinkReport]:
    """The reports of the hosts `started` (all, if not given). `session` may change each before it runs."""
    shared = table or Table()
    ranks = tuple(range(num_hosts)) if started is None else started
    reports: dict[int, LinkReport] = {}

    def run(rank: int) -> None:
        one = LinkSession(host=host(rank), names=names(num_hosts), exchange=shared, options=options, **changed)
        session(one)
        reports[rank] = one.run()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a session does not end"
    return [reports[rank] for rank in ranks]
