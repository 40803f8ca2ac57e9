"""Which hosts can train together: the largest set of those that all hear each other. Pure, the same on every host that asks.

Storage tells who lives, and not who reaches whom. Each host writes in its record whose heartbeats it receives; two hosts hear
each other if both say so.
"""

from collections.abc import Mapping, Sequence

from elastictrain.config.launch import LaunchGroup
from elastictrain.launch.membership.observation import ClusterState
from elastictrain.launch.membership.records import Generation, HostRecord

_MOST_EXACT = 12
"""Hosts up to which every set is looked at; the number of sets grows exponentially."""

_MOST_TRIES = 16
"""Sets that are tried of more hosts than that: network partitions are found, the largest of any sets may not be."""


def largest_group(ready: Sequence[HostRecord], cluster: ClusterState) -> list[HostRecord]:
    """The largest set of `ready` hosts that all hear each other, in their order; of equal ones that of the foremost host."""
    heard = hearing(cluster)
    hosts = {one.host for one in ready}
    if all(hosts - {host} <= heard.get(host, frozenset()) for host in hosts):
        return list(ready)
    near = [
        frozenset(place for place, other in enumerate(ready) if other is not one and _mutual(one.host, other.host, heard))
        for one in ready
    ]
    places = _largest(near) if len(ready) <= _MOST_EXACT else _large(near)
    return [ready[place] for place in places]


def hearing(cluster: ClusterState) -> Mapping[str, frozenset[str]]:
    """Whom each host hears, as far as is known here."""
    return {cluster.me.host: cluster.heard, **{host: frozenset(one.record.hears) for host, one in cluster.observed.items()}}


def unheard_by(host: str, others: Sequence[str], heard: Mapping[str, frozenset[str]]) -> list[str]:
    """Those that a host does not hear, or that do not hear it."""
    return [other for other in others if other != host and not _mutual(host, other, heard)]


def unheard_members(cluster: ClusterState, generation: Generation) -> list[str]:
    """Names of members that this host, which is none of them, does not hear or that do not hear it."""
    unheard = frozenset(unheard_by(cluster.me.host, [member.host for member in generation.members], hearing(cluster)))
    return [member.name for member in generation.members if member.host in unheard]


def pairs_without_sound(ready: Sequence[HostRecord], cluster: ClusterState) -> list[tuple[str, str]]:
    """Names of hosts that do not hear each other."""
    heard = hearing(cluster)
    return [
        (one.name, other.name)
        for place, one in enumerate(ready)
        for other in ready[place + 1 :]
        if not _mutual(one.host, other.host, heard)
    ]


def settles_s(ready: Sequence[HostRecord], cluster: ClusterState, options: LaunchGroup, *, since_s: float) -> float:
    """When it counts that some of these hosts do not hear each other: what any of them hears must be the same for a while.

    Hosts that a network brings together again do not hear each other all at the same moment.
    """
    observed = [cluster.observed[one.host] for one in ready if one.host in cluster.observed]
    changes_s = [time_s for one in observed for time_s in (one.hears_since_s, one.since_s)]
    return max([since_s, cluster.heard_since_s, *changes_s]) + options.lost_s / 2


def _mutual(one: str, other: str, heard: Mapping[str, frozenset[str]]) -> bool:
    # Of a host without a line, only what the other one says is known.
    return all(host not in heard or whom in heard[host] for host, whom in ((one, other), (other, one)))


def _largest(near: Sequence[frozenset[int]]) -> tuple[int, ...]:
    """The largest set of places that are all near each other, the first one in the order of places among equals."""
    best: tuple[int, ...] = ()

    def extend(chosen: tuple[int, ...], left: list[int]) -> None:
        nonlocal best
        if len(chosen) > len(best):
            best = chosen
        for index, one in enumerate(left):
            if len(chosen) + len(left) - index <= len(best):
                return
            extend((*chosen, one), [other for other in left[index + 1 :] if other in near[one]])

    extend((), list(range(len(near))))
    return best


def _large(near: Sequence[frozenset[int]]) -> tuple[int, ...]:
    """A large set of places that are all near each other: from some that have most others near them, the same in turn."""
    by_degree = sorted(range(len(near)), key=lambda place: (-len(near[place]), place))
    tries = [_grow(first, by_degree, near) for first in by_degree[:_MOST_TRIES]]
    return min(tries, key=lambda places: (-len(places), places))


def _grow(first: int, by_degree: Sequence[int], near: Sequence[frozenset[int]]) -> tuple[int, ...]:
    chosen, left = [first], near[first]
    for place in by_degree:
        if place in left:
            chosen.append(place)
            left &= near[place]
    return tuple(sorted(chosen))
