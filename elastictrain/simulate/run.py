"""One simulated run: a fleet, what happens to it, what that costs, and what must hold all along."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from random import Random

from elastictrain.errors import EXIT_TRANSPORT
from elastictrain.launch.membership.decide import decide
from elastictrain.launch.membership.records import EndKind, GenerationOutcome, HostState
from elastictrain.lease.chain import BEAT_S
from elastictrain.simulate.faults import FaultKind, FleetFault
from elastictrain.simulate.fleet import TURN_S, CreateGeneration, Decide, Fleet, Host
from elastictrain.simulate.network import Network, Outage
from elastictrain.simulate.queue import EventQueue
from elastictrain.simulate.scenario import Scenario
from elastictrain.simulate.state import TrainedState
from elastictrain.simulate.training import Totals, Training

_GOES_ON_S = 30.0  # within which the largest connected set trains again, beside what a start takes
_MOST_TOLD = 5


@dataclass(slots=True)
class Result:
    """`goodput`: time that hosts spent on new steps, as a share of that of all of them, as a report counts it; `efficiency`:
    as a share of the time for which hosts were there."""

    hours: float
    goodput: float
    efficiency: float
    host_hours: float
    cost: float
    requests: dict[str, int]  # of storage
    generations: int
    decisions: int
    faults: dict[str, int]
    given_up_h: float | None
    broken: list[str]  # what did not hold
    totals: Totals

    @property
    def idle_hours(self) -> float:
        """In which no step was done that nobody had done before."""
        return self.hours - self.totals.progress_s / 3600


class Simulation:
    def __init__(
        self,
        scenario: Scenario,
        faults: Iterator[FleetFault],
        *,
        turn_s: float = TURN_S,
        polled: bool = False,
        decide_by: Decide = decide,
        state: TrainedState | None = None,
        create: CreateGeneration | None = None,
    ) -> None:
        """`state` and `create`: see `Training` and `Fleet`."""
        self.scenario, self.queue, launch = scenario, EventQueue(), scenario.launch
        self.network = Network(self.queue, launch.lost_s)
        self.training = Training(self.queue, self.network, scenario, state=state)
        self.fleet = Fleet(self.queue, self.training, launch, turn_s=turn_s, polled=polled, decide_by=decide_by, create=create)
        self.training.checks_fail = lambda host: self.fleet.worker_dies(self.network.machine[host], exit_code=EXIT_TRANSPORT)
        self.broken: list[str] = []
        self.given_up_s: float | None = None
        self._faults, self._random = faults, Random(scenario.seed)
        self._counts = dict.fromkeys(FaultKind, 0)
        self._host_s = self._cost = self._reads = self._writes = self._counted_s = 0.0
        self._changed_s = 0.0  # last time that hosts came, went, or were parted
        self._price = 0.0
        for at_s, price in scenario.prices:
            self.queue.at(at_s, partial(setattr, self, "_price", price))

    def run(self, *, unless: Callable[[], bool] = lambda: False) -> Result:
        """All of it, or until the run is given up, or `unless` is true."""
        until_s = self.scenario.days * 86_400
        for machine in range(self.scenario.hosts):
            self.fleet.start(machine)
        self._next_fault()
        while self.given_up_s is None and not unless() and self.queue.next_s() <= until_s:
            self._count(self.queue.next_s())
            self.queue.run_next()
            self._check()
        if self.given_up_s is None:
            self._count(until_s)
            self.queue.now_s = until_s
        self.training.count()
        return self._result(until_s)

    def _next_fault(self) -> None:
        if (fault := next(self._faults, None)) is not None:
            self.queue.at(fault.at_s, partial(self._strike_and_go_on, fault))

    def _strike_and_go_on(self, fault: FleetFault) -> None:
        self._next_fault()
        self.strike(fault)

    def strike(self, fault: FleetFault) -> None:
        """It happens now."""
        self._hosts_change()
        fleet, now_s = self.fleet, self.queue.now_s
        there = [machine for machine in fault.machines if machine in fleet.on_machine]
        self._counts[fault.kind] += bool(there) or not fault.machines or fault.kind is FaultKind.COME
        match fault.kind:
            case FaultKind.WORKER:
                for machine in there:
                    fleet.worker_dies(machine)
            case FaultKind.LAUNCHER:
                self._kill_launchers(there, back_s=now_s + fault.lasts_s)
            case FaultKind.HANG:
                self._hang(there, until_s=now_s + fault.lasts_s)
            case FaultKind.UNFIT:
                self.training.unfit.update(there)
                self.queue.at(now_s + fault.lasts_s, lambda: self.training.unfit.difference_update(there))
            case FaultKind.HOST:
                for machine in there:
                    self._take_away(machine, back_s=now_s + fault.lasts_s)
            case FaultKind.NOTICE:
                for machine in there:
                    fleet.notice(machine)
                    gone_s = now_s + self.scenario.notice_s
                    told = fleet.on_machine[machine]
                    self.queue.at(gone_s, partial(self._take_away, machine, back_s=gone_s + fault.lasts_s, told=told))
            case FaultKind.COME:
                self._come(*fault.machines)
            case FaultKind.NETWORK | FaultKind.ONE_WAY:
                self._part(fault, frozenset(fault.machines))
            case _:
                self._strike_storage(fault, there)

    def _strike_storage(self, fault: FleetFault, there: Sequence[int]) -> None:
        until_s = self.queue.now_s + fault.lasts_s
        if fault.kind is FaultKind.SAVES:
            self.training.refuse_saves(until_s=until_s)
        elif fault.kind is FaultKind.SHARD:
            self.training.state.damage_newest()
        else:
            self._reach_storage(there, reach=False)
            self.queue.at(until_s, lambda: self._reach_storage(there, reach=True))

    def _hang(self, machines: Sequence[int], *, until_s: float) -> None:
        """Nobody trains until the workers that hang are killed for that."""
        self.training.stall(until_s=until_s)
        for machine in machines:
            self.queue.at(until_s, partial(self.fleet.worker_dies, machine, exit_code=EXIT_TRANSPORT, hung=True))

    def _kill_launchers(self, machines: Sequence[int], *, back_s: float) -> None:
        """Connections to them break at once."""
        lost = {self.fleet.on_machine[machine].record.host for machine in machines}
        for group in list(self.training.groups.values()):
            if not group.over and not lost.isdisjoint(group.at_work):
                for host in [host for host in group.hosts if host not in lost]:
                    self.fleet.worker_dies(self.network.machine[host], exit_code=EXIT_TRANSPORT)
        for machine in machines:
            self.fleet.lose(machine)
            self.queue.at(back_s, partial(self.fleet.start, machine, follows=True))

    def _reach_storage(self, machines: Sequence[int], *, reach: bool) -> None:
        self._hosts_change()
        for machine in machines:
            self.fleet.cut(machine, cut=not reach)

    def _take_away(self, machine: int, *, back_s: float, told: Host | None = None) -> None:
        """`told`: the host that has had a notice; a later one on the same machine stays."""
        if told is not None and self.fleet.on_machine.get(machine, told) is not told:
            return
        self._hosts_change()
        self.fleet.lose(machine)
        if back_s < inf:
            self.queue.at(back_s, lambda: self._come(machine))

    def _come(self, *machines: int) -> None:
        self._hosts_change()
        for machine in machines:
            self.fleet.start(machine)

    def _part(self, fault: FleetFault, inside: frozenset[int]) -> None:
        outage = Outage(inside, self.queue.now_s, fault.kind is FaultKind.ONE_WAY)
        self.network.outages.append(outage)
        self.network.change(delayed=True)
        self.training.update()
        self.fleet.look_later()
        self.queue.at(self.queue.now_s + fault.lasts_s, lambda: self._heal(outage))
        if self._random.random() < self.scenario.breaks:
            self.queue.at(self.queue.now_s + self._random.uniform(0.5, self.scenario.launch.lost_s), self._break_connections)

    def _break_connections(self) -> None:
        """Workers of a group that the network parts end by themselves."""
        for group in list(self.training.groups.values()):
            if group.begun and not group.over and not self.network.connected(group.at_work):
                for host in group.hosts:
                    self.fleet.worker_dies(self.network.machine[host], exit_code=EXIT_TRANSPORT)

    def _heal(self, outage: Outage) -> None:
        self.network.outages.remove(outage)
        self._hosts_change()
        self.network.change(delayed=False)
        self.training.update()
        self.fleet.look_later()

    # What must hold.

    def _check(self) -> None:
        newest = self.fleet.generations[-1] if self.fleet.generations else None
        if newest is not None and newest.outcome is GenerationOutcome.GIVE_UP and self.given_up_s is None:
            self.given_up_s = self.queue.now_s
            self._tell(f"the run is given up: {newest.reason.splitlines()[0]}")
        for number in self.training.overtaken:
            self._tell(f"two groups commit at once: generation {number} beside {self.fleet.generations[-1].number}")
        self.training.overtaken.clear()

    def _tell(self, problem: str) -> None:
        if len(self.broken) < _MOST_TOLD:
            self.broken.append(f"{self.queue.now_s / 3600:.3f} h: {problem}")

    def _hosts_change(self) -> None:
        """Something happens to hosts: after a while without more of it, the largest set of connected hosts must train."""
        changed_s = self._changed_s = self.queue.now_s
        costs = self.scenario.costs
        limit_s = _GOES_ON_S + 3 * costs.restart_s + costs.restore_s + costs.stop_s

        def check() -> None:
            if self._changed_s == changed_s:
                self._check_training(changed_s, limit_s)

        self.queue.at(changed_s + limit_s, check)

    def _check_training(self, changed_s: float, limit_s: float) -> None:
        launch, newest = self.scenario.launch, self.fleet.generations[-1] if self.fleet.generations else None
        if newest is None:
            return
        largest = self._largest()
        group = self.training.groups.get(newest.number)
        if self.queue.now_s < self.training.waited_s + limit_s:
            self._hosts_change()
            return
        trains = group is not None and group.running
        created_s = self.fleet.created_s[-1]
        if any(host.memory and newest.has(name) for name, host in self.fleet.hosts.items()):
            # It may not know of its generation; the others wait for it.
            return
        grown = [end.generation for host in self.fleet.hosts.values() if (end := host.record.end) and end.kind is EndKind.GROW]
        grows = max(grown, default=0) >= newest.number - 1 and self.queue.now_s - created_s < limit_s
        if largest < launch.min_hosts or grows or self.queue.now_s < created_s + newest.pause_s:
            return
        wanted = min(largest, launch.max_hosts or largest)
        if not trains:
            self._tell(f"{largest} hosts hear each other, and do not train: generation {newest.number}")
        elif created_s > changed_s + launch.lost_s and len(newest.members) < wanted:
            self._tell(f"{len(newest.members)} hosts train where {wanted} could: generation {newest.number}")

    def _largest(self) -> int:
        """How many hosts hear each other, at most; with one-way outages no more than that."""
        sides: dict[tuple[bool, ...], int] = {}
        for host in self.fleet.hosts.values():
            if host.record.state is not HostState.UNFIT and host.memory is None and not host.leaving:
                side = self.network.side(host.machine)
                sides[side] = sides.get(side, 0) + 1
        return max(sides.values(), default=0)

    # What it costs.

    def _count(self, until_s: float) -> None:
        """Hosts and requests until the next event: nothing changes before it."""
        seconds, self._counted_s = until_s - self._counted_s, until_s
        if seconds <= 0:
            return
        launch, there = self.scenario.launch, len(self.fleet.on_machine)
        newest = self.fleet.known.newest
        train = len(newest.members) if newest is not None and self.training.groups.get(newest.number) else 0
        wait = max(0, there - train)
        self._host_s += there * seconds
        self._cost += there * seconds / 3600 * self._price
        # Each host looks for a generation; the first of a group and those that wait read all records.
        self._reads += seconds / launch.poll_s * (there + (wait + bool(train)) * (there + 1))
        self._writes += seconds * (train / min(launch.lost_s / 2, BEAT_S) + wait / launch.poll_s)

    def _result(self, until_s: float) -> Result:
        totals, scenario = self.training.totals, self.scenario
        useful_s = totals.useful_s
        return Result(
            hours=until_s / 3600,
            goodput=useful_s / until_s,
            efficiency=useful_s * scenario.full_hosts / self._host_s if self._host_s else 0.0,
            host_hours=self._host_s / 3600,
            cost=self._cost,
            requests={
                "reads": int(self._reads),
                "writes": totals.writes + int(self._writes),
                "deletes": totals.deletes,
            },
            generations=len(self.fleet.generations),
            decisions=self.fleet.decisions,
            faults={kind.value: number for kind, number in self._counts.items() if number},
            given_up_h=None if self.given_up_s is None else self.given_up_s / 3600,
            broken=self.broken,
            totals=totals,
        )
