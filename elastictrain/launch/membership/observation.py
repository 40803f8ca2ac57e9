"""What a host knows when it decides: which hosts are alive, silent or have left, and which reach each other.

All times are on its own monotonic clock; none is compared with another host's. There are two signs of life: heartbeats, within
seconds, and the `beat` in each host's record in storage, which is slow and may be unreachable: silence there counts only up
to the last read of the records. Only heartbeats prove reachability: two hosts are connected if each one's record contains
the other in `hears`.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from itertools import combinations
from math import inf

from elastictrain.config.composed import LaunchGroup
from elastictrain.fault.reasons import SlowRank
from elastictrain.launch.membership.poisoned import OnPoisoned
from elastictrain.launch.membership.records import End, Generation, GenerationMember, HostRecord, HostState

_REMEMBERED_S = 3600.0
_GONE_KEPT_S, _LEFTOVER_KEPT_S = 120.0, 1800.0
_MOST_EXACT = 12  # hosts up to which every set is tried; the number of sets grows exponentially
_MOST_TRIES = 16  # sets tried for more hosts than that: network partitions are found, the largest set may be missed


@dataclass(frozen=True, slots=True)
class HostObservation:
    record: HostRecord
    changed_s: float  # when a change of its beat was last seen, or the record was first read
    fresh: bool  # whether a change was ever seen: a record that was only read once may be a leftover
    since_s: float  # since when its state and the generation that it has finished are the same
    hears_since_s: float  # since when it has received heartbeats of the same hosts


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterState:
    """All inputs of one decision. The launcher's storage threads fill in the fields from storage, its loop the others."""

    me: HostRecord
    now_s: float = 0.0
    reads: int = 0  # reads of storage (generations and records) so far; 0: nothing is known yet
    began_s: float = 0.0  # end of this launcher's first read of storage: a generation that was over by then is none of its own
    running: Generation | None = None  # what runs or is being stopped here; None: nothing
    newest: Generation | None = None
    newest_since_s: float = 0.0
    slow_since_s: float = -inf  # since when `newest.slow` is the same
    follows_another: bool = False  # whether the generation before the newest one was not the last of a launch
    created: frozenset[int] = frozenset()  # numbers of generations that this host has tried to create
    ends: Mapping[str, End] = field(default_factory=dict)  # ends of `newest`, by host; read before `observed`
    ended_since_s: float | None = None
    observed: Mapping[str, HostObservation] = field(default_factory=dict)
    read_s: float = -inf
    """Last read of `observed`, in a turn in which this host's record could be written as well. Silence counts up to here: no
    host becomes silent while storage cannot be reached."""

    trouble: str = ""  # why the last access to storage failed; empty if it did not
    silent: frozenset[str] = frozenset()  # members of this host's current or last generation whose heartbeats have stopped
    heard: frozenset[str] = frozenset()  # hosts whose heartbeats arrive now, members or not
    heard_since_s: float = 0.0  # since when `heard` is the same
    expected_hosts: int = 0  # that the cluster promised; 0 if unknown
    ready: bool = False  # whether workers start here at once: torch is imported
    restart_cost_s: float = 0.0  # as measured, from an end to the next step; 0 if unknown
    most_processes: int = 0  # samples of a global batch: more workers than that have nothing to do; 0 if unknown
    left_s: float = inf  # until the run's time limit
    on_poisoned: OnPoisoned = "stop"
    stop_limit_s: float = 920.0  # limit of an orderly end on a host: a save and the shutdown
    stop_reason: str = ""  # why this host is to leave; empty if it stays
    straggles: SlowRank | None = None  # for which the workers here ask to leave this host out; None if they do not


def outdated(observed: Mapping[str, HostObservation], *, now_s: float) -> list[str]:
    """Hosts whose records may be deleted: each start of a launcher leaves one."""
    return [
        host
        for host, one in observed.items()
        if now_s - one.changed_s > (_GONE_KEPT_S if one.record.state is HostState.GONE else _LEFTOVER_KEPT_S)
    ]


def observe(
    before: Mapping[str, HostObservation], records: Iterable[HostRecord], *, own: str, now_s: float
) -> dict[str, HostObservation]:
    """Return the state of all records but the host's own. A record that is missing this time, or older than before, stays as it
    was: reads may lag. It is dropped after an hour without a change."""
    observed = {host: known for host, known in before.items() if now_s - known.changed_s < _REMEMBERED_S}
    for record in records:
        if record.host == own:
            continue
        known = before.get(record.host)
        if known is None:
            observed[record.host] = HostObservation(record, now_s, fresh=False, since_s=now_s, hears_since_s=now_s)
        elif record.beat > known.record.beat:
            same = (record.state, record.ended) == (known.record.state, known.record.ended)
            hears_since_s = known.hears_since_s if record.hears == known.record.hears else now_s
            since_s = known.since_s if same else now_s
            observed[record.host] = HostObservation(record, now_s, fresh=True, since_s=since_s, hears_since_s=hears_since_s)
        else:
            observed[record.host] = known
    return observed


def observe_datagrams(
    before: Mapping[str, HostObservation], records: Iterable[HostRecord], *, own: str, now_s: float
) -> dict[str, HostObservation]:
    """Merge records from datagrams, before storage shows them; only of hosts whose record was read from storage before.
    A datagram leaves out `hears` and `writers`, which take room: they stay as they were."""
    complete = (
        replace(one, hears=before[one.host].record.hears, writers=before[one.host].record.writers)
        for one in records
        if one.host in before
    )
    return observe(before, complete, own=own, now_s=now_s)


