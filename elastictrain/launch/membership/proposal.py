"""Forms the next generation: which hosts are waited for, which take part in which order, and which one proposes it."""

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace

from elastictrain.config.composed import LaunchGroup
from elastictrain.errors import EXIT_STOPPED
from elastictrain.launch.membership import messages
from elastictrain.launch.membership.observation import (
    ClusterState,
    HostObservation,
    is_alive,
    largest_group,
    may_be_alive,
    quiet_s,
    takeover_s,
    unconnected_pairs,
)
from elastictrain.launch.membership.policy import is_network_suspected, judge
from elastictrain.launch.membership.records import (
    DRAFT,
    Create,
    Decision,
    EndKind,
    Generation,
    GenerationMember,
    GenerationOutcome,
    HostRecord,
    HostState,
    Leave,
    Wait,
)

_KILL_S = 30.0  # how long a launcher may take to end workers that have nothing to save

# The first of an unknown number of hosts waits for so many times `launch.poll_s` before it starts alone: hosts are often
# started together. Where torch is still being imported the longer wait costs nothing.
_OTHERS_POLLS, _MORE_POLLS = 1, 2

_STAGGER_S = 1.0  # head start of each host to propose before the next one does: storage may be slow, and the host may have died


def propose_generation(cluster: ClusterState, options: LaunchGroup) -> Decision | None:
    """Decide about the next generation on a host that runs nothing; None while the newest one may be running elsewhere.
    The host itself must be able to take part."""
    newest = cluster.newest
    if newest is None or newest.terminal:
        return _GenerationProposal(cluster, options, None, cluster.began_s).decide()
    since_s = _ended_since_s(cluster, newest, options)
    return None if since_s is None else _GenerationProposal(cluster, options, newest, since_s).decide()


def _ended_since_s(cluster: ClusterState, newest: Generation, options: LaunchGroup) -> float | None:
    if cluster.ended_since_s is not None and cluster.ends:
        return cluster.ended_since_s
    # A host publishes the reason before its end; a late read may miss it, or it was lost.
    ended = [one for one in cluster.observed.values() if one.record.ended >= newest.number and newest.has(one.record.host)]
    first_s = min((one.since_s for one in ended), default=cluster.read_s)
    if cluster.read_s - first_s > options.lost_s:
        return first_s
    # Since when no member can run it any more, in the eyes of another host.
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


