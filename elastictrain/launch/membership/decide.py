"""What a launcher does next, from what it knows. Pure: it is asked a few times a second, and may be asked again.

A host follows the newest generation that it can see, and runs nothing of an older one. Whoever sees that the newest one has
ended may propose the next: storage takes the first proposal of each number and no other.
"""

from elastictrain.config.launch import LaunchGroup
from elastictrain.errors import EXIT_OK, EXIT_STOPPED, EXIT_TRANSPORT, EXIT_UNFIT
from elastictrain.launch.membership import words
from elastictrain.launch.membership.decisions import Adopt, Decision, Finish, Leave, Rest, Wait
from elastictrain.launch.membership.form import find_past, form, nothing_to_save
from elastictrain.launch.membership.growth import worth_growing
from elastictrain.launch.membership.hearing import unheard_members
from elastictrain.launch.membership.lost import missing_member
from elastictrain.launch.membership.records import End, EndKind, Generation, HostState
from elastictrain.launch.membership.view import View


def decide(view: View, options: LaunchGroup) -> Decision:
    """The next thing to do on this host."""
    if view.running is not None:
        return _while_running(view, view.running, options)
    newest = view.newest
    if newest is not None and newest.terminal and _is_own(view, newest, options):
        return Leave(newest.exit_code, newest.reason)
    if view.wants_to_leave:
        return Leave(EXIT_STOPPED, "asked to leave")
    if newest is not None and newest.has(view.me.host) and not view.ends and view.me.ended < newest.number:
        # One that cannot take part keeps silent, and the others go on without it.
        return Adopt(newest) if view.me.state is HostState.READY else Wait()
    if newest is not None and not newest.terminal and view.me.host in newest.excluded and view.me.ended < newest.number:
        return _left_out(newest, options)
    if view.me.state is not HostState.READY:
        if not options.retry_unfit_s:
            return Leave(EXIT_UNFIT, view.me.reason)
        return Wait()
    past = find_past(view, options)
    if past is None:
        assert newest is not None  # noqa: S101
        unheard = unheard_members(view, newest)
        why = f"; {words.no_sound([(view.me.name, name) for name in unheard])}" if unheard else ""
        return Wait(f"generation {newest.number}, which trains without this host, to end or to grow{why}")
    return form(view, past, options)


def _is_own(view: View, newest: Generation, options: LaunchGroup) -> bool:
    """Whether the end of the run concerns this launcher; one that was there before it began does not."""
    return newest.has(view.me.host) or view.newest_since_s > view.began_s + options.lost_s


def _left_out(newest: Generation, options: LaunchGroup) -> Decision:
    reason = f"generation {newest.number} leaves this host out: {newest.reason}"
    return Rest(newest.number, reason) if options.retry_unfit_s else Leave(EXIT_UNFIT, reason)


def _while_running(view: View, running: Generation, options: LaunchGroup) -> Decision:
    newest, me = view.newest, view.me.host
    if newest is not None and newest.number > running.number:
        # Frozen or cut off, it was given up by the others: nothing that it could still write counts.
        reason = f"generation {newest.number} has begun without this host's part of generation {running.number}"
        return Finish(_end(view, running, EndKind.LOST, EXIT_TRANSPORT, reason, lost=me), at_once=True)
    if (moved := _moved(view, running)) is not None:
        return Finish(_end(view, running, EndKind.LOST, EXIT_TRANSPORT, moved, lost=me), at_once=True)
    # A reading that is older than what this host takes part in says nothing.
    others = [end for host, end in view.ends.items() if host != me and end.generation == running.number]
    if view.wants_to_leave:
        broken = any(nothing_to_save(end) for end in others)
        return Finish(_end(view, running, EndKind.LEAVING, EXIT_STOPPED, "asked to leave"), at_once=broken)
    if (followed := _to_follow(view, others)) is not None:
        return Finish(followed, at_once=nothing_to_save(followed))
    if (missing := missing_member(view, running, options)) is not None:
        member, sentence = missing
        lost = _end(view, running, EndKind.LOST, EXIT_TRANSPORT, f"{member.name} {sentence}", lost=member.host)
        return Finish(lost, at_once=True)
    if running.members[0].host == me and not others and (worth := worth_growing(view, running, options)) is not None:
        return Finish(_end(view, running, EndKind.GROW, EXIT_OK, worth), at_once=False)
    return Wait()


def _moved(view: View, running: Generation) -> str | None:
    """That this host is not where the others look for it any more: connections to the address that it had are dead."""
    known = next((member.address for member in running.members if member.host == view.me.host), view.me.address)
    if len(running.members) == 1 or known == view.me.address:
        return None
    return f"the address of {view.me.name} has changed from {known} to {view.me.address}"


def _to_follow(view: View, others: list[End]) -> End | None:
    """The word of another host that ends this one's part, too: one after which nothing can be saved, before any other.

    Hosts reach the last step together, but not at the same moment: one that has is no reason to stop the others.
    """
    done = [end for end in others if end.kind is EndKind.DONE]
    rest = [end for end in others if end.kind is not EndKind.DONE]
    if rest:
        return min(rest, key=lambda end: (not nothing_to_save(end), end.host))
    since_s = view.now_s if view.ended_since_s is None else view.ended_since_s
    return done[0] if done and view.now_s > since_s + view.stop_limit_s else None


def _end(view: View, running: Generation, kind: EndKind, exit_code: int, reason: str, *, lost: str = "") -> End:
    return End(running.number, view.me.host, kind, exit_code, "", 0, 0, reason, lost)
