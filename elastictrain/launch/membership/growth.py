"""Whether training is worth interrupting to take in more hosts. Pure."""

from collections.abc import Sequence

from elastictrain.config.launch import LaunchGroup
from elastictrain.launch.membership import messages
from elastictrain.launch.membership.hearing import hearing, unheard_by
from elastictrain.launch.membership.observation import ClusterState, is_alive
from elastictrain.launch.membership.records import Generation, HostRecord, HostState

_TYPICAL_COST_S = 30.0
"""What an interruption costs as long as none was measured."""

_PAYS_WITHIN_S = 1800.0
"""An interruption must have paid for itself after that long: machines that are taken away do not stay for ever."""


def worth_growing(cluster: ClusterState, running: Generation, options: LaunchGroup) -> str | None:
    """Why the first member should end the generation in order to start again with more hosts; None if it should not.

    An interruption costs each worker the time of a restart. The new ones win that back in proportion to how many they are: one
    host more among a hundred has to stay for a hundred times as long as one among one.
    """
    if not options.grow or cluster.now_s - cluster.newest_since_s < options.grow_every_s:
        return None
    taken = _fitting(_newcomers(cluster, running, options), cluster, running, options)
    if not taken:
        return None
    gained = sum(record.processes for record in taken) / max(1, running.world_size)
    cost_s = cluster.restart_cost_s or _TYPICAL_COST_S
    pays_after_s = cost_s / gained
    if pays_after_s > min(_PAYS_WITHIN_S, cluster.left_s):
        return None
    names = messages.listed(record.name for record in taken)
    return f"{names} came: what a restart costs ({cost_s:.0f} s) is won back in {pays_after_s:.0f} s"


def _newcomers(cluster: ClusterState, running: Generation, options: LaunchGroup) -> list[HostRecord]:
    """Hosts that are ready, and have been for long enough, the oldest first."""
    observed = [
        one
        for one in cluster.observed.values()
        if one.record.state is HostState.READY
        and not running.has(one.record.host)
        and is_alive(one, cluster, options)
        and cluster.read_s - one.since_s >= options.grow_after_s
        and not (one.record.host in running.excluded and one.record.ended < running.number)
    ]
    return [one.record for one in sorted(observed, key=lambda one: (one.since_s, one.record.host)) if one.record.processes > 0]


def _fitting(
    newcomers: Sequence[HostRecord], cluster: ClusterState, running: Generation, options: LaunchGroup
) -> list[HostRecord]:
    """Those that `launch.max_hosts` and the global batch leave room for, and that all the others hear."""
    room = options.max_hosts - len(running.members) if options.max_hosts else len(newcomers)
    taken: list[HostRecord] = []
    processes, heard = running.world_size, hearing(cluster)
    for record in newcomers:
        if len(taken) >= room:
            break
        if cluster.most_processes and processes + record.processes > cluster.most_processes:
            continue
        if unheard_by(record.host, [*(one.host for one in running.members), *(one.host for one in taken)], heard):
            continue
        taken.append(record)
        processes += record.processes
    return taken
