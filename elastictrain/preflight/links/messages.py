"""What hosts tell each other about links, the orders of the first host, and their JSON form."""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from elastictrain.preflight.links.options import LinkOptions
from elastictrain.preflight.links.rounds import Round
from elastictrain.preflight.table import from_json, to_json
from elastictrain.preflight.verdict import Verdict

Row = dict[str, Any]
"""An object of JSON."""

Link = tuple[int, int]
"""From the first host to the second: their places in the roster."""


class GarbledError(ValueError):
    """What came is not what this release writes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostIntroduction:
    """How a host says who it is. `interface` and `mtu` are of the one that `address` belongs to; `mtu` None: unknown."""

    name: str
    node_rank: int
    address: str
    interface: str
    mtu: int | None
    tcp_ports: tuple[int, ...]
    udp_port: int
    nonce: str
    """Of this start: two hosts that claim the same node rank differ in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contact:
    """What one host found of its way to another.

    `blocked`: port and reason, for each port that cannot be used. `largest`: bytes of the largest IP packet that arrived whole;
    0 if none was acknowledged, None if it was not tried. `intended`: bytes that should pass, by both interfaces.
    `offset_s`: the other's clock minus our own.
    """

    source: int
    target: int
    blocked: tuple[tuple[int, str], ...] = ()
    largest: int | None = None
    intended: int | None = None
    latency_s: float | None = None
    offset_s: float | None = None

    @property
    def link(self) -> Link:
        """The way that was looked at."""
        return (self.source, self.target)

    @property
    def loses_large(self) -> bool:
        """Whether small frames pass, and larger ones that should do not."""
        return bool(self.largest and self.intended and self.largest < self.intended)

    @property
    def is_silent(self) -> bool:
        """Whether no frame of any size was acknowledged."""
        return self.largest == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """Bandwidth from one host to another: 10^9 bits of payload per second. `both`: while as much as possible came back.

    `waited`: the part of the time, from 0 to 1, for which the ends had no processor, and could have gone on.
    """

    source: int
    target: int
    gbps: float
    both: bool = False
    waited: float = 0.0

    @property
    def link(self) -> Link:
        """The way that the bytes took."""
        return (self.source, self.target)

    def excused_gbps(self) -> float:
        """What it might have been, had there been processors all the time."""
        return self.gbps / max(1.0 - self.waited, 0.02)


