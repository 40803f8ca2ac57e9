"""What a host knows when it decides: the other hosts' records, and who counts as alive, silent or gone. Pure.

All times are on its own monotonic clock; none is compared with another host's. Two things tell who lives: heartbeats, within
seconds, and the `beat` of each host's record in storage, which is slow and may be unreachable: silence there is counted only up
to the last time that records were read.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import inf

from elastictrain.config.launch import LaunchGroup
from elastictrain.launch.membership.records import End, Generation, GenerationMember, HostRecord, HostState

_REMEMBERED_S = 3600.0
_GONE_KEPT_S, _LEFTOVER_KEPT_S = 120.0, 1800.0


@dataclass(frozen=True, slots=True)
class HostObservation:
    """Another host's record."""

    record: HostRecord
    changed_s: float
    """When its beat was last seen to change, on the reader's monotonic clock; at first sight, when that was."""

    fresh: bool
    """Whether it was ever seen to change: a line that was only read once may be a leftover."""

    since_s: float
    """Since when it has said the same of itself: the same state, and the same generation that it is done with."""

    hears_since_s: float
    """Since when it has heard the same hosts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterState:
    """One look around."""

    now_s: float
    began_s: float
    """When this launcher had read storage for the first time: a generation that was over by then is none of its own."""

    me: HostRecord
    """What this host says of itself at present."""

    running: Generation | None
    """What runs here, or is being stopped here; None if nothing does."""

    newest: Generation | None
    newest_since_s: float
    """When it was first seen here."""

    ends: Mapping[str, End]
    """Those of `newest`, by host; read before `observed` was."""

    ended_since_s: float | None
    """When the first of them was seen here."""

    observed: Mapping[str, HostObservation]
    """The other hosts' records, by host."""

    read_s: float
    """When `observed` was read last, in a turn in which this host's own record could be written as well. Nobody has become
    silent while storage could not be reached: silence is counted up to here."""

    silent: frozenset[str]
    """Members of the generation in which this host takes part, or last did, whose heartbeats have not come for long."""

    heard: frozenset[str]
    """Hosts whose heartbeats arrive now, members or not."""

    heard_since_s: float
    """Since when those are the same."""

    expected_hosts: int = 0
    """What the cluster promised; 0 if unknown."""

    restart_cost_s: float = 0.0
    """As measured, from an end to the next step; 0 if unknown."""

    most_processes: int = 0
    """Workers above which there is nothing more to do: samples of a global batch. 0 if unknown."""

    left_s: float = inf
    """Until the run's time limit."""

    stop_limit_s: float = 920.0
    """How long an orderly end may take on a host: a save, and the shutdown."""

    wants_to_leave: bool = False
    """Whether this host was asked to leave."""


def outdated(observed: Mapping[str, HostObservation], *, now_s: float) -> list[str]:
    """Hosts whose lines nobody needs any more: each start of a launcher leaves one."""
    return [
        host
        for host, one in observed.items()
        if now_s - one.changed_s > (_GONE_KEPT_S if one.record.state is HostState.GONE else _LEFTOVER_KEPT_S)
    ]


def observe(
    before: Mapping[str, HostObservation], records: Iterable[HostRecord], *, own: str, now_s: float
) -> dict[str, HostObservation]:
    """All records but the own one, as they are now.

    A record that cannot be read this time, or is an older one than before, is left as it was: stores may answer late. It is
    forgotten when it has not changed for very long.
    """
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
            observed[record.host] = HostObservation(
                record, now_s, fresh=True, since_s=known.since_s if same else now_s, hears_since_s=hears_since_s
            )
        else:
            observed[record.host] = known
    return observed


def observe_datagrams(
    before: Mapping[str, HostObservation], lines: Iterable[HostRecord], *, own: str, now_s: float
) -> dict[str, HostObservation]:
    """What hosts have said by datagram, before storage shows it; of hosts whose line was never read there, nothing.

    A datagram leaves out what takes room: whom a host hears stays as it was.
    """
    heard = (
        replace(line, hears=before[line.host].record.hears, writers=before[line.host].record.writers)
        for line in lines
        if line.host in before
    )
    return observe(before, heard, own=own, now_s=now_s)


def patience_s(state: HostState, options: LaunchGroup) -> float:
    """How long a beat may stand still. A host that trains writes less often than one that waits."""
    waiting_s = max(options.lost_s, 3 * options.poll_s)
    return waiting_s + options.lost_s if state is HostState.BUSY else waiting_s


def takeover_s(options: LaunchGroup) -> float:
    """How long all members of a generation must be silent before a host that is none of them takes over."""
    return max(4 * options.lost_s, 2 * patience_s(HostState.BUSY, options))


def quiet_s(observed: HostObservation, cluster: ClusterState) -> float:
    """How long its beat has stood still, as far as is known."""
    return max(0.0, cluster.read_s - observed.changed_s)


def is_alive(observed: HostObservation, cluster: ClusterState, options: LaunchGroup) -> bool:
    """Whether its beat was seen to change, not long ago."""
    gone = observed.record.state is HostState.GONE
    return not gone and observed.fresh and quiet_s(observed, cluster) <= patience_s(observed.record.state, options)


def is_unknown(observed: HostObservation, cluster: ClusterState, options: LaunchGroup) -> bool:
    """Whether it may be alive, but was not looked at for long enough to know."""
    gone = observed.record.state is HostState.GONE
    return not gone and not observed.fresh and quiet_s(observed, cluster) <= patience_s(observed.record.state, options)


def missing_member(cluster: ClusterState, running: Generation, options: LaunchGroup) -> tuple[GenerationMember, str] | None:
    """A member without which the generation cannot go on, and what is known of it; None if all seem to be there.

    The heartbeat begins when a host adopts a generation, and another one may do so later: at first it has more patience.
    """
    heard_since_s = cluster.newest_since_s + options.lost_s
    for member in running.members:
        if member.host in cluster.silent and cluster.now_s > heard_since_s:
            return member, f"has not been heard for {options.lost_s:g} s"
        observed = cluster.observed.get(member.host)
        # What it said before this generation was there is no longer true: whoever proposed it has read a newer line.
        if (
            observed is not None
            and observed.since_s > cluster.newest_since_s
            and (sentence := _backed_out(observed.record, running))
        ):
            return member, sentence
        # It writes why before it says that it has ended: a moment later the reason is there, or was lost.
        if (
            observed is not None
            and observed.record.ended >= running.number
            and cluster.read_s - observed.since_s > options.lost_s
        ):
            return member, "has ended its part without a word"
    return None


def _backed_out(record: HostRecord, running: Generation) -> str:
    if record.ended >= running.number:
        return ""
    if record.state is HostState.GONE:
        return "has left"
    if record.state is HostState.UNFIT:
        return f"cannot take part ({record.reason})"
    return ""


def abandoned_since_s(cluster: ClusterState, newest: Generation, options: LaunchGroup) -> float | None:
    """Since when no member can be running this generation any more, in the eyes of another host; None if one may."""
    since_s = cluster.newest_since_s
    for member in newest.members:
        observed = cluster.observed.get(member.host)
        if member.host == cluster.me.host:
            return None
        if observed is not None and observed.record.state in (HostState.GONE, HostState.UNFIT):
            continue
        last_s = cluster.newest_since_s if observed is None else observed.changed_s
        if cluster.read_s - last_s <= takeover_s(options):
            return None
        since_s = max(since_s, last_s + takeover_s(options))
    return since_s