@dataclass(frozen=True, slots=True)
class _GenerationProposal:
    cluster: ClusterState
    options: LaunchGroup
    previous: Generation | None  # the ended generation; None where a run begins, for the first time or anew
    since_s: float  # when this launcher knew that a next one is due; not before its start

    def decide(self) -> Decision:
        """Create once it is this host's turn; until then Wait, or Leave after `launch.wait_s` with too few hosts."""
        cluster = self.cluster
        if cluster.read_s < self.since_s and not self._all_members_told():
            return Wait("the records of all hosts to be read")
        if (wait := self._wait_for_members()) is not None:
            return wait
        ready = [cluster.me, *(one.record for one in cluster.observed.values() if self._can_take_part(one))]
        if not self._complete(ready) and (wait := self._wait_for_unknown()) is not None:
            return wait
        # Members come first, in their order: they have in memory what a restart needs, and keep their ranks.
        places = {member.host: number for number, member in enumerate(self.previous.members if self.previous else ())}
        ready.sort(key=lambda record: (places.get(record.host, len(places)), *_by_number(record)))
        group = largest_group(ready, cluster)
        if (wait := self._wait_to_connect(ready, group)) is not None:
            return wait
        following = self._judge(ready, group)
        if following.outcome is not GenerationOutcome.RUN:
            # It concerns all members of the previous generation, and those of the next.
            members = () if self.previous is None else self.previous.members
            others = (member_of(record) for record in ready if self.previous is None or not self.previous.has(record.host))
            return self._create(following, members=(*members, *others), queue=ready)
        allowed = [record for record in group if record.host not in following.excluded]
        if len(allowed) < self.options.min_hosts:
            return self._too_few(allowed)
        if cluster.me not in group:
            names = messages.listed(one.name for one in allowed)
            unconnected = messages.unconnected(unconnected_pairs(ready, cluster))
            return Wait(f"{names} to train, and to take in this host later; {unconnected}")
        if (wait := self._wait_to_join(allowed)) is not None:
            return wait
        chosen = allowed[: self.options.max_hosts] if self.options.max_hosts else allowed
        if all(record.order >= 0 for record in chosen):
            # In the cluster's order.
            placed = chosen = sorted(chosen, key=_by_number)
        else:
            placed = in_vacant_places(chosen, self.previous.members if self.previous is not None else ())
        return self._create(following, members=[member_of(one) for one in placed], queue=list(dict.fromkeys([*chosen, *group])))

    def _all_members_told(self) -> bool:
        """Whether another read can show nothing new: all members reported that they are ready, and no other host is alive.
        Newcomers and connections are known from storage alone, so ends that involve them need a read."""
        cluster, previous = self.cluster, self.previous
        if previous is None or is_network_suspected(previous, cluster.ends):
            return False
        if any(end.kind in (EndKind.GROW, EndKind.LOST) for end in cluster.ends.values()):
            return False
        alive = [one.record for one in cluster.observed.values() if is_alive(one, cluster, self.options)]
        ready = [record for record in (cluster.me, *alive) if record.state is HostState.READY]
        told = {record.host for record in ready if record.ended >= previous.number}
        return {record.host for record in ready} == told == {member.host for member in previous.members}

    def _wait_for_members(self) -> Wait | None:
        """Wait for members of the ended generation that still run it, or have not reported why it ended."""
        if self.previous is None:
            return None
        others = [member for member in self.previous.members if member.host != self.cluster.me.host]
        lost = {end.lost for end in self.cluster.ends.values()}
        limits_s = [self._waited_until_s(member.host, self.previous.number, lost=lost) for member in others]
        names = [member.name for member, limit_s in zip(others, limits_s, strict=True) if limit_s > self.cluster.now_s]
        if not names:
            return None
        return Wait(f"{messages.listed(names)} to end generation {self.previous.number}", max(limits_s))

    def _waited_until_s(self, host: str, number: int, *, lost: Set[str]) -> float:
        """Until when one member is waited for; a time in the past if it is not."""
        cluster, options = self.cluster, self.options
        observed = cluster.observed.get(host)
        if observed is None or self._is_leaving(host):
            return self.since_s
        state = observed.record.state
        if state is HostState.GONE or observed.record.ended >= number:
            # The same record has the reason, unless that host ended for another one's.
            return self.since_s
        # A host that published its end will be ready soon, even if its heartbeats are late.
        silent = host not in cluster.ends and (host in cluster.silent or host in lost)
        if silent or not is_alive(observed, cluster, options):
            return self.since_s + (0.0 if quiet_s(observed, cluster) > 2 * options.lost_s else options.lost_s)
        if state is not HostState.BUSY:
            # It has not started the generation, or its record is a little late.
            return self.since_s + options.lost_s
        nothing_to_save = any(end.loses_state for end in cluster.ends.values())
        return self.since_s + (_KILL_S if nothing_to_save else max(_KILL_S, cluster.stop_limit_s))

    def _is_leaving(self, host: str) -> bool:
        end = self.cluster.ends.get(host)
        return end is not None and end.kind is EndKind.LEAVING

    def _wait_for_unknown(self) -> Wait | None:
        """Wait for records that were first read a moment ago: they may be leftovers, or of live hosts."""
        cluster, options = self.cluster, self.options
        until_s = self.since_s + max(options.lost_s, 3 * options.poll_s)
        observed = cluster.observed.values()
        unknown = [one.record.name for one in observed if not one.fresh and may_be_alive(one, cluster, options)]
        if not unknown or cluster.now_s >= until_s:
            return None
        return Wait(f"a sign of life of {messages.listed(unknown)}", until_s)

    def _can_take_part(self, one: HostObservation) -> bool:
        record, newest = one.record, self.cluster.newest
        if record.state is not HostState.READY or not is_alive(one, self.cluster, self.options):
            return False
        if newest is None:
            return True
        if newest.terminal:
            # Its members leave, and may not have read that yet.
            return not newest.has(record.host)
        # A member whose record is older than its end was already waited for, up to the limit.
        return record.host not in self._unaware() and (not self._is_leaving(record.host) or self._is_back(record))

    def _is_back(self, ready: HostRecord) -> bool:
        """Whether a host that is ready has left for being slow, and has come back since, as it does where too few are left."""
        end = self.cluster.ends[ready.host]
        return end.slow_rank >= 0 and ready.ended >= end.generation

    def _unaware(self) -> frozenset[str]:
        """Hosts that the newest generation leaves out, and that have not reacted yet."""
        if self.previous is None:
            return frozenset()
        excluded, observed = self.previous.excluded, self.cluster.observed
        return frozenset(host for host in excluded if host in observed and observed[host].record.ended < self.previous.number)

    def _complete(self, ready: Sequence[HostRecord]) -> bool:
        """Whether no further host could be taken in, or is expected."""
        options, expected = self.options, self.cluster.expected_hosts
        full = 0 < options.max_hosts <= len(ready)
        return len(ready) >= options.min_hosts and (full or 1 < expected <= len(ready))

    def _wait_to_connect(self, ready: Sequence[HostRecord], group: Sequence[HostRecord]) -> Wait | None:
        """Wait until it is certain which hosts are connected."""
        cluster, options = self.cluster, self.options
        if len(group) < len(ready) and not 0 < options.max_hosts <= len(group):
            # What each host receives must have been the same for a while: after a network heals, hosts do not hear each other
            # all at the same moment.
            observed = [cluster.observed[one.host] for one in ready if one.host in cluster.observed]
            changes_s = [time_s for one in observed for time_s in (one.hears_since_s, one.since_s)]
            until_s = max([self.since_s, cluster.heard_since_s, *changes_s]) + options.lost_s / 2
            connected = {one.host for one in group}
            missing = messages.listed(one.name for one in ready if one.host not in connected)
            return Wait(f"all hosts to hear {missing}", until_s) if cluster.now_s < until_s else None
        if self.previous is None or not is_network_suspected(self.previous, cluster.ends):
            return None
        # Connections may break some time before heartbeats can show that the network is down.
        until_s = self.since_s + options.lost_s * 3 / 4
        return Wait("", until_s) if cluster.now_s < until_s else None

    def _wait_to_join(self, ready: Sequence[HostRecord]) -> Wait | None:
        """A group of new hosts only waits for more than the minimum, unless this host seems to be alone."""
        cluster, options = self.cluster, self.options
        goes_on = self.previous is not None and any(self.previous.has(record.host) for record in ready)
        if goes_on or self._complete(ready):
            return None
        alive = any(is_alive(one, cluster, options) for one in cluster.observed.values())
        if not alive and cluster.expected_hosts == 1:
            return None
        look_s = cluster.began_s + (_OTHERS_POLLS if cluster.ready else _MORE_POLLS) * options.poll_s
        if not alive and cluster.expected_hosts == 0:
            # Too short to be printed, unless another host starts meanwhile.
            return Wait("", look_s) if cluster.now_s < look_s else None
        others_s = [cluster.observed[record.host].since_s for record in ready if record.host in cluster.observed]
        came_s = sorted([cluster.began_s, *(max(cluster.began_s, since_s) for since_s in others_s)])
        until_s = came_s[options.min_hosts - 1] + options.join_s
        if cluster.now_s >= until_s:
            return None
        expected = f" of {cluster.expected_hosts}" if cluster.expected_hosts else ""
        return Wait(f"more hosts to join the {len(ready)}{expected} that are there", until_s)

    def _judge(self, ready: Sequence[HostRecord], group: Sequence[HostRecord]) -> Generation:
        cluster, previous = self.cluster, self.previous
        if previous is None:
            newest = cluster.newest or DRAFT
            return replace(DRAFT, number=newest.number + 1, reason="", poisoned=newest.poisoned)
        hosts, members = frozenset(record.host for record in ready), {member.host for member in previous.members}
        # Records of other launchers may be from an earlier run in the same folder.
        records = [cluster.me, *(one.record for one in cluster.observed.values())]
        following = judge(
            previous,
            cluster.ends,
            self.options,
            ready=hosts,
            unheard=hosts.difference(record.host for record in group),
            unaware=self._unaware(),
            committed_step=max((one.committed_step for one in records if one.host in members), default=0),
            on_poisoned=cluster.on_poisoned,
        )
        slow = next((end for end in cluster.ends.values() if end.slow_rank >= 0), previous.slow)
        unchanged = following.poisoned == DRAFT.poisoned
        following = replace(following, slow=slow, poisoned=previous.poisoned if unchanged else following.poisoned)
        witnessed = not members.isdisjoint(hosts) or self.since_s > cluster.began_s + self.options.lost_s
        if following.outcome is GenerationOutcome.RUN or witnessed:
            return following
        # All members have left before they gave up the run, and this launcher was started to resume it.
        kept = following.poisoned
        return replace(DRAFT, number=following.number, poisoned=kept, reason=f"started again after: {following.reason}")

    def _too_few(self, ready: Sequence[HostRecord]) -> Decision:
        cluster, options = self.cluster, self.options
        records = [one.record for one in cluster.observed.values() if is_alive(one, cluster, options)]
        others = [record for record in records if record not in ready]
        pairs = unconnected_pairs([cluster.me, *(one for one in others if one.state is HostState.READY)], cluster)
        sentence = messages.too_few(ready, others, min_hosts=options.min_hosts, unconnected_pairs=pairs)
        if not options.wait_s:
            return Wait(sentence)
        if cluster.now_s < self.since_s + options.wait_s:
            return Wait(sentence, self.since_s + options.wait_s)
        return Leave(EXIT_STOPPED, f"waited {options.wait_s:g} s (`launch.wait_s`) for {sentence}")

    def _create(self, following: Generation, *, members: Sequence[GenerationMember], queue: Sequence[HostRecord]) -> Decision:
        """The proposal, once it is this host's turn in the queue."""
        cluster = self.cluster
        came_s = [cluster.observed[record.host].since_s for record in queue if record.host in cluster.observed]
        place = [record.host for record in queue].index(cluster.me.host)
        turn_s = max([self.since_s, *came_s]) + place * _STAGGER_S
        if cluster.now_s < turn_s:
            return Wait(f"{queue[0].name} to propose generation {following.number}", turn_s)
        # The store of the workers is on the first host.
        ports = (record.master_port for record in queue if record.host == members[0].host)
        port = next(ports) if following.outcome is GenerationOutcome.RUN else 0
        return Create(replace(following, members=tuple(members), master_port=port, proposer=cluster.me.host))


