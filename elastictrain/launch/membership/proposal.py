"""Forms the next generation: who is waited for, who takes part and in which order, and who proposes it. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from elastictrain.config.launch import LaunchGroup
from elastictrain.errors import EXIT_STOPPED
from elastictrain.launch.membership import messages
from elastictrain.launch.membership.decisions import Create, Decision, Leave, Wait
from elastictrain.launch.membership.hearing import largest_group, pairs_without_sound, settles_s
from elastictrain.launch.membership.observation import (
    ClusterState,
    HostObservation,
    abandoned_since_s,
    is_alive,
    is_unknown,
    quiet_s,
)
from elastictrain.launch.membership.policy import BEGIN, GenerationResult, NextGeneration, is_network_suspected, judge
from elastictrain.launch.membership.records import (
    End,
    EndKind,
    Generation,
    GenerationMember,
    GenerationOutcome,
    HostRecord,
    HostState,
)

_KILL_S = 30.0
"""How long the launcher of a host may take to end workers that have nothing to save any more."""

_OTHERS_POLLS = 2
"""Hosts of unknown number are often started at once: the first one looks around so often, while torch is imported anyway."""

_STAGGER_S = 1.0
"""Each host leaves the one before it that much time to make its proposal, as slow as storage may be: it may be gone by now."""


@dataclass(frozen=True, slots=True)
class PreviousGeneration:
    """What the next generation follows upon."""

    generation: Generation | None
    """The one that has ended; None where a run begins, for the first time or anew."""

    since_s: float
    """When it was known here that a next one is due; not before this launcher began."""


def find_previous(cluster: ClusterState, options: LaunchGroup) -> PreviousGeneration | None:
    """What a next generation would follow upon; None as long as the newest one may be running somewhere."""
    newest = cluster.newest
    if newest is None or newest.terminal:
        return PreviousGeneration(None, cluster.began_s)
    if cluster.ended_since_s is not None and cluster.ends:
        return PreviousGeneration(newest, cluster.ended_since_s)
    # The reason is written before a host says that it has ended, and reads may be late, or it was lost.
    said_s = [
        one.since_s for one in cluster.observed.values() if newest.has(one.record.host) and one.record.ended >= newest.number
    ]
    if said_s and cluster.read_s - min(said_s) > options.lost_s:
        return PreviousGeneration(newest, min(said_s))
    deserted_s = abandoned_since_s(cluster, newest, options)
    return None if deserted_s is None else PreviousGeneration(newest, deserted_s)


def propose_generation(cluster: ClusterState, previous: PreviousGeneration, options: LaunchGroup) -> Decision:
    """What a host that runs nothing does about the next generation. It must be able to take part in it itself."""
    if cluster.read_s < previous.since_s and not _all_members_told(cluster, previous, options):
        return Wait("the roster to be read")
    if (wait := _wait_for_members(cluster, previous, options)) is not None:
        return wait
    ready = _ready(cluster, options)
    if not _complete(ready, cluster, options) and (wait := _wait_for_unknown(cluster, previous, options)) is not None:
        return wait
    ready = _in_order(ready, previous)
    queue = largest_group(ready, cluster)
    if (wait := _wait_to_hear(cluster, previous, ready, queue, options)) is not None:
        return wait
    following = _judge(cluster, previous, ready, queue, options)
    if following.outcome is not GenerationOutcome.RUN:
        return _create(cluster, previous, following, members=_concerned(previous, ready), queue=ready)
    allowed = [record for record in queue if record.host not in following.excluded]
    if len(allowed) < options.min_hosts:
        return _too_few(cluster, previous, allowed, options)
    if cluster.me not in queue:
        names = messages.listed(one.name for one in allowed)
        return Wait(
            f"{names} to train, and to take in this host later; {messages.no_sound(pairs_without_sound(ready, cluster))}"
        )
    if (wait := _wait_to_join(cluster, previous, allowed, options)) is not None:
        return wait
    members = _numbered(allowed[: options.max_hosts] if options.max_hosts else allowed)
    queue = list(dict.fromkeys([*members, *queue]))
    return _create(cluster, previous, following, members=tuple(_member(record) for record in members), queue=queue)


def _all_members_told(cluster: ClusterState, previous: PreviousGeneration, options: LaunchGroup) -> bool:
    """Whether no reading of storage can show more: all members are ready, told so by themselves, and nobody else is there.

    Whoever is to be taken in, and who hears whom, is known from storage alone.
    """
    if previous.generation is None or is_network_suspected(previous.generation, cluster.ends):
        return False
    if any(end.kind in (EndKind.GROW, EndKind.LOST) for end in cluster.ends.values()):
        return False
    lines = {
        cluster.me.host: cluster.me,
        **{host: one.record for host, one in cluster.observed.items() if is_alive(one, cluster, options)},
    }
    ready = {host for host, line in lines.items() if line.state is HostState.READY}
    told = {host for host in ready if lines[host].ended >= previous.generation.number}
    return ready == told == {member.host for member in previous.generation.members}


def _wait_to_hear(
    cluster: ClusterState,
    previous: PreviousGeneration,
    ready: Sequence[HostRecord],
    group: Sequence[HostRecord],
    options: LaunchGroup,
) -> Wait | None:
    """Until it is certain who hears whom."""
    full = options.max_hosts and len(group) >= options.max_hosts
    if len(group) < len(ready) and not full:
        until_s = settles_s(ready, cluster, options, since_s=previous.since_s)
        missing = messages.listed(one.name for one in ready if one not in group)
        return Wait(f"all hosts to hear {missing}", until_s) if cluster.now_s < until_s else None
    if previous.generation is None or not is_network_suspected(previous.generation, cluster.ends):
        return None
    # Connections may break some time before the heartbeat can know that the network is out.
    until_s = previous.since_s + options.lost_s * 3 / 4
    return Wait("", until_s) if cluster.now_s < until_s else None


def _wait_for_members(cluster: ClusterState, previous: PreviousGeneration, options: LaunchGroup) -> Wait | None:
    """Members of the generation that has ended which are still at it, or have not said why it ended."""
    if previous.generation is None:
        return None
    waits = [
        (until_s, member.name)
        for member in previous.generation.members
        if member.host != cluster.me.host
        and (until_s := _waited_until_s(member.host, cluster, previous, options)) > cluster.now_s
    ]
    if not waits:
        return None
    names = messages.listed(name for _, name in waits)
    return Wait(f"{names} to end generation {previous.generation.number}", max(until_s for until_s, _ in waits))


def _waited_until_s(host: str, cluster: ClusterState, previous: PreviousGeneration, options: LaunchGroup) -> float:
    """Until when one member is waited for; the past if it is not."""
    observed = cluster.observed.get(host)
    assert previous.generation is not None  # noqa: S101
    if observed is None or _is_leaving(host, cluster):
        return previous.since_s
    state, number = observed.record.state, previous.generation.number
    if state is HostState.GONE or observed.record.ended >= number:
        # The same line tells why, unless this host ended for another one's reason.
        return previous.since_s
    # One that has said why it ends is about to be ready, however little is heard of it.
    silent = host not in cluster.ends and (host in cluster.silent or any(one.lost == host for one in cluster.ends.values()))
    if silent or not is_alive(observed, cluster, options):
        return previous.since_s + (0.0 if quiet_s(observed, cluster) > 2 * options.lost_s else options.lost_s)
    if state is not HostState.BUSY:
        # It has not begun, or says so a little later.
        return previous.since_s + options.lost_s
    return previous.since_s + (_KILL_S if _nothing_to_save(cluster) else max(_KILL_S, cluster.stop_limit_s))


def _is_leaving(host: str, cluster: ClusterState) -> bool:
    end = cluster.ends.get(host)
    return end is not None and end.kind is EndKind.LEAVING


def _nothing_to_save(cluster: ClusterState) -> bool:
    return any(nothing_to_save(end) for end in cluster.ends.values())


def nothing_to_save(end: End) -> bool:
    """Whether workers of other hosts hang in a collective that this one has left, and can only be ended."""
    return end.kind in (EndKind.FAILED, EndKind.LOST)


def _wait_for_unknown(cluster: ClusterState, previous: PreviousGeneration, options: LaunchGroup) -> Wait | None:
    """Lines that were read for the first time a moment ago: leftovers, or hosts that are there."""
    until_s = previous.since_s + max(options.lost_s, 3 * options.poll_s)
    unknown = [one.record.name for one in cluster.observed.values() if is_unknown(one, cluster, options)]
    if not unknown or cluster.now_s >= until_s:
        return None
    return Wait(f"a sign of life of {messages.listed(unknown)}", until_s)


def _ready(cluster: ClusterState, options: LaunchGroup) -> list[HostRecord]:
    """All hosts that can take part, this one among them."""
    others = [one.record for one in cluster.observed.values() if _can_take_part(one, cluster, options)]
    return [cluster.me, *others]


def _can_take_part(one: HostObservation, cluster: ClusterState, options: LaunchGroup) -> bool:
    record, newest = one.record, cluster.newest
    if record.state is not HostState.READY or not is_alive(one, cluster, options):
        return False
    if newest is None:
        return True
    if newest.terminal:
        # Its members leave, and may only not have read it yet.
        return not newest.has(record.host)
    # A member whose line is older than its end was waited for until that cannot be any more.
    return record.host not in _unaware(cluster) and not _is_leaving(record.host, cluster)


def _unaware(cluster: ClusterState) -> frozenset[str]:
    """Hosts that the newest generation leaves out, and that have not acted upon it yet."""
    newest = cluster.newest
    if newest is None or newest.terminal:
        return frozenset()
    lines = {host: one.record for host, one in cluster.observed.items()}
    return frozenset(host for host in newest.excluded if host in lines and lines[host].ended < newest.number)


def _complete(ready: Sequence[HostRecord], cluster: ClusterState, options: LaunchGroup) -> bool:
    """Whether no further host could be taken in, or is expected."""
    enough = len(ready) >= options.min_hosts
    if options.max_hosts and len(ready) >= options.max_hosts:
        return enough
    return enough and 0 < cluster.expected_hosts <= len(ready) and cluster.expected_hosts > 1


def _wait_to_join(
    cluster: ClusterState, previous: PreviousGeneration, ready: Sequence[HostRecord], options: LaunchGroup
) -> Wait | None:
    """A group of which nobody was there before waits for more than the minimum, unless this host seems to be alone."""
    goes_on = previous.generation is not None and any(previous.generation.has(record.host) for record in ready)
    if goes_on or _complete(ready, cluster, options):
        return None
    alive = any(is_alive(one, cluster, options) for one in cluster.observed.values())
    if not alive and cluster.expected_hosts == 1:
        return None
    look_s = cluster.began_s + _OTHERS_POLLS * options.poll_s
    if not alive and cluster.expected_hosts == 0:
        # Over so soon that nobody needs to know, unless another one begins meanwhile.
        return Wait("", look_s) if cluster.now_s < look_s else None
    others_s = [cluster.observed[record.host].since_s for record in ready if record.host in cluster.observed]
    came_s = sorted([cluster.began_s, *(max(cluster.began_s, since_s) for since_s in others_s)])
    until_s = came_s[options.min_hosts - 1] + options.join_s
    if cluster.now_s >= until_s:
        return None
    expected = f" of {cluster.expected_hosts}" if cluster.expected_hosts else ""
    return Wait(f"more hosts to join the {len(ready)}{expected} that are there", until_s)


def _judge(
    cluster: ClusterState,
    previous: PreviousGeneration,
    ready: Sequence[HostRecord],
    group: Sequence[HostRecord],
    options: LaunchGroup,
) -> NextGeneration:
    if previous.generation is None:
        return BEGIN
    hosts = frozenset(record.host for record in ready)
    result = GenerationResult(
        generation=previous.generation,
        ends=cluster.ends,
        ready=hosts,
        unheard=hosts.difference(record.host for record in group),
        unaware=_unaware(cluster),
        committed_step=_committed_step(previous.generation, cluster),
    )
    following = judge(result, options)
    witnessed = any(previous.generation.has(host) for host in hosts) or previous.since_s > cluster.began_s + options.lost_s
    if following.outcome is GenerationOutcome.RUN or witnessed:
        return following
    # All who took part have left without drawing the line, and whoever comes now was started to go on.
    return NextGeneration(outcome=GenerationOutcome.RUN, reason=f"started again after: {following.reason}")


def _committed_step(generation: Generation, cluster: ClusterState) -> int:
    """What the members' records know. Those of other launchers may be of an earlier run in the same folder."""
    lines = [cluster.me, *(one.record for one in cluster.observed.values())]
    return max((line.committed_step for line in lines if generation.has(line.host)), default=0)


