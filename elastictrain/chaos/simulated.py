"""Plays plans of faults against the real modules in one process: no sockets, no processes, a simulated clock.

Who trains together is decided by the launchers' own code, in `simulate`; what they train is kept by the checkpoints' own code
over a store in memory. A history is one plan: a fleet of a few hosts, some dozen faults, and a while without any, after which
all must be well.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from elastictrain.chaos.invariants import ChaosFacts, Invariant, Violation, check
from elastictrain.chaos.plan import ChaosKind, FaultPlan, PlannedFault, seeded_plan
from elastictrain.chaos.shrink import Shrunk, shrink
from elastictrain.chaos.simulated_state import CheckedState, TrainedGroup
from elastictrain.config.composed import LaunchGroup
from elastictrain.data.ledger import Row
from elastictrain.errors import RunHeldError, StorageError
from elastictrain.launch.membership.records import Generation
from elastictrain.launch.membership.store import MembershipStore
from elastictrain.lease.chain import Chain
from elastictrain.lease.holder import Waiting, wait_until_free
from elastictrain.simulate.costs import RunCosts
from elastictrain.simulate.faults import FaultKind, FleetFault
from elastictrain.simulate.run import Simulation
from elastictrain.simulate.scenario import Scenario

FAULTS_OF_A_HISTORY = 50
EVERY_S = (2.0, 25.0)
_QUIET_S = 200.0
_HANG_S = 10.0
_KINDS = tuple(kind for kind in ChaosKind if kind is not ChaosKind.FLIP_GRADIENT)
"""A gradient is on a device, or in a rank's own memory: nothing here has one."""

_COSTS = RunCosts(
    step_s=1.0,
    recovery_s=1.0,
    restart_s=3.0,
    restore_s=1.0,
    save_stall_s=0.1,
    snapshot_every_s=5.0,
    snapshot_stall_s=0.0,
    stop_s=1.0,
)
_KILLED_AT = ("list", "open", "close", "write", "create", "read", "delete")


@dataclass(frozen=True, slots=True)
class BrokenHistory:
    plan: FaultPlan
    violations: Sequence[Violation]
    shrunk: Shrunk | None = None


@dataclass(slots=True)
class SimulatedResult:
    faults: int = 0
    histories: int = 0
    generations: int = 0
    commits: int = 0
    restores: int = 0
    broken: list[BrokenHistory] = field(default_factory=list)


def simulate_chaos(
    *,
    faults: int,
    seed: int,
    kinds: Sequence[ChaosKind] = _KINDS,
    stop_at_first: bool = True,
    shrink_tries: int = 100,
    told: Callable[[SimulatedResult], None] = lambda _: None,
) -> SimulatedResult:
    """So many faults, in as many histories as they need; `told` after each. A broken history is shrunk."""
    result, kinds = SimulatedResult(), [kind for kind in kinds if kind in _KINDS]
    for number in count():
        if result.faults >= faults or (result.broken and stop_at_first):
            return result
        left = min(FAULTS_OF_A_HISTORY, faults - result.faults)
        plan = plan_of(seed * 1_000_003 + number, faults=left, kinds=kinds)
        violations = play(plan, result)
        if violations:
            small = shrink(plan, lambda one: bool(play(one)), tries=shrink_tries) if shrink_tries else None
            result.broken.append(BrokenHistory(plan, violations, small))
        told(result)
    return result


def plan_of(seed: int, *, faults: int, kinds: Sequence[ChaosKind] = _KINDS) -> FaultPlan:
    chance = Random(seed)
    return seeded_plan(
        seed, hosts=chance.choice((2, 3, 3, 4)), workers=chance.choice((1, 1, 2)), count=faults, kinds=kinds, every_s=EVERY_S
    )


