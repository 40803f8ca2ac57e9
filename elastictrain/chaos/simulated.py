"""Plays plans of faults against the real modules in one process: no sockets, no processes, a simulated clock.

Who trains together is decided by the launchers' own code, in `simulate`; what they train is kept by the checkpoints' own code
over a store in memory. A history is one plan: a fleet of a few hosts, some dozen faults, and a while without any, after which
all must be well.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import torch

from elastictrain.chaos.fleet_faults import ON_HOST, fleet_faults
from elastictrain.chaos.invariants import ChaosFacts, Invariant, Violation, check
from elastictrain.chaos.plan import TRAITS, ChaosKind, FaultPlan, PlannedFault, seeded_plan
from elastictrain.chaos.shrink import Shrunk, shrink
from elastictrain.chaos.simulated_group import TrainedGroup, machine_of
from elastictrain.chaos.simulated_state import CheckedState, SimulatedFaults
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
_TOLD_EVERY = 20  # histories
_LAST = 999_999  # generation of the last start
_LONGER = 3.0  # times as long, so that others take over meanwhile
KINDS = tuple(kind for kind in ChaosKind if kind is not ChaosKind.FLIP_GRADIENT)
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
# Impatient launchers, so that much happens in little time.
_LAUNCH = LaunchGroup(wait_s=0.0, join_s=5.0, grow_after_s=3.0, grow_every_s=10.0, max_failures=10**6, backoff_s=0.0)
_KILLED_AT = ("list", "open", "close", "write", "create", "read", "delete")


_LASTS_S = {ChaosKind.KILL_LAUNCHER: 2.0, ChaosKind.HANG: 10.0}
# Here it leads to storage, too, and what is flipped in memory is read later.
_ON_HOST = dict(ON_HOST) | {
    ChaosKind.KILL_LAUNCHER: (FaultKind.HOST,),
    ChaosKind.CABLE: (FaultKind.NETWORK, FaultKind.STORAGE),
    ChaosKind.LEAVE: (FaultKind.NOTICE,),
    ChaosKind.ONE_WAY: (FaultKind.ONE_WAY,),
    **dict.fromkeys((ChaosKind.FLIP_SNAPSHOT, ChaosKind.FLIP_REPLICA), ()),
}


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
    kinds: Sequence[ChaosKind] = KINDS,
    stop_at_first: bool = True,
    shrink_tries: int = 100,
    per_history: int = FAULTS_OF_A_HISTORY,
    told: Callable[[SimulatedResult], None] = lambda _: None,
) -> SimulatedResult:
    """So many faults, in as many histories as they need; `told` after each. A broken history is shrunk."""
    result, kinds = SimulatedResult(), [kind for kind in kinds if kind in KINDS]
    for number in count():
        if result.faults >= faults or (result.broken and stop_at_first):
            return result
        left = min(per_history, faults - result.faults)
        plan = plan_of(seed * 1_000_003 + number, faults=left, kinds=kinds)
        violations = play(plan, result)
        if violations:
            small = shrink(plan, lambda one: bool(play(one)), tries=shrink_tries) if shrink_tries else None
            result.broken.append(BrokenHistory(plan, violations, small))
        told(result)
    return result


def run_simulated(*, faults: int, seed: int, kinds: Sequence[ChaosKind], tell: Callable[[str], None]) -> FaultPlan | None:
    """What `--simulated` does: tells what it finds, and returns the shortest plan that fails; None if all held."""
    began_s = time.monotonic()
    torch.set_num_threads(1)  # the tensors are small

    def progress(result: SimulatedResult) -> None:
        if result.histories % _TOLD_EVERY == 0:
            tell(f"{result.faults} faults in {time.monotonic() - began_s:.0f} s, {len(result.broken)} broken histories")

    result = simulate_chaos(faults=faults, seed=seed, kinds=kinds, told=progress)
    counts = f"{result.generations} generations, {result.commits} commits, {result.restores} restores"
    tell(f"{result.faults} faults in {result.histories} histories, {time.monotonic() - began_s:.0f} s: {counts}")
    plans = [one.shrunk.plan if one.shrunk is not None else one.plan for one in result.broken]
    for plan, broken in zip(plans, result.broken, strict=True):
        tell("\n".join([*(f"BROKEN {one}" for one in broken.violations), "by these faults:", *map(str, plan.faults)]))
    return min(plans, key=lambda one: len(one.faults), default=None)


def plan_of(seed: int, *, faults: int, kinds: Sequence[ChaosKind] = KINDS) -> FaultPlan:
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


def _is_long(fault: PlannedFault) -> bool:
    """A long partition cuts hosts off storage, too. A long outage of storage is one after which all hosts start again, and the
    disk with the checkpoints is mounted late."""
    least, most = TRAITS[fault.kind].lasts_s
    return fault.lasts_s > (least + most) / 2


class _History:
    def __init__(self, plan: FaultPlan, folder: Path) -> None:
        self.plan = plan
        self._machines = {name: number for number, name in enumerate(plan.hosts)}
        until_s = max((fault.at_s or 0.0) + _LONGER * fault.lasts_s for fault in plan.faults) if plan.faults else 0.0
        self.state = CheckedState(folder, seed=plan.seed, workers=plan.workers, now_s=lambda: self.simulation.queue.now_s)
        self._membership = MembershipStore(self.state.store)
        # With fewer than there are the others are spare.
        max_hosts = max(1, len(plan.hosts) - 1) if plan.seed % 2 else 0
        scenario = Scenario(
            hosts=len(plan.hosts),
            days=(until_s + _QUIET_S) / 86_400,
            launch=replace(_LAUNCH, max_hosts=max_hosts),
            costs=_COSTS,
            every_s=15.0,
            processes=plan.workers,
            notice_s=10.0,
            seed=plan.seed,
        )
        self._chance = Random(f"{plan.seed} history")
        self.simulation = Simulation(scenario, iter(()), state=self.state, create=self._create)
        for fault in plan.faults:
            self.simulation.queue.at(fault.at_s or 0.0, partial(self._strike, fault))

    def run(self) -> None:
        """All of it; then a start that has storage alone, which must find the newest checkpoint."""
        state = self.state
        self.simulation.run(unless=lambda: state.over)
        if not state.over and state.restore(_LAST, [f"h{len(self._machines):05d}.1"]) is None:
            state.violations.append(Violation(Invariant.NEWEST_KEPT, "a last start restores nothing"))

    def violations(self) -> list[Violation]:
        """Compares with one undisturbed rank. If no checkpoint could be restored, `simulation.broken` does not count."""
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

    def _of_fleet(self, fault: PlannedFault) -> Iterator[FleetFault]:
        """What it does to hosts and the network between them."""
        now_s, lasts_s, first = self.simulation.queue.now_s, fault.lasts_s, self._machines.get(fault.host, 0)
        everyone = tuple(self._machines.values())
        if fault.kind in _ON_HOST:
            for kind in _ON_HOST[fault.kind]:
                yield FleetFault(now_s, kind, (first,), lasts_s or _LASTS_S.get(fault.kind, 0.0))
        elif fault.kind is ChaosKind.PARTITION:
            inside = tuple((first + number) % len(everyone) for number in range(int(fault.amount)))
            if _is_long(fault):
                # Of those that train, while spare hosts see storage.
                inside = tuple(self._machines_at_work()) or inside
                yield FleetFault(now_s, FaultKind.STORAGE, inside, _LONGER * lasts_s)
            yield FleetFault(now_s, FaultKind.NETWORK, inside, _LONGER * lasts_s)
        elif fault.kind is ChaosKind.BLIP:
            yield from fleet_faults(fault, at_s=now_s, hosts=self.plan.hosts)
        elif fault.kind is ChaosKind.STORE_AWAY:
            long = _is_long(fault)
            yield FleetFault(now_s, FaultKind.HOST if long else FaultKind.STORAGE, everyone, 1.0 if long else lasts_s)

    def _machines_at_work(self) -> list[int]:
        newest = self.simulation.fleet.known.newest
        return [] if newest is None else [machine_of(member.host) for member in newest.members]

    def _strike(self, fault: PlannedFault) -> None:
        """What it does to storage, to memory and to the processes of a host."""
        state, machine = self.state, self._machines.get(fault.host, 0)
        faults = state.faults
        if fault.kind is ChaosKind.KILL_LAUNCHER:
            state.keeps_memory.add(machine)
        for one in self._of_fleet(fault):
            self.simulation.strike(one)
        match fault.kind:
            case ChaosKind.KILL_SAVER:
                faults.kill_at = self._chance.choice(_KILLED_AT)
                state.kill_saver(machine)
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
                self._strike_store(fault)

    def _strike_store(self, fault: PlannedFault) -> None:
        state, ends_s = self.state, self.simulation.queue.now_s + fault.lasts_s
        match fault.kind:
            case ChaosKind.STORE_AWAY if _is_long(fault):
                state.hide()
                self.simulation.queue.at(self.simulation.queue.now_s + _LONGER * fault.lasts_s, state.show)
            case ChaosKind.STORE_AWAY:
                self._meanwhile(state.faults, "away", True, ends_s)
            case ChaosKind.STORE_503:
                self._meanwhile(state.faults, "refused", fault.amount, ends_s)
            case ChaosKind.FULL_DISK:
                self._meanwhile(state.faults, "full", True, ends_s)
            case ChaosKind.STORE_SLOW | ChaosKind.SLOW_DISK:
                self._meanwhile(state, "slower_s", 10 * fault.amount, ends_s)
            case _:
                pass

    def _meanwhile(self, of: CheckedState | SimulatedFaults, name: str, value: object, ends_s: float) -> None:
        """Until then; of two at once the first that ends is the end of both."""
        setattr(of, name, value)
        self.simulation.queue.at(ends_s, lambda: setattr(of, name, type(value)()))

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
