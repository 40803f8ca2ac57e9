"""Forms the next generation: who is waited for, who takes part and in which order, and who proposes it. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from elastictrain.config.launch import LaunchGroup
from elastictrain.errors import EXIT_STOPPED
from elastictrain.launch.membership import words
from elastictrain.launch.membership.decisions import Create, Decision, Leave, Wait
from elastictrain.launch.membership.hearing import largest_group, pairs_without_sound, settles_s
from elastictrain.launch.membership.lost import deserted_since_s, is_alive, is_unknown, quiet_s
from elastictrain.launch.membership.policy import BEGIN, Aftermath, Next, is_network_suspected, judge
from elastictrain.launch.membership.records import End, EndKind, Entry, Generation, HostState, Member, Outcome
from elastictrain.launch.membership.sight import Seen
from elastictrain.launch.membership.view import View

_KILL_S = 30.0
"""How long the launcher of a host may take to end workers that have nothing to save any more."""

_OTHERS_POLLS = 2
"""Hosts of unknown number are often started at once: the first one looks around so often, while torch is imported anyway."""

_STAGGER_S = 1.0
"""Each host leaves the one before it that much time to make its proposal, as slow as storage may be: it may be gone by now."""


@dataclass(frozen=True, slots=True)
class Past:
    """What the next generation follows upon."""

    generation: Generation | None
    """The one that has ended; None where a run begins, for the first time or anew."""

    since_s: float
    """When it was known here that a next one is due; not before this launcher began."""


def find_past(view: View, options: LaunchGroup) -> Past | None:
    """What a next generation would follow upon; None as long as the newest one may be running somewhere."""
    newest = view.newest
    if newest is None or newest.terminal:
        return Past(None, view.began_s)
    if view.ended_since_s is not None and view.ends:
        return Past(newest, view.ended_since_s)
    # The reason is written before a host says that it has ended, and reads may be late, or it was lost.
    said_s = [one.since_s for one in view.seen.values() if newest.has(one.entry.host) and one.entry.ended >= newest.number]
    if said_s and view.read_s - min(said_s) > options.lost_s:
        return Past(newest, min(said_s))
    deserted_s = deserted_since_s(view, newest, options)
    return None if deserted_s is None else Past(newest, deserted_s)


def form(view: View, past: Past, options: LaunchGroup) -> Decision:
    """What a host that runs nothing does about the next generation. It must be able to take part in it itself."""
    if view.read_s < past.since_s and not _all_members_told(view, past, options):
        return Wait("the roster to be read")
    if (wait := _wait_for_members(view, past, options)) is not None:
        return wait
    ready = _ready(view, options)
    if not _complete(ready, view, options) and (wait := _wait_for_unknown(view, past, options)) is not None:
        return wait
    ready = _in_order(ready, past)
    queue = largest_group(ready, view)
    if (wait := _wait_to_hear(view, past, ready, queue, options)) is not None:
        return wait
    following = _judge(view, past, ready, queue, options)
    if following.outcome is not Outcome.RUN:
        return _create(view, past, following, members=_concerned(past, ready), queue=ready)
    allowed = [entry for entry in queue if entry.host not in following.excluded]
    if len(allowed) < options.min_hosts:
        return _too_few(view, past, allowed, options)
    if view.me not in queue:
        names = words.listed(one.name for one in allowed)
        return Wait(f"{names} to train, and to take in this host later; {words.no_sound(pairs_without_sound(ready, view))}")
    if (wait := _wait_to_join(view, past, allowed, options)) is not None:
        return wait
    members = _numbered(allowed[: options.max_hosts] if options.max_hosts else allowed)
    queue = list(dict.fromkeys([*members, *queue]))
    return _create(view, past, following, members=tuple(_member(entry) for entry in members), queue=queue)


def _all_members_told(view: View, past: Past, options: LaunchGroup) -> bool:
    """Whether no reading of storage can show more: all members are ready, told so by themselves, and nobody else is there.

    Whoever is to be taken in, and who hears whom, is known from storage alone.
    """
    if past.generation is None or is_network_suspected(past.generation, view.ends):
        return False
    if any(end.kind in (EndKind.GROW, EndKind.LOST) for end in view.ends.values()):
        return False
    lines = {view.me.host: view.me, **{host: one.entry for host, one in view.seen.items() if is_alive(one, view, options)}}
    ready = {host for host, line in lines.items() if line.state is HostState.READY}
    told = {host for host in ready if lines[host].ended >= past.generation.number}
    return ready == told == {member.host for member in past.generation.members}


def _wait_to_hear(view: View, past: Past, ready: Sequence[Entry], group: Sequence[Entry], options: LaunchGroup) -> Wait | None:
    """Until it is certain who hears whom."""
    full = options.max_hosts and len(group) >= options.max_hosts
    if len(group) < len(ready) and not full:
        until_s = settles_s(ready, view, options, since_s=past.since_s)
        missing = words.listed(one.name for one in ready if one not in group)
        return Wait(f"all hosts to hear {missing}", until_s) if view.now_s < until_s else None
    if past.generation is None or not is_network_suspected(past.generation, view.ends):
        return None
    # Connections may break some time before the watch can know that the network is out.
    until_s = past.since_s + options.lost_s * 3 / 4
    return Wait("", until_s) if view.now_s < until_s else None


def _wait_for_members(view: View, past: Past, options: LaunchGroup) -> Wait | None:
    """Members of the generation that has ended which are still at it, or have not said why it ended."""
    if past.generation is None:
        return None
    waits = [
        (until_s, member.name)
        for member in past.generation.members
        if member.host != view.me.host and (until_s := _waited_until_s(member.host, view, past, options)) > view.now_s
    ]
    if not waits:
        return None
    names = words.listed(name for _, name in waits)
    return Wait(f"{names} to end generation {past.generation.number}", max(until_s for until_s, _ in waits))


def _waited_until_s(host: str, view: View, past: Past, options: LaunchGroup) -> float:
    """Until when one member is waited for; the past if it is not."""
    seen = view.seen.get(host)
    assert past.generation is not None  # noqa: S101
    if seen is None or _is_leaving(host, view):
        return past.since_s
    state, number = seen.entry.state, past.generation.number
    if state is HostState.GONE or seen.entry.ended >= number:
        # The same line tells why, unless this host ended for another one's reason.
        return past.since_s
    # One that has said why it ends is about to be ready, however little is heard of it.
    silent = host not in view.ends and (host in view.silent or any(one.lost == host for one in view.ends.values()))
    if silent or not is_alive(seen, view, options):
        return past.since_s + (0.0 if quiet_s(seen, view) > 2 * options.lost_s else options.lost_s)
    if state is not HostState.BUSY:
        # It has not begun, or says so a little later.
        return past.since_s + options.lost_s
    return past.since_s + (_KILL_S if _nothing_to_save(view) else max(_KILL_S, view.stop_limit_s))


def _is_leaving(host: str, view: View) -> bool:
    end = view.ends.get(host)
    return end is not None and end.kind is EndKind.LEAVING


def _nothing_to_save(view: View) -> bool:
    return any(nothing_to_save(end) for end in view.ends.values())


def nothing_to_save(end: End) -> bool:
    """Whether workers of other hosts hang in a collective that this one has left, and can only be ended."""
    return end.kind in (EndKind.FAILED, EndKind.LOST)


def _wait_for_unknown(view: View, past: Past, options: LaunchGroup) -> Wait | None:
    """Lines that were read for the first time a moment ago: leftovers, or hosts that are there."""
    until_s = past.since_s + max(options.lost_s, 3 * options.poll_s)
    unknown = [one.entry.name for one in view.seen.values() if is_unknown(one, view, options)]
    if not unknown or view.now_s >= until_s:
        return None
    return Wait(f"a sign of life of {words.listed(unknown)}", until_s)


def _ready(view: View, options: LaunchGroup) -> list[Entry]:
    """All hosts that can take part, this one among them."""
    others = [one.entry for one in view.seen.values() if _can_take_part(one, view, options)]
    return [view.me, *others]


def _can_take_part(one: Seen, view: View, options: LaunchGroup) -> bool:
    entry, newest = one.entry, view.newest
    if entry.state is not HostState.READY or not is_alive(one, view, options):
        return False
    if newest is None:
        return True
    if newest.terminal:
        # Its members leave, and may only not have read it yet.
        return not newest.has(entry.host)
    # A member whose line is older than its end was waited for until that cannot be any more.
    return entry.host not in _unaware(view) and not _is_leaving(entry.host, view)


def _unaware(view: View) -> frozenset[str]:
    """Hosts that the newest generation leaves out, and that have not acted upon it yet."""
    newest = view.newest
    if newest is None or newest.terminal:
        return frozenset()
    lines = {host: one.entry for host, one in view.seen.items()}
    return frozenset(host for host in newest.excluded if host in lines and lines[host].ended < newest.number)


def _complete(ready: Sequence[Entry], view: View, options: LaunchGroup) -> bool:
    """Whether no further host could be taken in, or is expected."""
    enough = len(ready) >= options.min_hosts
    if options.max_hosts and len(ready) >= options.max_hosts:
        return enough
    return enough and 0 < view.expected_hosts <= len(ready) and view.expected_hosts > 1


def _wait_to_join(view: View, past: Past, ready: Sequence[Entry], options: LaunchGroup) -> Wait | None:
    """A group of which nobody was there before waits for more than the minimum, unless this host seems to be alone."""
    goes_on = past.generation is not None and any(past.generation.has(entry.host) for entry in ready)
    if goes_on or _complete(ready, view, options):
        return None
    alive = any(is_alive(one, view, options) for one in view.seen.values())
    if not alive and view.expected_hosts == 1:
        return None
    look_s = view.began_s + _OTHERS_POLLS * options.poll_s
    if not alive and view.expected_hosts == 0:
        # Over so soon that nobody needs to know, unless another one begins meanwhile.
        return Wait("", look_s) if view.now_s < look_s else None
    others_s = [view.seen[entry.host].since_s for entry in ready if entry.host in view.seen]
    came_s = sorted([view.began_s, *(max(view.began_s, since_s) for since_s in others_s)])
    until_s = came_s[options.min_hosts - 1] + options.join_s
    if view.now_s >= until_s:
        return None
    expected = f" of {view.expected_hosts}" if view.expected_hosts else ""
    return Wait(f"more hosts to join the {len(ready)}{expected} that are there", until_s)


def _judge(view: View, past: Past, ready: Sequence[Entry], group: Sequence[Entry], options: LaunchGroup) -> Next:
    if past.generation is None:
        return BEGIN
    hosts = frozenset(entry.host for entry in ready)
    aftermath = Aftermath(
        generation=past.generation,
        ends=view.ends,
        ready=hosts,
        unheard=hosts.difference(entry.host for entry in group),
        unaware=_unaware(view),
        committed_step=_committed_step(past.generation, view),
    )
    following = judge(aftermath, options)
    witnessed = any(past.generation.has(host) for host in hosts) or past.since_s > view.began_s + options.lost_s
    if following.outcome is Outcome.RUN or witnessed:
        return following
    # All who took part have left without drawing the line, and whoever comes now was started to go on.
    return Next(outcome=Outcome.RUN, reason=f"started again after: {following.reason}")


def _committed_step(generation: Generation, view: View) -> int:
    """What the members' lines know. Those of other launchers may be of an earlier run in the same folder."""
    lines = [view.me, *(one.entry for one in view.seen.values())]
    return max((line.committed_step for line in lines if generation.has(line.host)), default=0)