def _by_number(record: HostRecord) -> tuple[bool, int, str, str]:
    return (record.order < 0, record.order, record.name, record.host)


def member_of(record: HostRecord) -> GenerationMember:
    return GenerationMember(record.host, record.name, record.address, record.watch_port, record.processes)


def in_vacant_places(chosen: Sequence[HostRecord], before: Sequence[GenerationMember]) -> list[HostRecord]:
    """The chosen hosts in the order of their ranks. A newcomer takes the place of a member `before` that is gone and had as
    many workers, so that all other members keep their ranks."""
    hosts = {member.host for member in before}
    stay = {one.host: one for one in chosen if one.host in hosts}
    new, placed = [one for one in chosen if one.host not in hosts], []
    for member in before:
        if (one := stay.get(member.host)) is None:
            fits = (place for place, spare in enumerate(new) if spare.processes == member.processes)
            if (place := next(fits, None)) is None:
                continue
            one = new.pop(place)
        placed.append(one)
    return [*placed, *new]


def likely_generation(newest: Generation | None, me: HostRecord, options: LaunchGroup) -> Generation | None:
    """`newest`, with this host in a place that it may get in the next one: beside the members, or that of one of them. None if
    it cannot take part, or takes part already."""
    if newest is None or newest.terminal or newest.has(me.host) or me.state is not HostState.READY:
        return None
    full = not options.grow or 0 < options.max_hosts <= len(newest.members)
    return replace(newest, members=(*newest.members[: len(newest.members) - full], member_of(me)))
