"""Which peer keeps the replicas of which other. Pure: a function of the roster, whatever the order that lists it."""

from collections import defaultdict
from collections.abc import Sequence

from elastictrain.checkpoint.peers.roster import Peer


def buddy_of(peer: Peer, roster: Sequence[Peer]) -> Peer | None:
    """The peer that keeps the replicas of `peer`: always on another host; None if there is no other host.

    With one peer on each host it is the next in a ring. In general every peer keeps the replicas of exactly one other, unless
    one host has more than half of all peers: then the others share out its replicas evenly.

    Raises: ValueError if `peer` is not in the roster.
    """
    return _buddies(roster, of=peer)[peer]


def wards_of(peer: Peer, roster: Sequence[Peer]) -> tuple[Peer, ...]:
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