def patience_s(state: HostState, options: LaunchGroup) -> float:
    """How long a beat may stand still. A host that trains writes less often than one that waits."""
    waiting_s = max(options.lost_s, 3 * options.poll_s)
    return waiting_s + options.lost_s if state is HostState.BUSY else waiting_s


def takeover_s(options: LaunchGroup) -> float:
    """How long all members of a generation must be silent before another host takes over."""
    return max(4 * options.lost_s, 2 * patience_s(HostState.BUSY, options))


def quiet_s(observed: HostObservation, cluster: ClusterState) -> float:
    """How long its beat has stood still, as far as is known."""
    return max(0.0, cluster.read_s - observed.changed_s)


def is_alive(observed: HostObservation, cluster: ClusterState, options: LaunchGroup) -> bool:
    """Whether its beat was seen to change recently."""
    return observed.fresh and may_be_alive(observed, cluster, options)


def may_be_alive(observed: HostObservation, cluster: ClusterState, options: LaunchGroup) -> bool:
    """As `is_alive`, also true for a host that was not watched for long enough to know."""
    state = observed.record.state
    return state is not HostState.GONE and quiet_s(observed, cluster) <= patience_s(state, options)


def missing_member(cluster: ClusterState, running: Generation, options: LaunchGroup) -> tuple[GenerationMember, str] | None:
    """A member without which the generation cannot continue, and why; None if all seem to be alive.
    Heartbeats begin when a host joins a generation, which hosts do at different times: at first the limit is longer."""
    for member in running.members:
        if member.host in cluster.silent and cluster.now_s > cluster.newest_since_s + options.lost_s:
            return member, f"has not been heard for {options.lost_s:g} s"
        observed = cluster.observed.get(member.host)
        if observed is None:
            continue
        if observed.record.ended >= running.number:
            # It publishes the reason before it reports its end: after a moment the reason has arrived, or was lost.
            if cluster.read_s - observed.since_s > options.lost_s:
                return member, "has ended its part and left no reason"
        # States from before this generation are outdated: its proposer has read a newer record.
        elif observed.since_s > cluster.newest_since_s:
            if observed.record.state is HostState.GONE:
                return member, "has left"
            if observed.record.state is HostState.UNFIT:
                return member, f"cannot take part ({observed.record.reason})"
    return None


def connections(cluster: ClusterState) -> Mapping[str, AbstractSet[str]]:
    """Whose heartbeats each host receives, as far as is known here."""
    return {cluster.me.host: cluster.heard, **{host: _as_set(one.record.hears) for host, one in cluster.observed.items()}}


def _as_set(hears: Collection[str]) -> AbstractSet[str]:
    """A simulation of thousands of hosts hands in sets, which say in a few names whom a host does not hear."""
    return hears if isinstance(hears, AbstractSet) else frozenset(hears)


def is_connected(one: str, other: str, heard: Mapping[str, AbstractSet[str]]) -> bool:
    """Whether two hosts receive each other's heartbeats. Of a host without a record only the other direction is known."""
    return all(host not in heard or whom in heard[host] for host, whom in ((one, other), (other, one)))


def unconnected_members(cluster: ClusterState, generation: Generation) -> list[str]:
    """Names of members that are not connected with this host."""
    heard, own = connections(cluster), cluster.me.host
    return [one.name for one in generation.members if one.host != own and not is_connected(own, one.host, heard)]


def unconnected_pairs(ready: Sequence[HostRecord], cluster: ClusterState) -> list[tuple[str, str]]:
    apart, places = _apart(ready, connections(cluster)), {one.host: place for place, one in enumerate(ready)}
    return [
        (one.name, ready[other].name)
        for place, one in enumerate(ready)
        for other in sorted(places[host] for host in apart[one.host])
        if other > place
    ]


def _apart(ready: Sequence[HostRecord], heard: Mapping[str, AbstractSet[str]]) -> dict[str, set[str]]:
    """Of each of `ready` those that it is not connected with. Sets, because it is asked about thousands of hosts."""
    hosts = {one.host for one in ready}
    apart = {host: hosts - heard.get(host, hosts) - {host} for host in hosts}
    for host in hosts:
        for other in tuple(apart[host]):
            apart[other].add(host)
    return apart


def largest_group(ready: Sequence[HostRecord], cluster: ClusterState) -> list[HostRecord]:
    """The largest set of `ready` hosts that are all connected, in their order; of equal ones that of the foremost host.
    The result is the same on every host that calls it."""
    apart = _apart(ready, connections(cluster))
    if not any(apart.values()):
        return list(ready)
    if len(ready) <= _MOST_EXACT:
        sets = (chosen for size in range(len(ready), 0, -1) for chosen in combinations(ready, size))
        connected = (
            chosen for chosen in sets if all(other.host not in apart[one.host] for one, other in combinations(chosen, 2))
        )
        return list(next(connected))
    # Greedy, from the hosts that are connected with most others.
    by_degree = sorted(range(len(ready)), key=lambda place: (len(apart[ready[place].host]), place))
    tries = []
    for first in by_degree[:_MOST_TRIES]:
        tried, left_out = [first], {ready[first].host} | apart[ready[first].host]
        for place in by_degree:
            if ready[place].host not in left_out:
                tried.append(place)
                left_out |= apart[ready[place].host]
        tries.append(sorted(tried))
    return [ready[place] for place in min(tries, key=lambda tried: (-len(tried), tried))]
