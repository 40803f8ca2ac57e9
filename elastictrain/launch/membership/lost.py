"""Who counts as alive, as silent or as gone. Pure.

Two things tell: the watch, which hears the members of a generation within seconds, and the roster, in which the beat of every
living host grows. The roster is slow and may be unreachable: silence there is counted only up to the last time it was read.
"""

from elastictrain.config.launch import LaunchGroup
from elastictrain.launch.membership.cluster_state import ClusterState
from elastictrain.launch.membership.observation import HostObservation
from elastictrain.launch.membership.records import Generation, GenerationMember, HostRecord, HostState


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

    The watch begins when a host adopts a generation, and another one may do so later: at first it has more patience.
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