def _too_few(
    cluster: ClusterState, previous: PreviousGeneration, ready: Sequence[HostRecord], options: LaunchGroup
) -> Decision:
    others = [
        one.record
        for one in cluster.observed.values()
        if is_alive(one, cluster, options) and one.record.host not in {record.host for record in ready}
    ]
    pairs = pairs_without_sound([cluster.me, *(one for one in others if one.state is HostState.READY)], cluster)
    sentence = messages.too_few(ready, others, min_hosts=options.min_hosts, no_sound_between=pairs)
    if not options.wait_s:
        return Wait(sentence)
    if cluster.now_s < previous.since_s + options.wait_s:
        return Wait(sentence, previous.since_s + options.wait_s)
    return Leave(EXIT_STOPPED, f"waited {options.wait_s:g} s (`launch.wait_s`) for {sentence}")


def _in_order(ready: Sequence[HostRecord], previous: PreviousGeneration) -> list[HostRecord]:
    """Those that were members come first, as they were: they have in memory what a restart needs, and keep their ranks."""
    before = [] if previous.generation is None else [member.host for member in previous.generation.members]
    place = {host: number for number, host in enumerate(before)}
    return sorted(ready, key=lambda record: (place.get(record.host, len(place)), *_by_number(record)))


def _numbered(members: list[HostRecord]) -> list[HostRecord]:
    """As the cluster numbers them, if it numbers them all."""
    return sorted(members, key=_by_number) if all(record.order >= 0 for record in members) else members


