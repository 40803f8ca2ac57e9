"""Records (JSON) that hosts exchange for the link checks, and the orders of the first host."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Annotated

from msgspec import Meta

from elastictrain.preflight.transport.infiniband import Rdma

_Z = 2.6  # standard deviations
_LEAST_LOST = 5  # fewer may be one burst
_LEAST_SENT = 500  # fewer clear nobody: under loss TCP sends little

Place = Annotated[int, Meta(ge=0)]  # a host's index in the roster
Link = tuple[Place, Place]  # from the first host to the second


@dataclass(frozen=True, slots=True, kw_only=True)
class HostIntroduction:
    name: str
    node_rank: int
    address: str  # the next two fields are of the interface with this address
    interface: str
    mtu: int | None  # None: unknown
    tcp_ports: Annotated[tuple[int, ...], Meta(min_length=1)] = (0,)
    port_spans: tuple[str, ...] = ()  # what a firewall must let through for each TCP port: itself, or a range as "32768:60999"
    nonce: str = ""  # of this start, hexadecimal: tells apart two hosts that claim the same node rank
    kinds: frozenset[Rdma] = frozenset()  # what RDMA it could do
    trouble: str = ""  # why it cannot listen for the others; empty if it can

    def __post_init__(self) -> None:
        bytes.fromhex(self.nonce)

    def span_of(self, port: int) -> str:
        return dict(zip(self.tcp_ports, self.port_spans, strict=False)).get(port, str(port))


@dataclass(frozen=True, slots=True, kw_only=True)
class Contact:
    """What one host measured of its way to another."""

    link: Link
    blocked: tuple[tuple[int, str], ...] = ()  # port and reason, for each port that cannot be used
    largest: int | None = None  # bytes of the largest IP packet that arrived whole; None: unknown
    intended: int | None = None  # bytes that should pass, by both interfaces
    latency_s: float | None = None
    offset_s: float | None = None  # the other host's clock minus this one's
    sent: int = 0  # TCP segments with data; 0: not counted
    lost: int = 0  # of them, those that did not arrive

    @property
    def least_loss(self) -> float | None:
        """The part of segments that is lost at least, with a confidence of 99.5 %; None for too few. Source: Wilson 1927."""
        if self.lost < _LEAST_LOST:
            return 0.0 if self.sent >= _LEAST_SENT else None
        part, z2n = self.lost / self.sent, _Z * _Z / self.sent
        return (part + z2n / 2 - math.sqrt(z2n * (part * (1 - part) + z2n / 4))) / (1 + z2n)

    @property
    def loses_large(self) -> bool:
        """Whether only small frames pass."""
        return bool(self.largest and self.intended and self.largest < self.intended)


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """Bandwidth from one host to another."""

    link: Link
    gbps: float  # 10^9 bits of payload per second
    both: bool = False  # whether as much as possible came back meanwhile
    waited: float = 0.0  # part of the time, 0 to 1, for which an end was ready to run and had no processor


@dataclass(frozen=True, slots=True)
class LinkFindings:
    contacts: tuple[Contact, ...]
    flows: tuple[Flow, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Roster:
    """Who takes part, as the first host published it. All hosts use this one."""

    hosts: tuple[HostIntroduction, ...]  # by their places
    absent: tuple[int, ...]  # node ranks that did not introduce themselves in `waited_s`
    waited_s: float
    token: str = field(repr=False)  # keeps strangers out


def merged(contacts: Iterable[Contact]) -> dict[Link, Contact]:
    """One contact per link, the best of each figure: a second probe clears what a first one missed by chance."""
    found: dict[Link, Contact] = {}
    for other in contacts:
        one = found.get(other.link, other)
        ports = {port for port, _ in one.blocked}
        fastest = min(one, other, key=lambda contact: math.inf if contact.latency_s is None else contact.latency_s)
        soundest = min(one, other, key=lambda contact: math.inf if contact.least_loss is None else contact.least_loss)
        found[other.link] = replace(
            other,
            blocked=tuple(blocked for blocked in other.blocked if blocked[0] in ports),
            largest=max((size for size in (one.largest, other.largest) if size is not None), default=None),
            intended=other.intended or one.intended,
            latency_s=fastest.latency_s,
            offset_s=fastest.offset_s,
            sent=soundest.sent,
            lost=soundest.lost,
        )
    return found


@dataclass(frozen=True, slots=True)
class Order:
    """The first host's next instruction to all; without links, the end. The first host of each link probes the second or, to
    `measure`, finds the bandwidth there and back; then no host is in two links, which would share its bandwidth."""

    links: tuple[Link, ...]
    measure: bool = False

    def concerns(self, place: int) -> bool:
        """Whether this host reports. After a measurement both hosts of a link do: a dead one is noticed by its silence."""
        return any(place in (link if self.measure else link[:1]) for link in self.links)
