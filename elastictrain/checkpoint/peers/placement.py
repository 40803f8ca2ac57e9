"""The hosts of a run, and which host keeps whose replicas."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec

_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=255)]
_Number = Annotated[int, msgspec.Meta(ge=0, le=2**31)]


@dataclass(frozen=True, slots=True)
class Peer:
    """One saver. Two on the same `host` share a machine, and are lost together."""

    host: _Name
    address: _Name  # IP address or name, without the port
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    ranks: tuple[_Number, ...]  # whose snapshots it has
    number: _Number  # its unique number among the peers

    def __post_init__(self) -> None:
        if not (self.host.isprintable() and self.address.isprintable()):
            raise ValueError(f"`host` and `address` must be names, but are {self.host!r} and {self.address!r}")

    @property
    def place(self) -> str:
        return f"{self.host} ({f'[{self.address}]' if ':' in self.address else self.address}:{self.port})"


def check_roster(roster: Sequence[Peer]) -> None:
    """Raises: ValueError if there is no peer, or two have the same number or a common rank."""
    if not roster:
        raise ValueError("a roster must have peers")
    numbers = sorted(peer.number for peer in roster)
    if len(set(numbers)) != len(numbers):
        raise ValueError(f"the peers of a roster must have different numbers, but have {numbers}")
    ranks = Counter(rank for peer in roster for rank in peer.ranks)
    twice = sorted(rank for rank, times in ranks.items() if times > 1)
    if twice:
        raise ValueError(f"each rank must be at one peer of a roster, but these are at several: {twice}")


def replica_target_of(peer: Peer, roster: Sequence[Peer]) -> Peer | None:
    """Return the peer that keeps the replicas of `peer`: always on another host; None if there is no other host.

    With one peer per host it is the next in a ring. In general every peer keeps the replicas of exactly one other, unless one
    host has more than half of all peers: then the others divide its replicas evenly.

    Raises: ValueError if `peer` is not in the roster.
    """
    return _targets(roster, of=peer)[peer]


def replica_sources_of(peer: Peer, roster: Sequence[Peer]) -> tuple[Peer, ...]:
    """Return the peers whose replicas `peer` keeps, by number. Raises: ValueError if it is not in the roster."""
    targets = _targets(roster, of=peer)
    return tuple(sorted((source for source, target in targets.items() if target == peer), key=lambda one: one.number))


def _targets(roster: Sequence[Peer], *, of: Peer) -> dict[Peer, Peer | None]:
    if of not in roster:
        raise ValueError(f"{of.place} is not in the roster")
    by_host: dict[str, list[Peer]] = defaultdict(list)
    for peer in sorted(roster, key=lambda peer: peer.number):
        by_host[peer.host].append(peer)
    # The host with most peers first; the sort is stable, so equal hosts stay in the order of their first numbers.
    hosts = sorted(by_host.values(), key=len, reverse=True)
    ring = [peer for host in hosts for peer in host]
    largest = len(hosts[0])
    if len(hosts) < 2:
        return dict.fromkeys(ring)
    if 2 * largest <= len(ring):
        # A shift by the size of the largest host leaves every host, and does not wrap around into it again.
        return {peer: ring[(place + largest) % len(ring)] for place, peer in enumerate(ring)}
    most, others = ring[:largest], ring[largest:]
    crowded: dict[Peer, Peer | None] = {peer: others[place % len(others)] for place, peer in enumerate(most)}
    return crowded | dict(zip(others, most, strict=False))
