"""Decides what a launcher does next, from what it knows; called a few times a second, idempotent.

A host follows the newest generation that it can see, and runs nothing of an older one. Each host that sees the end of the
newest one may propose the next: storage accepts only the first proposal of each number.
"""

from elastictrain.config.composed import LaunchGroup
from elastictrain.errors import EXIT_OK, EXIT_STOPPED, EXIT_TRANSPORT, EXIT_UNFIT
from elastictrain.fault.reasons import SlowRank
from elastictrain.launch.membership import messages
from elastictrain.launch.membership.observation import (
    ClusterState,
    connections,
    is_alive,
    is_connected,
    may_be_alive,
    missing_member,
    unconnected_members,
)
from elastictrain.launch.membership.proposal import propose_generation
from elastictrain.launch.membership.records import (
    Decision,
    End,
    EndKind,
    Finish,
    Generation,
    HostRecord,
    HostState,
    Join,
    Leave,
    LeaveOut,
    Rejoin,
    Wait,
)

_TYPICAL_COST_S = 30.0  # seconds that an interruption costs, before one was measured
_PAYS_WITHIN_S = 1800.0  # an interruption must pay for itself within this time: preemptible machines do not stay for ever


def decide(cluster: ClusterState, options: LaunchGroup) -> Decision:
    """The next action, from what this host knows; other hosts may know something else. Pure."""
    if cluster.running is not None:
        return _while_running(cluster, cluster.running, options)
    newest, me = cluster.newest, cluster.me
    # The end of a run from before this launcher's start does not concern it.
    is_new = cluster.newest_since_s > cluster.began_s + options.lost_s
    if cluster.stop_reason:
        done = me.end is not None and me.end.kind is EndKind.DONE and me.end.generation == me.ended
        return Leave(EXIT_OK, "the last step is done") if done else Leave(EXIT_STOPPED, cluster.stop_reason)
    if newest is not None and newest.terminal and (is_new or newest.has(me.host)):
        return Leave(newest.exit_code, newest.reason)
    if newest is not None and me.ended < newest.number:
        # A host that cannot take part stays silent, and the others continue without it.
        if newest.has(me.host) and not cluster.ends and me.state is HostState.READY:
            return Join(newest)
        if me.host in newest.excluded and not newest.terminal:
            reason = f"generation {newest.number} leaves this host out: {newest.reason}"
            return LeaveOut(newest.number, reason) if options.retry_unfit_s else Leave(EXIT_UNFIT, reason)
    if me.state is not HostState.READY:
        return _while_unfit(cluster, options)
    if (proposed := propose_generation(cluster, options)) is not None:
        return proposed
    assert newest is not None  # noqa: S101
    unconnected = [(me.name, name) for name in unconnected_members(cluster, newest)]
    why = f"; {messages.unconnected(unconnected)}" if unconnected else ""
    return Wait(f"generation {newest.number}, which trains without this host, to end or to grow{why}")


def _while_running(cluster: ClusterState, running: Generation, options: LaunchGroup) -> Decision:
    newest, me = cluster.newest, cluster.me
    if newest is not None and newest.number > running.number:
        # The others gave up this host while it was frozen or cut off: nothing that it could still write counts.
        reason = f"generation {newest.number} has begun without this host's part of generation {running.number}"
        return _finish_lost(running, me, reason, lost=me.host)
    known = next((member.address for member in running.members if member.host == me.host), me.address)
    if len(running.members) > 1 and known != me.address:
        # Connections to the old address are dead.
        reason = f"the address of {me.name} has changed from {known} to {me.address}"
        return _finish_lost(running, me, reason, lost=me.host)
    # Ends that were read before this host joined its generation are not evidence.
    others = [end for host, end in cluster.ends.items() if host != me.host and end.generation == running.number]
    if cluster.stop_reason:
        leaving = _end(running, me, EndKind.LEAVING, EXIT_STOPPED, cluster.stop_reason)
        return Finish(leaving, at_once=any(end.loses_state for end in others))
    if (followed := _to_follow(cluster, others)) is not None:
        return Finish(followed, at_once=followed.loses_state)
    if (missing := missing_member(cluster, running, options)) is not None:
        member, sentence = missing
        return _finish_lost(running, me, f"{member.name} {sentence}", lost=member.host)
    if (slow := cluster.straggles) is not None and not others and _is_left_out(slow, cluster, running, options):
        # After an orderly end this host is unfit for a while.
        end = End(running.number, me.host, EndKind.LEAVING, EXIT_UNFIT, "", 0, 0, slow.sentence, slow_rank=slow.rank)
        return Finish(end, at_once=False)
    if running.members[0].host == me.host and not others and (worth := should_grow(cluster, running, options)) is not None:
        return Finish(_end(running, me, EndKind.GROW, EXIT_OK, worth), at_once=False)
    return Wait()