def _by_number(record: HostRecord) -> tuple[bool, int, str, str]:
    return (record.order < 0, record.order, record.name, record.host)


def _create(
    cluster: ClusterState,
    previous: PreviousGeneration,
    following: NextGeneration,
    *,
    members: Sequence[GenerationMember],
    queue: Sequence[HostRecord],
) -> Decision:
    """The proposal, once it is this host's turn in the queue to make it."""
    number = 1 if cluster.newest is None else cluster.newest.number + 1
    came_s = [cluster.observed[record.host].since_s for record in queue if record.host in cluster.observed]
    place = [record.host for record in queue].index(cluster.me.host)
    turn_s = max([previous.since_s, *came_s]) + place * _STAGGER_S
    if cluster.now_s < turn_s:
        return Wait(f"{queue[0].name} to propose generation {number}", turn_s)
    return Create(
        Generation(
            number=number,
            outcome=following.outcome,
            members=tuple(members),
            master_port=queue[0].master_port if following.outcome is GenerationOutcome.RUN else 0,
            proposer=cluster.me.host,
            failures=following.failures,
            excluded=following.excluded,
            pause_s=following.pause_s,
            exit_code=following.exit_code,
            reason=following.reason,
        )
    )


def _concerned(previous: PreviousGeneration, ready: Sequence[HostRecord]) -> tuple[GenerationMember, ...]:
    """Whom the end of the run concerns: all who took part, and those who would have."""
    members = () if previous.generation is None else previous.generation.members
    known = {member.host for member in members}
    return (*members, *(_member(record) for record in ready if record.host not in known))


def _member(record: HostRecord) -> GenerationMember:
    return GenerationMember(record.host, record.name, record.address, record.watch_port, record.processes)
