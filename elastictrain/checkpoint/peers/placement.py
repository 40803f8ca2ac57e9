"""The hosts of a run, and which of them keeps whose replicas."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from elastictrain.checkpoint.manifest import JsonValue

_FIELDS = {"host", "address", "port", "ranks", "number"}
_LAST_PORT = 65535
_LONGEST = 255


@dataclass(frozen=True, slots=True)
class Peer:
    """One saver. Two of the same `host` are on the same machine, and are lost together."""

    host: str
    address: str
    """An IP address or a name, without the port."""

    port: int
    ranks: tuple[int, ...]
    """Whose snapshots it has."""

    number: int
    """Its place among the peers; no two have the same."""

    @property
    def place(self) -> str:
        """For messages."""
        return f"{self.host} ({f'[{self.address}]' if ':' in self.address else self.address}:{self.port})"


def roster_to_json(roster: Sequence[Peer]) -> JsonValue:
    """For the other ranks."""
    return [
        {"host": peer.host, "address": peer.address, "port": peer.port, "ranks": list(peer.ranks), "number": peer.number}
        for peer in roster
    ]


def roster_from_json(value: JsonValue) -> tuple[Peer, ...]:
    """The inverse of `roster_to_json`. Raises: ValueError naming the peer and what is wrong with it."""
    if not isinstance(value, list) or not value:
        raise ValueError(f"a roster must be a list of peers, but is {value!r:.200}")
    roster = tuple(_peer(one, where=f"peer {place} of the roster") for place, one in enumerate(value))
    numbers = [peer.number for peer in roster]
    if len(set(numbers)) != len(numbers):
        raise ValueError(f"the peers of a roster must have different numbers, but have {sorted(numbers)}")
    ranks = [rank for peer in roster for rank in peer.ranks]
    if len(set(ranks)) != len(ranks):
        twice = sorted(rank for rank in set(ranks) if ranks.count(rank) > 1)
        raise ValueError(f"each rank must be at one peer of a roster, but these are at several: {twice}")
    return roster


def _peer(value: JsonValue, *, where: str) -> Peer:
    if not isinstance(value, dict) or value.keys() != _FIELDS:
        raise ValueError(f"{where} must have the fields {sorted(_FIELDS)}, but is {value!r:.200}")
    ranks = value["ranks"]
    if not isinstance(ranks, list):
        raise ValueError(f"{where}: `ranks` must be a list, but is {ranks!r:.200}")
    return Peer(
        _name(value, "host", where=where),
        _name(value, "address", where=where),
        _count(value["port"], "port", where=where, least=1, most=_LAST_PORT),
        tuple(_count(rank, "ranks", where=where) for rank in ranks),
        _count(value["number"], "number", where=where),
    )


def _name(value: dict[str, JsonValue], field: str, *, where: str) -> str:
    found = value[field]
    if not isinstance(found, str) or not found or len(found) > _LONGEST or not found.isprintable():
        raise ValueError(f"{where}: `{field}` must be a name of 1 to {_LONGEST} characters, but is {found!r:.200}")
    return found


def _count(value: JsonValue, field: str, *, where: str, least: int = 0, most: int = 2**31) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ValueError(f"{where}: `{field}` must be a number from {least} to {most}, but is {value!r:.200}")
    return value


def replica_target_of(peer: Peer, roster: Sequence[Peer]) -> Peer | None:
    """The peer that keeps the replicas of `peer`: always on another host; None if there is no other host.

    With one peer on each host it is the next in a ring. In general every peer keeps the replicas of exactly one other, unless
    one host has more than half of all peers: then the others share out its replicas evenly.

    Raises: ValueError if `peer` is not in the roster.
    """
    return _buddies(roster, of=peer)[peer]


def replica_sources_of(peer: Peer, roster: Sequence[Peer]) -> tuple[Peer, ...]:
    """The peers whose replicas `peer` keeps, by number. Raises: ValueError if it is not in the roster."""
    buddies = _buddies(roster, of=peer)
    return tuple(sorted((ward for ward, buddy in buddies.items() if buddy == peer), key=lambda ward: ward.number))


def _buddies(roster: Sequence[Peer], *, of: Peer) -> dict[Peer, Peer | None]:
    if of not in roster:
        raise ValueError(f"{of.place} is not in the roster")
    by_host: dict[str, list[Peer]] = defaultdict(list)
    for peer in sorted(roster, key=lambda peer: peer.number):
        by_host[peer.host].append(peer)
    # The host with most peers first; sorting is stable, so otherwise the order is that of their first numbers.
    hosts = sorted(by_host.values(), key=len, reverse=True)
    ring = [peer for host in hosts for peer in host]
    largest = len(hosts[0])
    if len(hosts) < 2:
        return dict.fromkeys(ring)
    if 2 * largest <= len(ring):
        # A step as long as the largest host has peers leads out of every host, and not around the ring into it again.
        return {peer: ring[(place + largest) % len(ring)] for place, peer in enumerate(ring)}
    most, others = ring[:largest], ring[largest:]
    crowded: dict[Peer, Peer | None] = {peer: others[place % len(others)] for place, peer in enumerate(most)}
    return crowded | dict(zip(others, most, strict=False))