def play(plan: FaultPlan, result: SimulatedResult | None = None) -> list[Violation]:
    """One history; adds what it counts to `result`."""
    with TemporaryDirectory(prefix="chaos-", dir="/dev/shm") as folder, _quiet():
        history = _History(plan, Path(folder))
        history.run()
    if result is not None:
        result.faults += len(plan.faults)
        result.histories += 1
        result.generations += len(history.simulation.fleet.generations)
        result.commits += len(history.state.commits)
        result.restores += len(history.state.resumes)
    return history.violations()


@contextmanager
def _quiet() -> Iterator[None]:
    """What goes wrong on purpose is no news."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


class _History:
    def __init__(self, plan: FaultPlan, folder: Path) -> None:
        self.plan = plan
        self._machines = {name: number for number, name in enumerate(plan.hosts)}
        until_s = max((fault.at_s or 0.0) + fault.lasts_s for fault in plan.faults) if plan.faults else 0.0
        self.state = CheckedState(folder, seed=plan.seed, workers=plan.workers, now_s=lambda: self.simulation.queue.now_s)
        self._membership = MembershipStore(self.state.store)
        scenario = Scenario(
            hosts=len(plan.hosts),
            days=(until_s + _QUIET_S) / 86_400,
            launch=LaunchGroup(wait_s=0.0, max_failures=10**6, backoff_s=0.0),
            costs=_COSTS,
            every_s=12.0,
            processes=plan.workers,
            notice_s=10.0,
            seed=plan.seed,
        )
        self._chance = Random(f"{plan.seed} history")
        self.simulation = Simulation(scenario, iter(self._fleet_faults()), state=self.state, create=self._create)
        for fault in plan.faults:
            self.simulation.queue.at(fault.at_s or 0.0, partial(self._strike, fault))

    def run(self) -> None:
        self.simulation.run(unless=lambda: self.state.over)

    def violations(self) -> list[Violation]:
        state = self.state
        told = [Violation(Invariant.GOES_ON, problem) for problem in self.simulation.broken] if not state.over else []
        reference, losses, ledger = (
            TrainedGroup(1, world_size=1, first_step=0, value=0, seed=self.plan.seed),
            dict[int, float](),
            list[Row](),
        )
        reference.train_to(max(state.losses, default=0), losses=losses, ledger=ledger)
        facts = ChaosFacts(
            losses=state.losses,
            undisturbed=losses,
            ledger=state.ledger,
            undisturbed_ledger=ledger,
            commits=state.commits,
            resumes=state.resumes,
            damaged=state.damaged,
        )
        return [*state.violations, *told, *check(facts)]

    def _create(self, generation: Generation) -> bool:
        try:
            return self._membership.create(generation)
        except StorageError:
            return False

    def _fleet_faults(self) -> list[FleetFault]:
        found = [one for fault in self.plan.faults for one in self._of_fleet(fault)]
        return sorted(found, key=lambda one: one.at_s)

    def _of_fleet(self, fault: PlannedFault) -> Iterator[FleetFault]:
        """What it does to hosts and the network between them."""
        at_s, lasts_s, everyone = fault.at_s or 0.0, fault.lasts_s, tuple(self._machines.values())
        first = self._machines.get(fault.host, 0)
        one = (first,)
        match fault.kind:
            case ChaosKind.KILL_WORKER:
                yield FleetFault(at_s, FaultKind.WORKER, one)
            case ChaosKind.HANG:
                yield FleetFault(at_s + _HANG_S, FaultKind.WORKER, one)
            case ChaosKind.KILL_LAUNCHER:
                yield FleetFault(at_s, FaultKind.HOST, one, 2.0)
            case ChaosKind.HOST_LOST:
                yield FleetFault(at_s, FaultKind.HOST, one, lasts_s)
            case ChaosKind.LEAVE:
                yield FleetFault(at_s, FaultKind.NOTICE, one, lasts_s)
            case ChaosKind.FREEZE | ChaosKind.CABLE:
                yield FleetFault(at_s, FaultKind.NETWORK, one, lasts_s)
                yield FleetFault(at_s, FaultKind.STORAGE, one, lasts_s)
            case ChaosKind.ONE_WAY:
                yield FleetFault(at_s, FaultKind.ONE_WAY, one, lasts_s)
            case ChaosKind.PARTITION:
                inside = tuple((first + number) % len(everyone) for number in range(int(fault.amount)))
                yield FleetFault(at_s, FaultKind.NETWORK, inside, lasts_s)
            case ChaosKind.BLIP:
                for machine in everyone[1:]:
                    yield FleetFault(at_s, FaultKind.NETWORK, (machine,), lasts_s)
            case ChaosKind.STORE_AWAY:
                yield FleetFault(at_s, FaultKind.STORAGE, everyone, lasts_s)
            case _:
                pass

    def _strike(self, fault: PlannedFault) -> None:
        """What it does to storage, to memory and to the processes of a host."""
        state, machine = self.state, self._machines.get(fault.host, 0)
        faults, ends_s = state.faults, self.simulation.queue.now_s + fault.lasts_s
        match fault.kind:
            case ChaosKind.KILL_LAUNCHER:
                state.keeps_memory.add(machine)
            case ChaosKind.HANG:
                self._hang()
            case ChaosKind.KILL_SAVER:
                faults.kill_at = self._chance.choice(_KILLED_AT)
                state.kill_saver(machine)
            case ChaosKind.STORE_503:
                self._meanwhile("refused", fault.amount, 0.0, ends_s)
            case ChaosKind.STORE_AWAY:
                self._meanwhile("away", True, False, ends_s)
            case ChaosKind.FULL_DISK:
                self._meanwhile("full", True, False, ends_s)
            case ChaosKind.STORE_SLOW | ChaosKind.SLOW_DISK:
                state.save_s = 6.0 + 10 * fault.amount
                self.simulation.queue.at(ends_s, lambda: setattr(state, "save_s", 6.0))
            case ChaosKind.CLOCK:
                state.clock_off[machine] = fault.amount
            case ChaosKind.FLIP_SNAPSHOT | ChaosKind.FLIP_REPLICA:
                kind = "own" if fault.kind is ChaosKind.FLIP_SNAPSHOT else "replica"
                faults.flips.append((kind, machine, fault.worker, fault.amount))
            case ChaosKind.FLIP_SHARD:
                state.damage_newest(self._chance.randrange(100), fault.amount)
            case ChaosKind.WRONG_VERSION:
                self._start_another_run()
            case _:
                pass

    def _hang(self) -> None:
        for group in self.simulation.training.groups.values():
            self.simulation.training.count()
            group.stalled_until_s = self.simulation.queue.now_s + _HANG_S

    def _meanwhile(self, name: str, wrong: object, right: object, ends_s: float) -> None:
        setattr(self.state.faults, name, wrong)
        self.simulation.queue.at(ends_s, lambda: setattr(self.state.faults, name, right))

    def _start_another_run(self) -> None:
        """Another launcher, of whatever release, starts in the same folder: it must find that the run is held."""
        chain, clock, beats = Chain(self.state.store), count(), count(1)
        fleet = self.simulation.fleet
        newest = fleet.known.newest
        members = [] if newest is None else [one.host for one in newest.members if one.host in fleet.hosts]
        if not members or newest is None or newest.terminal:
            return

        def sleep(_: float) -> None:
            beat = next(beats)
            for host in members:
                chain.write_sign(host, beat=beat, gone=False, writers=())

        try:
            sleep(0.0)
            wait_until_free(
                chain,
                "another",
                Waiting("stop", self.state.store.url, lambda _: None, clock=lambda: float(next(clock)), sleep=sleep),
            )
        except (RunHeldError, StorageError):
            return
        self.state.violations.append(Violation(Invariant.ONE_COMMITTER, f"another run takes over from {members} that live"))
