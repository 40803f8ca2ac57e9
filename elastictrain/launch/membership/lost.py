"""Who counts as alive, as silent or as gone. Pure.

Two things tell: the watch, which hears the members of a generation within seconds, and the roster, in which the beat of every
living host grows. The roster is slow and may be unreachable: silence there is counted only up to the last time it was read.
"""

from elastictrain.config.launch import LaunchGroup
from elastictrain.launch.membership.records import Entry, Generation, HostState, Member
from elastictrain.launch.membership.sight import Seen
from elastictrain.launch.membership.view import View


def patience_s(state: HostState, options: LaunchGroup) -> float:
    """How long a beat may stand still. A host that trains writes less often than one that waits."""
    waiting_s = max(options.lost_s, 3 * options.poll_s)
    return waiting_s + options.lost_s if state is HostState.BUSY else waiting_s


def takeover_s(options: LaunchGroup) -> float:
    """How long all members of a generation must be silent before a host that is none of them takes over."""
    return max(4 * options.lost_s, 2 * patience_s(HostState.BUSY, options))


def quiet_s(seen: Seen, view: View) -> float:
    """How long its beat has stood still, as far as is known."""
    return max(0.0, view.read_s - seen.changed_s)


def is_alive(seen: Seen, view: View, options: LaunchGroup) -> bool:
    """Whether its beat was seen to change, not long ago."""
    gone = seen.entry.state is HostState.GONE
    return not gone and seen.fresh and quiet_s(seen, view) <= patience_s(seen.entry.state, options)


def is_unknown(seen: Seen, view: View, options: LaunchGroup) -> bool:
    """Whether it may be alive, but was not looked at for long enough to know."""
    gone = seen.entry.state is HostState.GONE
    return not gone and not seen.fresh and quiet_s(seen, view) <= patience_s(seen.entry.state, options)


def missing_member(view: View, running: Generation, options: LaunchGroup) -> tuple[Member, str] | None:
    """A member without which the generation cannot go on, and what is known of it; None if all seem to be there.

    The watch begins when a host adopts a generation, and another one may do so later: at first it has more patience.
    """
    heard_since_s = view.newest_since_s + options.lost_s
    for member in running.members:
        if member.host in view.silent and view.now_s > heard_since_s:
            return member, f"has not been heard for {options.lost_s:g} s"
        seen = view.seen.get(member.host)
        # What it said before this generation was there is no longer true: whoever proposed it has read a newer line.
        if seen is not None and seen.since_s > view.newest_since_s and (sentence := _backed_out(seen.entry, running)):
            return member, sentence
        # It writes why before it says that it has ended: a moment later the reason is there, or was lost.
        if seen is not None and seen.entry.ended >= running.number and view.read_s - seen.since_s > options.lost_s:
            return member, "has ended its part without a word"
    return None


def _backed_out(entry: Entry, running: Generation) -> str:
    if entry.ended >= running.number:
        return ""
    if entry.state is HostState.GONE:
        return "has left"
    if entry.state is HostState.UNFIT:
        return f"cannot take part ({entry.reason})"
    return ""


def deserted_since_s(view: View, newest: Generation, options: LaunchGroup) -> float | None:
    """Since when no member can be running this generation any more, in the eyes of another host; None if one may."""
    since_s = view.newest_since_s
    for member in newest.members:
        seen = view.seen.get(member.host)
        if member.host == view.me.host:
            return None
        if seen is not None and seen.entry.state in (HostState.GONE, HostState.UNFIT):
            continue
        last_s = view.newest_since_s if seen is None else seen.changed_s
        if view.read_s - last_s <= takeover_s(options):
            return None
        since_s = max(since_s, last_s + takeover_s(options))
    return since_s