@dataclass(frozen=True, slots=True)
class LinkFindings:
    """What one host, or several, found out."""

    contacts: tuple[Contact, ...] = ()
    flows: tuple[Flow, ...] = ()

    def __add__(self, other: "LinkFindings") -> "LinkFindings":
        return LinkFindings(self.contacts + other.contacts, self.flows + other.flows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Roster:
    """Who takes part: what all go by, as the first host published it.

    `hosts` by their places. `absent`: node ranks that nobody introduced himself for in `waited_s`. `token` keeps strangers out.
    """

    hosts: tuple[HostIntroduction, ...]
    absent: tuple[int, ...]
    waited_s: float
    token: str = field(repr=False)

    def labels(self) -> tuple[str, ...]:
        """What each host is called: its name, with the node rank where names are not unique."""
        counts = Counter(host.name for host in self.hosts)
        return tuple(
            host.name if counts[host.name] == 1 else f"{host.name} (node rank {host.node_rank})" for host in self.hosts
        )


def merged(contacts: Iterable[Contact]) -> dict[Link, Contact]:
    """One contact per link: the best of what was found, so that a second probe clears what a first one missed by chance."""
    found: dict[Link, Contact] = {}
    for contact in contacts:
        before = found.get(contact.link)
        found[contact.link] = contact if before is None else _better(before, contact)
    return found


def _better(one: Contact, other: Contact) -> Contact:
    ports = {port for port, _ in one.blocked} & {port for port, _ in other.blocked}
    sizes = [size for size in (one.largest, other.largest) if size is not None]
    timed = [contact for contact in (one, other) if contact.latency_s is not None]
    fastest = min(timed, key=lambda contact: contact.latency_s or 0.0, default=one)
    return replace(
        other,
        blocked=tuple(blocked for blocked in other.blocked if blocked[0] in ports),
        largest=max(sizes, default=None),
        intended=other.intended or one.intended,
        latency_s=fastest.latency_s,
        offset_s=fastest.offset_s,
    )


def encode(value: HostIntroduction | LinkFindings | Roster) -> bytes:
    """As JSON."""
    return json.dumps(asdict(value), separators=(",", ":")).encode()


def decode_introduction(data: bytes) -> HostIntroduction:
    """Raises: GarbledError."""
    return _introduction(_object(data))


def decode_roster(data: bytes) -> Roster:
    """Raises: GarbledError."""
    row = _object(data)
    try:
        return Roster(
            hosts=tuple(_introduction(host) for host in row["hosts"]),
            absent=tuple(int(rank) for rank in row["absent"]),
            waited_s=float(row["waited_s"]),
            token=str(row["token"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise GarbledError(f"a roster is garbled: {error!r}") from error


def decode_findings(data: bytes, *, num_hosts: int) -> LinkFindings:
    """Raises: GarbledError."""
    row = _object(data)
    found: list[Contact | Flow]
    try:
        contacts = tuple(_contact(one) for one in row["contacts"])
        flows = tuple(
            Flow(
                source=_whole(one["source"]),
                target=_whole(one["target"]),
                gbps=float(one["gbps"]),
                both=bool(one["both"]),
                waited=float(one["waited"]),
            )
            for one in row["flows"]
        )
    except (KeyError, TypeError, ValueError) as error:
        raise GarbledError(f"findings are garbled: {error!r}") from error
    found = [*contacts, *flows]
    places = {place for one in found for place in one.link}
    if not places <= set(range(num_hosts)):
        raise GarbledError(f"findings tell of hosts {sorted(places)}, but there are {num_hosts}")
    return LinkFindings(contacts, flows)


def _contact(row: Row) -> Contact:
    blocked = row["blocked"]
    if not isinstance(blocked, Sequence):
        raise TypeError("blocked must be a list")
    return Contact(
        source=_whole(row["source"]),
        target=_whole(row["target"]),
        blocked=tuple((int(port), str(why)) for port, why in blocked),
        largest=None if row["largest"] is None else _whole(row["largest"]),
        intended=None if row["intended"] is None else _whole(row["intended"]),
        latency_s=_maybe(row["latency_s"]),
        offset_s=_maybe(row["offset_s"]),
    )


def _introduction(row: Row) -> HostIntroduction:
    try:
        ports = row["tcp_ports"]
        if not isinstance(ports, Sequence):
            raise TypeError("tcp_ports must be a list")
        if not ports:
            raise ValueError("tcp_ports must not be empty")
        bytes.fromhex(str(row["nonce"]))
        return HostIntroduction(
            name=str(row["name"]),
            node_rank=_whole(row["node_rank"]),
            address=str(row["address"]),
            interface=str(row["interface"]),
            mtu=None if row["mtu"] is None else _whole(row["mtu"]),
            tcp_ports=tuple(_whole(port) for port in ports),
            udp_port=_whole(row["udp_port"]),
            nonce=str(row["nonce"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise GarbledError(f"an introduction is garbled: {error!r}") from error


def _object(data: bytes) -> Row:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise GarbledError(f"it is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise GarbledError(f"it must be an object, but is {type(value).__name__}")
    return value


def _whole(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{value!r} is no whole number")
    return value


def _maybe(value: object) -> float | None:
    if value is None:
        return None
    if not isinstance(value, int | float):
        raise TypeError(f"{value!r} is no number")
    return float(value)


@dataclass(frozen=True, slots=True)
class MakeContact:
    """The source of each link looks at its target."""

    links: tuple[Link, ...]

    def limit_s(self, options: LinkOptions) -> float:
        """When all must be done."""
        return options.contact_s

    def concerns(self, place: int) -> bool:
        """Whether this host has something to do and to report."""
        return any(link[0] == place for link in self.links)

    doing = "contacts were made"


@dataclass(frozen=True, slots=True)
class Measure:
    """Bandwidth, in rounds; links whose ends have not met yet are looked at first."""

    rounds: tuple[Round, ...]
    met: tuple[Link, ...] = ()

    def limit_s(self, options: LinkOptions) -> float:
        """When all must be done: rounds have their ends on a common time table, so that a dead pair costs no other round."""
        return len(self.rounds) * self.round_s(options)

    def round_s(self, options: LinkOptions) -> float:
        """One round at the most."""
        pairs = {pair for pairs in self.rounds for pair in pairs}
        return options.round_s + (0.0 if pairs <= set(self.met) else options.contact_s)

    def concerns(self, place: int) -> bool:
        """Whether this host has something to do and to report."""
        return any(place in pair for pairs in self.rounds for pair in pairs)

    doing = "bandwidth was measured"


@dataclass(frozen=True, slots=True)
class Adopt:
    """The end."""

    verdicts: tuple[Verdict, ...]


Order = MakeContact | Measure | Adopt


def encode_order(order: Order) -> bytes:
    """As JSON."""
    row: dict[str, object]
    match order:
        case MakeContact(links):
            row = {"order": "contact", "links": links}
        case Measure(rounds, met):
            row = {"order": "measure", "rounds": rounds, "met": met}
        case Adopt(verdicts):
            row = {"order": "adopt", "verdicts": to_json(verdicts)}
    return json.dumps(row, separators=(",", ":")).encode()


def decode_order(data: bytes, *, num_hosts: int) -> Order:
    """Raises: GarbledError."""
    try:
        row = json.loads(data)
        match row["order"]:
            case "contact":
                return MakeContact(_links(row["links"], num_hosts))
            case "measure":
                return Measure(tuple(_links(pairs, num_hosts) for pairs in row["rounds"]), _links(row["met"], num_hosts))
            case "adopt":
                return Adopt(tuple(from_json(row["verdicts"])))
            case other:
                raise GarbledError(f"there is no order {other!r}")
    except GarbledError:
        raise
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise GarbledError(f"an order is garbled: {error!r}") from error


def _links(rows: list[list[int]], num_hosts: int) -> tuple[Link, ...]:
    found = []
    for a, b in rows:
        if not (isinstance(a, int) and isinstance(b, int) and 0 <= a < num_hosts and 0 <= b < num_hosts and a != b):
            raise GarbledError(f"there is no link from {a} to {b} among {num_hosts} hosts")
        found.append((a, b))
    return tuple(found)
