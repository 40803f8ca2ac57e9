"""What a launcher does next, from what it knows. Pure: it is asked a few times a second, and may be asked again.

A host follows the newest generation that it can see, and runs nothing of an older one. Whoever sees that the newest one has
ended may propose the next: storage takes the first proposal of each number and no other.
"""

from elastictrain.config.launch import LaunchGroup
from elastictrain.errors import EXIT_OK, EXIT_STOPPED, EXIT_TRANSPORT, EXIT_UNFIT
from elastictrain.launch.membership import messages
from elastictrain.launch.membership.decisions import Decision, Finish, Join, Leave, LeaveOut, Wait
from elastictrain.launch.membership.growth import worth_growing
from elastictrain.launch.membership.hearing import unheard_members
from elastictrain.launch.membership.observation import ClusterState, missing_member
from elastictrain.launch.membership.proposal import find_previous, nothing_to_save, propose_generation
from elastictrain.launch.membership.records import End, EndKind, Generation, HostState


def decide(cluster: ClusterState, options: LaunchGroup) -> Decision:
    """The next thing to do on this host."""
    if cluster.running is not None:
        return _while_running(cluster, cluster.running, options)
    newest = cluster.newest
    if newest is not None and newest.terminal and _is_own(cluster, newest, options):
        return Leave(newest.exit_code, newest.reason)
    if cluster.wants_to_leave:
        return Leave(EXIT_STOPPED, "asked to leave")
    if newest is not None and newest.has(cluster.me.host) and not cluster.ends and cluster.me.ended < newest.number:
        # One that cannot take part keeps silent, and the others go on without it.
        return Join(newest) if cluster.me.state is HostState.READY else Wait()
    if newest is not None and not newest.terminal and cluster.me.host in newest.excluded and cluster.me.ended < newest.number:
        return _left_out(newest, options)
    if cluster.me.state is not HostState.READY:
        if not options.retry_unfit_s:
            return Leave(EXIT_UNFIT, cluster.me.reason)
        return Wait()
    previous = find_previous(cluster, options)
    if previous is None:
        assert newest is not None  # noqa: S101
        unheard = unheard_members(cluster, newest)
        why = f"; {messages.no_sound([(cluster.me.name, name) for name in unheard])}" if unheard else ""
        return Wait(f"generation {newest.number}, which trains without this host, to end or to grow{why}")
    return propose_generation(cluster, previous, options)


def _is_own(cluster: ClusterState, newest: Generation, options: LaunchGroup) -> bool:
    """Whether the end of the run concerns this launcher; one that was there before it began does not."""
    return newest.has(cluster.me.host) or cluster.newest_since_s > cluster.began_s + options.lost_s


def _left_out(newest: Generation, options: LaunchGroup) -> Decision:
    reason = f"generation {newest.number} leaves this host out: {newest.reason}"
    return LeaveOut(newest.number, reason) if options.retry_unfit_s else Leave(EXIT_UNFIT, reason)


def _while_running(cluster: ClusterState, running: Generation, options: LaunchGroup) -> Decision:
    newest, me = cluster.newest, cluster.me.host
    if newest is not None and newest.number > running.number:
        # Frozen or cut off, it was given up by the others: nothing that it could still write counts.
        reason = f"generation {newest.number} has begun without this host's part of generation {running.number}"
        return Finish(_end(cluster, running, EndKind.LOST, EXIT_TRANSPORT, reason, lost=me), at_once=True)
    if (moved := _moved(cluster, running)) is not None:
        return Finish(_end(cluster, running, EndKind.LOST, EXIT_TRANSPORT, moved, lost=me), at_once=True)
    # A reading that is older than what this host takes part in says nothing.
    others = [end for host, end in cluster.ends.items() if host != me and end.generation == running.number]
    if cluster.wants_to_leave:
        broken = any(nothing_to_save(end) for end in others)
        return Finish(_end(cluster, running, EndKind.LEAVING, EXIT_STOPPED, "asked to leave"), at_once=broken)
    if (followed := _to_follow(cluster, others)) is not None:
        return Finish(followed, at_once=nothing_to_save(followed))
    if (missing := missing_member(cluster, running, options)) is not None:
        member, sentence = missing
        lost = _end(cluster, running, EndKind.LOST, EXIT_TRANSPORT, f"{member.name} {sentence}", lost=member.host)
        return Finish(lost, at_once=True)
    if running.members[0].host == me and not others and (worth := worth_growing(cluster, running, options)) is not None:
        return Finish(_end(cluster, running, EndKind.GROW, EXIT_OK, worth), at_once=False)
    return Wait()


def _moved(cluster: ClusterState, running: Generation) -> str | None:
    """That this host is not where the others look for it any more: connections to the address that it had are dead."""
    known = next((member.address for member in running.members if member.host == cluster.me.host), cluster.me.address)
    if len(running.members) == 1 or known == cluster.me.address:
        return None
    return f"the address of {cluster.me.name} has changed from {known} to {cluster.me.address}"


def _to_follow(cluster: ClusterState, others: list[End]) -> End | None:
    """The word of another host that ends this one's part, too: one after which nothing can be saved, before any other.

    Hosts reach the last step together, but not at the same moment: one that has is no reason to stop the others.
    """
    done = [end for end in others if end.kind is EndKind.DONE]
    rest = [end for end in others if end.kind is not EndKind.DONE]
    if rest:
        return min(rest, key=lambda end: (not nothing_to_save(end), end.host))
    since_s = cluster.now_s if cluster.ended_since_s is None else cluster.ended_since_s
    return done[0] if done and cluster.now_s > since_s + cluster.stop_limit_s else None


def _end(cluster: ClusterState, running: Generation, kind: EndKind, exit_code: int, reason: str, *, lost: str = "") -> End:
    return End(running.number, cluster.me.host, kind, exit_code, "", 0, 0, reason, lost)
