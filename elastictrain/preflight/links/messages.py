"""What hosts tell each other about links, and the orders of the first host: records of JSON."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Annotated

from msgspec import Meta

from elastictrain.preflight.transport.infiniband import Rdma

Place = Annotated[int, Meta(ge=0)]
"""Of a host in the roster."""

Link = tuple[Place, Place]
"""From the first host to the second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostIntroduction:
    """How a host says who it is. `interface` and `mtu` are of the one that `address` belongs to; `mtu` None: unknown.

    `kinds`: what RDMA it could do. `trouble`: why it cannot listen for the others; empty if it can.
    """

    name: str
    node_rank: int
    address: str
    interface: str
    mtu: int | None
    tcp_ports: Annotated[tuple[int, ...], Meta(min_length=1)] = (0,)
    udp_port: int = 0
    nonce: str = ""
    """Of this start, in hexadecimal: two hosts that claim the same node rank differ in it."""
    kinds: frozenset[Rdma] = frozenset()
    trouble: str = ""

    def __post_init__(self) -> None:
        bytes.fromhex(self.nonce)


@dataclass(frozen=True, slots=True, kw_only=True)
class Contact:
    """What one host found of its way to another.

    `blocked`: port and reason, for each port that cannot be used. `largest`: bytes of the largest IP packet that arrived whole;
    0 if none was acknowledged, None if it was not tried. `intended`: bytes that should pass, by both interfaces.
    `offset_s`: the other's clock minus our own.
    """

    link: Link
    blocked: tuple[tuple[int, str], ...] = ()
    largest: int | None = None
    intended: int | None = None
    latency_s: float | None = None
    offset_s: float | None = None

    @property
    def loses_large(self) -> bool:
        """Whether small frames pass, and larger ones that should do not. With 0 no frame of any size was acknowledged."""
        return bool(self.largest and self.intended and self.largest < self.intended)


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """Bandwidth from one host to another: 10^9 bits of payload per second. `both`: while as much as possible came back.

    `waited`: the part of the time, from 0 to 1, for which the ends had no processor, and could have gone on.
    """

    link: Link
    gbps: float
    both: bool = False
    waited: float = 0.0


@dataclass(frozen=True, slots=True)
class LinkFindings:
    """What one host found out."""

    contacts: tuple[Contact, ...]
    flows: tuple[Flow, ...]

    def links(self) -> tuple[Link, ...]:
        """All that they are about."""
        return tuple(one.link for found in (self.contacts, self.flows) for one in found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Roster:
    """Who takes part: what all go by, as the first host published it.

    `hosts` by their places. `absent`: node ranks that nobody introduced himself for in `waited_s`. `token` keeps strangers out.
    """

    hosts: tuple[HostIntroduction, ...]
    absent: tuple[int, ...]
    waited_s: float
    token: str = field(repr=False)


def merged(contacts: Iterable[Contact]) -> dict[Link, Contact]:
    """One contact per link: the best of what was found, so that a second probe clears what a first one missed by chance."""
    found: dict[Link, Contact] = {}
    for other in contacts:
        one = found.get(other.link, other)
        ports = {port for port, _ in one.blocked}
        fastest = min(one, other, key=lambda contact: math.inf if contact.latency_s is None else contact.latency_s)
        found[other.link] = replace(
            other,
            blocked=tuple(blocked for blocked in other.blocked if blocked[0] in ports),
            largest=max((size for size in (one.largest, other.largest) if size is not None), default=None),
            intended=other.intended or one.intended,
            latency_s=fastest.latency_s,
            offset_s=fastest.offset_s,
        )
    return found


@dataclass(frozen=True, slots=True)
class Order:
    """What the first host has the others do next: nothing any more, where there are no links.

    The first host of each link probes the second one or, to `measure`, finds the bandwidth there and back. Then no host is in
    two links, so that nobody's bandwidth is shared.
    """

    links: tuple[Link, ...]
    measure: bool = False

    def concerns(self, place: int) -> bool:
        """Whether this host reports; of a measurement both hosts do, so that one that is gone is known by its silence."""
        return any(place in (link if self.measure else link[:1]) for link in self.links)