def _too_few(view: View, past: Past, ready: Sequence[Entry], options: LaunchGroup) -> Decision:
    others = [
        one.entry
        for one in view.seen.values()
        if is_alive(one, view, options) and one.entry.host not in {entry.host for entry in ready}
    ]
    pairs = pairs_without_sound([view.me, *(one for one in others if one.state is HostState.READY)], view)
    sentence = words.too_few(ready, others, min_hosts=options.min_hosts, no_sound_between=pairs)
    if not options.wait_s:
        return Wait(sentence)
    if view.now_s < past.since_s + options.wait_s:
        return Wait(sentence, past.since_s + options.wait_s)
    return Leave(EXIT_STOPPED, f"waited {options.wait_s:g} s (`launch.wait_s`) for {sentence}")


def _in_order(ready: Sequence[Entry], past: Past) -> list[Entry]:
    """Those that were members come first, as they were: they have in memory what a restart needs, and keep their ranks."""
    before = [] if past.generation is None else [member.host for member in past.generation.members]
    place = {host: number for number, host in enumerate(before)}
    return sorted(ready, key=lambda entry: (place.get(entry.host, len(place)), *_by_number(entry)))


def _numbered(members: list[Entry]) -> list[Entry]:
    """As the cluster numbers them, if it numbers them all."""
    return sorted(members, key=_by_number) if all(entry.order >= 0 for entry in members) else members


