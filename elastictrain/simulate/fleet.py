"""Simulated hosts, each with a launcher that decides as a real one does.

A launcher decides many times a second, and nearly always as the second before. Here hosts decide only when something has
changed that a decision looks at, or when a limit of it has passed; and of hosts that are in the same position only one
decides, for all of them. `polled=True` has each host decide all the time instead: generations are the same, which tests show.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, inf
from typing import cast

from elastictrain.config.composed import LaunchGroup
from elastictrain.errors import EXIT_OK, EXIT_TRANSPORT
from elastictrain.launch.membership.decide import decide
from elastictrain.launch.membership.observation import ClusterState, HostObservation, patience_s, takeover_s
from elastictrain.launch.membership.records import (
    Create,
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
    Wait,
)
from elastictrain.simulate.network import Heard
from elastictrain.simulate.queue import EventQueue
from elastictrain.simulate.training import Training

Decide = Callable[[ClusterState, LaunchGroup], Decision]
CreateGeneration = Callable[[Generation], bool]  # False: it exists already, or storage does not answer
TURN_S = 0.125  # between two decisions of a launcher; a power of two, so that sums of turns are exact
_KILLED = 137


@dataclass(slots=True, eq=False)
class Knowledge:
    """What storage has told."""

    observed: dict[str, HostObservation]
    newest: Generation | None = None
    newest_since_s: float = 0.0
    ended_since_s: float | None = None
    ends: dict[str, End] = field(default_factory=dict)
    read_s: float = inf  # when storage was reached last; inf: it is reached


@dataclass(slots=True, eq=False)
class Host:
    machine: int
    record: HostRecord
    began_s: float
    running: Generation | None = None
    asked: End | None = None
    exits_s: float = inf
    at_once: bool = False
    followed: Generation | None = None  # whose members it has listened to, and since when
    followed_s: float = 0.0
    leaving: bool = False
    ready_s: float = 0.0  # from when on it has processes that can begin
    memory: Knowledge | None = None  # while it does not reach storage: what it knew before
    shown: HostRecord | None = None  # what the others have read of it


class Fleet:
    def __init__(
        self,
        queue: EventQueue,
        training: Training,
        options: LaunchGroup,
        *,
        turn_s: float = TURN_S,
        polled: bool = False,
        decide_by: Decide = decide,
        create: CreateGeneration | None = None,
    ) -> None:
        """`create`: puts a generation into storage; without it each number exists once."""
        self._create = create or (lambda generation: generation.number == len(self.generations) + 1)
        self.queue, self.training, self.options = queue, training, options
        self.network = training.network
        self.hosts: dict[str, Host] = {}
        self.on_machine: dict[int, Host] = {}
        self.known = Knowledge({})
        self.generations: list[Generation] = []
        self.created_s: list[float] = []
        self.decisions = 0
        self._turn_s, self._polled, self._decide = turn_s, polled, decide_by
        self._turns: set[int] = set()
        self._taken = -1  # the last turn
        self._groups: list[list[Host]] | None = None  # hosts that decide alike; None: something has changed
        self._changed: dict[str, Host] = {}
        self._starts = 0
        lost_s = options.lost_s
        patience = [patience_s(state, options) for state in (HostState.READY, HostState.BUSY)]
        self._limits_s = sorted({lost_s / 2, lost_s, *patience, takeover_s(options)})

    # What happens to hosts.

    def start(self, machine: int, *, follows: bool = False) -> None:
        """A launcher starts, unless the machine has one; the others see it with its second beat. `follows`: it finds that it
        follows another one on this machine, and tells that that one is gone."""
        if machine in self.on_machine:
            return
        self._starts += 1
        name, now_s = f"h{machine:05d}", self.queue.now_s
        record = HostRecord(
            f"{name}.{self._starts}", name, name, 7, 29_500, self.training.scenario.processes, -1, HostState.READY, "", 0, 0
        )
        record = replace(record, hears=cast(tuple[str, ...], Heard(self.network, record.host)))
        host = Host(machine, record, now_s, ready_s=now_s + self.training.new_processes_s)
        self.on_machine[machine] = host
        self.network.add(record.host, machine)

        def show() -> None:
            if self.on_machine.get(machine) is host:
                self.hosts[record.host] = host
                for before in self.network.on_machine[machine][:-1] if follows else ():
                    self._tell_gone(before)
                self.network.change(delayed=False)
                self._publish(host, host.record)

        self.queue.at(now_s + self.options.poll_s, show)

    def _tell_gone(self, host: str) -> None:
        if (seen := self.known.observed.get(host)) is not None:
            self.known.observed[host] = replace(seen, record=replace(seen.record, state=HostState.GONE))

    def lose(self, machine: int) -> None:
        """A machine vanishes without a word."""
        host = self.on_machine.pop(machine, None)
        if host is not None:
            self.network.gone[host.record.host] = self.queue.now_s
            self._forget(host)
            if (seen := self.known.observed.get(host.record.host)) is not None:
                self.known.observed[host.record.host] = replace(seen, changed_s=min(seen.changed_s, self.queue.now_s))
            self.training.host_gone(host.record.host)

    def _forget(self, host: Host) -> None:
        self.hosts.pop(host.record.host, None)
        self._changed.pop(host.record.host, None)
        self.network.change(delayed=True)
        self.look_later()

    def worker_dies(self, machine: int, *, exit_code: int = _KILLED, hung: bool = False) -> None:
        """`hung`: its host has ended it for that, and says so."""
        host = self.on_machine.get(machine)
        if host is not None and host.running is not None and host.exits_s == inf:
            number, name, blames = host.running.number, host.record.host, (host.record.host,) if hung else ()
            self._over(host, End(number, name, EndKind.FAILED, exit_code, "", 0, 0, "workers ended", blames=blames))
            if (exit_code == EXIT_TRANSPORT and not hung) or not self.training.scenario.standbys:
                host.ready_s = self.queue.now_s + self.training.new_processes_s

    def notice(self, machine: int) -> None:
        if (host := self.on_machine.get(machine)) is not None:
            host.leaving, self._groups = True, None
            self.look(self.queue.now_s)

    def cut(self, machine: int, *, cut: bool) -> None:
        """A host does not reach storage any more, or does again."""
        if (host := self.on_machine.get(machine)) is None or cut == (host.memory is not None):
            return
        seen, now_s = self.known.observed.get(host.record.host), self.queue.now_s
        known = self.known
        host.memory = replace(known, observed=dict(known.observed), ends=dict(known.ends), read_s=now_s) if cut else None
        if seen is not None:
            self.known.observed[host.record.host] = replace(seen, changed_s=now_s if cut else inf)
        if not cut:
            self._publish(host, host.record)
        self.training.reaches_storage(host.record.host, reaches=not cut)
        self.look_later()

    def look_later(self) -> None:
        """Decide now, and when each of the limits has passed."""
        self._groups = None
        self.look(self.queue.now_s)
        for limit_s in self._limits_s:
            self.look(self.queue.now_s + limit_s + self._turn_s / 1024)

    # Decisions.

    def look(self, time_s: float) -> None:
        """Decide in the first turn that is not before that time."""
        turn = max(ceil(time_s / self._turn_s), self._taken + 1)
        if turn not in self._turns:
            self._turns.add(turn)
            self.queue.at(turn * self._turn_s, lambda: self._take_turn(turn), last=True)

    def _take_turn(self, turn: int) -> None:
        self._turns.remove(turn)
        self._taken = turn
        self._read()
        if self._groups is None:
            self._groups = self._grouped()
        decided = [(alike, self._decided(alike[0])) for alike in self._groups]
        for alike, decision in decided:
            if isinstance(decision, Wait):
                if decision.until_s is not None and decision.until_s > self.queue.now_s:
                    self.look(decision.until_s)
            else:
                self._act(alike, decision)
        if self._polled:
            self.look(self.queue.now_s + self._turn_s)

    def _read(self) -> None:
        """All read storage: a generation that was created, records that were written."""
        known, now_s = self.known, self.queue.now_s
        if self.generations and self.generations[-1] is not known.newest:
            known.newest, known.newest_since_s, known.ends, known.ended_since_s = self.generations[-1], now_s, {}, None
            self._groups = None
            self._drop_dead(known.newest)
            self.look(now_s + self.options.lost_s + self._turn_s / 1024)
            self.look(now_s + self.options.grow_every_s)
        ends, came = self.known.ends, False
        for host in [host for host in self._changed.values() if host.memory is None]:
            record, before = self._changed.pop(host.record.host).record, host.shown
            same = before is not None and (before.state, before.ended) == (record.state, record.ended)
            since_s = known.observed[record.host].since_s if same else now_s
            came |= not same and record.state is HostState.READY
            known.observed[record.host] = HostObservation(record, inf, True, since_s, 0.0)
            host.shown = record
            if record.end is not None and known.newest is not None and record.end.generation == known.newest.number:
                ends[record.host] = record.end
        if came:
            self.look(now_s + self.options.grow_after_s)
        if ends and known.ended_since_s is None:
            known.ended_since_s = now_s

    def _drop_dead(self, newest: Generation) -> None:
        members = {member.host for member in newest.members}
        for host in [host for host in self.network.gone if host not in members]:
            if self.queue.now_s - self.network.gone[host] > takeover_s(self.options):
                self.network.remove(host)
                self.known.observed.pop(host, None)

    def _grouped(self) -> list[list[Host]]:
        """Hosts in groups that decide alike, in the order of ranks, members first."""
        newest = self.known.newest
        members = [] if newest is None else [self.hosts[one.host] for one in newest.members if one.host in self.hosts]
        places = {host.record.host for host in members}
        spares = sorted((host for name, host in self.hosts.items() if name not in places), key=lambda host: host.record.host)
        if self._polled:
            return [[host] for host in (*members, *spares)]
        groups: dict[object, list[Host]] = {}
        for host in members:
            groups.setdefault(self._position(host, member=True), []).append(host)
        goes_on = any(not host.leaving and host.record.state is not HostState.UNFIT for host in members)
        if newest is not None and goes_on and not self.network.outages and not any(host.memory for host in members):
            # Members decide before spare hosts do.
            spares = [host for host in spares if host.running or host.leaving or host.record.host in newest.excluded]
        for host in spares:
            groups.setdefault(self._position(host, member=False), []).append(host)
        return list(groups.values())

    def _position(self, host: Host, *, member: bool) -> object:
        """What the decisions of two hosts can differ in."""
        record, newest, ends = host.record, self.known.newest, self.known.ends
        own = ends.get(record.host)
        running = 0 if host.running is None else host.running.number
        return (
            member,
            running,
            running and host.running is not None and host.running.members[0].host == record.host,
            record.state,
            record.ended,
            host.leaving,
            host.asked is None,
            own and (own.kind, own.exit_code),
            self.network.side(host.machine) if self.network.outages else (),
            host.memory and host.memory.read_s,
            host.followed is not None and host.followed.number,
            newest is not None and record.host in newest.excluded,
            max(host.began_s, self.known.newest_since_s) if not member else 0.0,
        )

    def _decided(self, host: Host) -> Decision:
        self.decisions += 1
        known, now_s, name = host.memory or self.known, self.queue.now_s, host.record.host
        own = known.observed.pop(name, None)
        followed = set() if host.followed is None else {one.host for one in host.followed.members} - {name}
        cluster = ClusterState(
            me=host.record,
            now_s=now_s,
            reads=1,
            began_s=host.began_s,
            running=host.running,
            newest=known.newest,
            newest_since_s=max(known.newest_since_s, host.began_s),
            ends=known.ends,
            ended_since_s=known.ended_since_s,
            observed=known.observed,
            read_s=min(known.read_s, now_s),
            silent=frozenset(self._silent(host, followed)),
            heard=cast(frozenset[str], Heard(self.network, name)),
            heard_since_s=self.network.heard_since_s(),
            restart_cost_s=self.training.restart_cost_s,
            stop_limit_s=self.training.costs.stop_s + self.options.lost_s,
            stop_reason="asked to leave" if host.leaving else "",
        )
        decision = self._decide(cluster, self.options)
        if own is not None:
            known.observed[name] = own
        return decision

    def _silent(self, host: Host, followed: set[str]) -> set[str]:
        if self.queue.now_s - host.followed_s <= self.options.lost_s:
            return set()
        return self.network.missing(host.record.host, followed, for_s=self.options.lost_s)

    # What follows from a decision.

    def _act(self, alike: Sequence[Host], decision: Decision) -> None:
        match decision:
            case Join(generation):
                for host in alike:
                    host.running, host.asked, host.at_once, host.exits_s = generation, None, False, inf
                    host.followed, host.followed_s = generation, self.queue.now_s
                    self._publish(host, replace(host.record, state=HostState.BUSY))
                self.training.join(generation, alike)
                self.look(self.queue.now_s + self.options.lost_s + self._turn_s / 1024)
            case Create(generation) if alike[0].memory is None:
                if self._create(generation):
                    self.generations.append(generation)
                    self.created_s.append(self.queue.now_s)
                self.look(self.queue.now_s + self._turn_s)
            case Finish(end, at_once):
                own = end.host == alike[0].record.host
                for host in alike:
                    self._finish(host, replace(end, host=host.record.host) if own else end, at_once=at_once)
            case LeaveOut(number, reason):
                for host in alike:
                    ended = max(number, host.record.ended)
                    self._publish(host, replace(host.record, state=HostState.UNFIT, reason=reason, ended=ended))
                    self.queue.at(self.queue.now_s + self.options.retry_unfit_s, lambda host=host: self._fit_again(host))  # type: ignore[misc]
            case Leave(exit_code):
                for host in alike:
                    self._leave(host, exit_code)
            case _:
                pass

    def _finish(self, host: Host, end: End, *, at_once: bool) -> None:
        if host.asked is not None and at_once <= host.at_once:
            return
        now_s, own, self._groups = self.queue.now_s, end.host == host.record.host, None
        if host.asked is None:
            host.asked = end
            if own:
                self._publish(host, replace(host.record, end=end))
        host.at_once = at_once
        assert host.running is not None  # noqa: S101
        # Workers that hang are killed, or detached from a group that is no more: `recovery_s` has what that takes.
        begun = self.training.stop(host.running, orderly=not at_once)
        host.exits_s = min(host.exits_s, now_s + (self.training.costs.stop_s if begun and not at_once else 0.0))
        self.queue.at(host.exits_s, lambda: self._exit(host))

    def _exit(self, host: Host) -> None:
        if host.running is not None and host.asked is not None and self.queue.now_s >= host.exits_s:
            self._over(host, host.asked)

    def _over(self, host: Host, end: End) -> None:
        """Nothing of the generation runs on the host any more."""
        generation = host.running
        assert generation is not None  # noqa: S101
        self.training.host_over(generation, host.record.host)
        host.running, host.asked, host.exits_s = None, None, inf
        told = end if end.host == host.record.host else host.record.end
        step = self.training.known_step()
        self._publish(host, replace(host.record, state=HostState.READY, ended=generation.number, committed_step=step, end=told))

    def _publish(self, host: Host, record: HostRecord) -> None:
        host.record, self._groups = record, None
        if record.host in self.hosts:
            self._changed[record.host] = host
            self.look(self.queue.now_s)

    def _fit_again(self, host: Host) -> None:
        if host.record.state is HostState.UNFIT and host.record.host in self.hosts:
            self._publish(host, replace(host.record, state=HostState.READY, reason=""))

    def _leave(self, host: Host, exit_code: int) -> None:
        """The launcher ends in an orderly way; after a run that was given up, or was waited for in vain, the last one too."""
        if self.on_machine.get(host.machine) is not host:
            return
        del self.on_machine[host.machine]
        gone = replace(host.record, state=HostState.GONE)
        self.known.observed[host.record.host] = HostObservation(gone, self.queue.now_s, True, self.queue.now_s, 0.0)
        self.network.gone[host.record.host] = self.queue.now_s
        self._forget(host)
        self.training.host_gone(host.record.host, saved=exit_code != EXIT_OK)
