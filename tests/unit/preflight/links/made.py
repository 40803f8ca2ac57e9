"""Rosters and measurements of hosts that do not exist: h1, h2 and so on, on eth0."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from elastictrain.preflight.links.messages import Contact, Flow, HostIntroduction, Link, Roster


def introduction(place: int, **changed: Any) -> HostIntroduction:
    facts: dict[str, Any] = {
        "name": f"h{place + 1}",
        "node_rank": place,
        "address": f"10.0.0.{place + 1}",
        "interface": "eth0",
        "mtu": 9000,
        "tcp_ports": (29501, 29502),
        "port_spans": ("32768:60999", "29502"),
        "nonce": f"{place:032x}",
    }
    return HostIntroduction(**{**facts, **changed})


def roster(num_hosts: int, *, absent: tuple[int, ...] = ()) -> Roster:
    return Roster(hosts=tuple(introduction(place) for place in range(num_hosts)), absent=absent, waited_s=10.0, token="ab" * 32)


def all_links(num_hosts: int) -> list[Link]:
    return [(a, b) for a in range(num_hosts) for b in range(num_hosts) if a != b]


def contacts(num_hosts: int, change: Callable[[Link], Mapping[str, Any]] = lambda link: {}) -> dict[Link, Contact]:
    """All links, healthy but for what `change` says of them."""
    healthy: dict[str, Any] = {"largest": 9000, "intended": 9000, "latency_s": 2e-4, "offset_s": 0.0, "sent": 10_000}
    return {link: Contact(**{"link": link, **healthy, **change(link)}) for link in all_links(num_hosts)}


def flows(links: Iterable[Link], gbps: Callable[[Link], float]) -> list[Flow]:
    """One way and both ways alike."""
    return [Flow(link=link, gbps=gbps(link), both=both) for link in links for both in (False, True)]