def _by_number(entry: Entry) -> tuple[bool, int, str, str]:
    return (entry.order < 0, entry.order, entry.name, entry.host)


def _create(view: View, past: Past, following: Next, *, members: Sequence[Member], queue: Sequence[Entry]) -> Decision:
    """The proposal, once it is this host's turn in the queue to make it."""
    number = 1 if view.newest is None else view.newest.number + 1
    came_s = [view.seen[entry.host].since_s for entry in queue if entry.host in view.seen]
    place = [entry.host for entry in queue].index(view.me.host)
    turn_s = max([past.since_s, *came_s]) + place * _STAGGER_S
    if view.now_s < turn_s:
        return Wait(f"{queue[0].name} to propose generation {number}", turn_s)
    return Create(
        Generation(
            number=number,
            outcome=following.outcome,
            members=tuple(members),
            master_port=queue[0].master_port if following.outcome is Outcome.RUN else 0,
            proposer=view.me.host,
            failures=following.failures,
            excluded=following.excluded,
            pause_s=following.pause_s,
            exit_code=following.exit_code,
            reason=following.reason,
        )
    )


def _concerned(past: Past, ready: Sequence[Entry]) -> tuple[Member, ...]:
    """Whom the end of the run concerns: all who took part, and those who would have."""
    members = () if past.generation is None else past.generation.members
    known = {member.host for member in members}
    return (*members, *(_member(entry) for entry in ready if entry.host not in known))


def _member(entry: Entry) -> Member:
    return Member(entry.host, entry.name, entry.address, entry.watch_port, entry.processes)