def _is_left_out(slow: SlowRank, cluster: ClusterState, running: Generation, options: LaunchGroup) -> bool:
    """Whether this host leaves for its `slow` rank: if enough others remain, and only one host in `launch.retry_unfit_s`. A
    rank that was slow on another host before is slow by its work: it would take out one host after the other."""
    last = running.slow
    if last is not None and cluster.now_s < cluster.slow_since_s + options.retry_unfit_s:
        return False
    by_its_work = last is not None and last.slow_rank == slow.rank and last.host != cluster.me.host
    return not by_its_work and len(running.members) > options.min_hosts


def _while_unfit(cluster: ClusterState, options: LaunchGroup) -> Decision:
    me, newest, end = cluster.me, cluster.newest, cluster.me.end
    if end is not None and end.slow_rank >= 0 and (end.generation, end.reason) == (me.ended, me.reason):
        # Nothing but slowness makes this host unfit: it is better than none.
        others = [one for one in cluster.observed.values() if one.record.state in (HostState.READY, HostState.BUSY)]
        if sum(may_be_alive(one, cluster, options) for one in others) < options.min_hosts:
            return Rejoin()
        if newest is not None and newest.number <= me.ended:
            # Until the others train without it they may still be lost.
            return Wait()
    return Wait() if options.retry_unfit_s else Leave(EXIT_UNFIT, me.reason)


def _to_follow(cluster: ClusterState, others: list[End]) -> End | None:
    """Return the other host's end that ends this host's part, too; an end after which nothing can be saved comes first.
    Hosts reach the last step together, but not at the same moment: DONE on one host does not stop the others at once."""
    done = [end for end in others if end.kind is EndKind.DONE]
    rest = [end for end in others if end.kind is not EndKind.DONE]
    if rest:
        return min(rest, key=lambda end: (not end.loses_state, end.host))
    since_s = cluster.now_s if cluster.ended_since_s is None else cluster.ended_since_s
    return done[0] if done and cluster.now_s > since_s + cluster.stop_limit_s else None


def _finish_lost(running: Generation, me: HostRecord, reason: str, *, lost: str) -> Finish:
    return Finish(_end(running, me, EndKind.LOST, EXIT_TRANSPORT, reason, lost=lost), at_once=True)


def _end(running: Generation, me: HostRecord, kind: EndKind, exit_code: int, reason: str, *, lost: str = "") -> End:
    return End(running.number, me.host, kind, exit_code, "", 0, 0, reason, lost)


def should_grow(cluster: ClusterState, running: Generation, options: LaunchGroup) -> str | None:
    """Return why the first member should end the generation to restart with more hosts; None if it should not.

    A restart costs every worker its duration. The new hosts win that back in proportion to their number: one more host among
    a hundred must stay a hundred times as long as one more beside a single one.
    """
    if not options.grow or cluster.now_s - cluster.newest_since_s < options.grow_every_s:
        return None
    taken = _newcomers_that_fit(cluster, running, options)
    if not taken:
        return None
    gained = sum(record.processes for record in taken) / max(1, running.world_size)
    cost_s = cluster.restart_cost_s or _TYPICAL_COST_S
    pays_after_s = cost_s / gained
    if pays_after_s > min(_PAYS_WITHIN_S, cluster.left_s):
        return None
    names = messages.listed(record.name for record in taken)
    return f"{names} came: what a restart costs ({cost_s:.0f} s) is won back in {pays_after_s:.0f} s"


def _newcomers_that_fit(cluster: ClusterState, running: Generation, options: LaunchGroup) -> list[HostRecord]:
    """Hosts that have been ready for long enough, the oldest first.
    Limited by `launch.max_hosts` and the global batch; each must be connected with all the others."""
    observed = [
        one
        for one in cluster.observed.values()
        if one.record.state is HostState.READY
        and one.record.processes > 0
        and not running.has(one.record.host)
        and is_alive(one, cluster, options)
        and cluster.read_s - one.since_s >= options.grow_after_s
        and not (one.record.host in running.excluded and one.record.ended < running.number)
    ]
    room = options.max_hosts - len(running.members) if options.max_hosts else len(observed)
    taken: list[HostRecord] = []
    hosts = [member.host for member in running.members]
    processes, heard = running.world_size, connections(cluster)
    for one in sorted(observed, key=lambda one: (one.since_s, one.record.host)):
        record = one.record
        if len(taken) >= room:
            break
        if cluster.most_processes and processes + record.processes > cluster.most_processes:
            continue
        if all(is_connected(record.host, host, heard) for host in hosts):
            taken.append(record)
            hosts.append(record.host)
            processes += record.processes
    return taken
