"""The simulator of fleets: it forms the groups of the exact little simulation here, and finds decisions that are wrong."""

from itertools import groupby
from random import Random

import pytest

from elastictrain.config.composed import LaunchGroup
from elastictrain.launch.membership import observation, policy, proposal
from elastictrain.launch.membership.decide import decide
from elastictrain.launch.membership.observation import ClusterState
from elastictrain.launch.membership.records import Decision, End, Generation, HostRecord, Wait
from elastictrain.simulate.costs import RunCosts
from elastictrain.simulate.faults import FaultKind, FleetFault
from elastictrain.simulate.fleet import Decide
from elastictrain.simulate.run import Result, Simulation
from elastictrain.simulate.scenario import Scenario
from tests.integration.simulated.faults import options
from tests.integration.simulated.launcher import Clock
from tests.integration.simulated.world import World

NAMES = "abcd"
QUICK = RunCosts(recovery_s=0.5, restart_s=1.0, restore_s=1.0, stop_s=0.5, snapshot_every_s=3.0)


def plan(seed: int) -> list[FleetFault]:
    """Faults far apart, each over before the next one."""
    chance, faults = Random(seed), []
    for number in range(6):
        kind = chance.choice((FaultKind.WORKER, FaultKind.HOST, FaultKind.NOTICE, FaultKind.NETWORK))
        faults.append(FleetFault(100.0 + 100 * number, kind, (chance.randrange(4),), 40.0))
    return faults


def groups_of_the_world(faults: list[FleetFault], launch: LaunchGroup) -> list[str]:
    world = World(NAMES, seed=3, options=launch)
    world.clocks = dict.fromkeys(NAMES, Clock(0.0, 1.0))
    for launcher in world.all.values():
        launcher.clock = Clock(0.0, 1.0)
    back = {fault.at_s + fault.lasts_s + 30 * (fault.kind is FaultKind.NOTICE): NAMES[fault.machines[0]] for fault in faults}
    struck = {fault.at_s: fault for fault in faults}
    while world.now_s < 750:
        world.tick()
        if name := back.get(world.now_s):
            world.unheard = set()
            world.start(name)
        if fault := struck.get(world.now_s):
            name = NAMES[fault.machines[0]]
            match fault.kind:
                case FaultKind.WORKER:
                    world.launchers[name].workers_end(137, now_s=world.now_s)
                case FaultKind.HOST:
                    world.kill(name, silently=True)
                case FaultKind.NOTICE:
                    world.launchers[name].wants_to_leave = True
                case FaultKind.NETWORK:
                    world.unheard = {frozenset((name, other)) for other in NAMES if other != name}
    newest = [versions[0][1] for _, versions in sorted(world.storage.generations.rows.items())]
    return ["".join(sorted(member.name for member in one.members)) for one in newest]


def groups_of_the_fleet(faults: list[FleetFault], launch: LaunchGroup) -> list[str]:
    simulation = Simulation(Scenario(hosts=4, days=750 / 86_400, launch=launch, costs=QUICK), iter(faults), turn_s=1.0)
    simulation.run()
    return ["".join(sorted(NAMES[int(one.name[1:])] for one in each.members)) for each in simulation.fleet.generations]


@pytest.mark.parametrize("seed", range(5))
def test_groups_are_those_of_the_exact_simulation(seed: int) -> None:
    """After some faults it starts the same hosts once more than the other: there connections break by chance."""
    faults, launch = plan(seed), options()
    exact, fast = groups_of_the_world(faults, launch), groups_of_the_fleet(faults, launch)
    assert [group for group, _ in groupby(fast)] == [group for group, _ in groupby(exact)]


def partitions(seed: int, *, blips: bool) -> list[FleetFault]:
    """Outages of the network and of storage, one after the other or several at once."""
    chance, at_s, faults = Random(seed), 60.0, []
    for _ in range(10):
        lasts_s = chance.choice((chance.uniform(0.3, 2.5) if blips else chance.uniform(50, 90), chance.uniform(2, 14)))
        kind = chance.choice((FaultKind.NETWORK, FaultKind.NETWORK, FaultKind.ONE_WAY, FaultKind.STORAGE))
        faults.append(FleetFault(at_s, kind, tuple(chance.sample(range(4), chance.randint(1, 3))), lasts_s))
        at_s += chance.choice((chance.uniform(1, 12), lasts_s + chance.uniform(0, 60)))
    return faults


def simulated(faults: list[FleetFault], *, seed: int = 0, decide_by: Decide = decide) -> Result:
    launch = LaunchGroup(min_hosts=1 + seed % 3, wait_s=0.0)
    scenario = Scenario(hosts=4, days=(faults[-1].at_s + 300) / 86_400, launch=launch, costs=QUICK, every_s=10.0, seed=seed)
    return Simulation(scenario, iter(faults), decide_by=decide_by).run()


def finds() -> list[str]:
    """What does not hold in the first of many histories in which something does not."""
    for seed in range(80):
        if broken := simulated(partitions(seed, blips=seed % 2 == 1), seed=seed).broken:
            return broken
    return []


def test_partitions_break_nothing() -> None:
    assert finds() == []


def unconditionally(ready: list[HostRecord], cluster: ClusterState) -> list[HostRecord]:
    return ready


def test_it_finds_groups_across_a_partition(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proposal, "largest_group", unconditionally)
    assert "do not train" in finds()[0]


def test_it_finds_links_that_are_looked_at_from_one_side(monkeypatch: pytest.MonkeyPatch) -> None:
    real = observation.connections
    monkeypatch.setattr(observation, "connections", lambda cluster: {cluster.me.host: real(cluster)[cluster.me.host]})
    assert finds()


def test_it_finds_outages_that_count_as_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "_harmless_reason", lambda *given, **others: None)
    assert "given up" in finds()[0]


def test_it_finds_failures_that_a_committed_step_does_not_clear(monkeypatch: pytest.MonkeyPatch) -> None:
    real = proposal.judge

    def judge(generation: Generation, ends: dict[str, End], launch: LaunchGroup, **others: object) -> Generation:
        return real(generation, ends, launch, **{**others, "committed_step": 0})  # type: ignore[arg-type]

    monkeypatch.setattr(proposal, "judge", judge)
    assert "given up" in finds()[0]


def test_it_finds_members_whose_silence_is_not_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastictrain.launch.membership.decide.missing_member", lambda *given: None)
    assert "do not train" in finds()[0]


def deaf(cluster: ClusterState, launch: LaunchGroup) -> Decision:
    """Does not stop what is not the newest generation any more."""
    if cluster.running is not None and cluster.newest is not None and cluster.newest.number > cluster.running.number:
        return Wait()
    return decide(cluster, launch)


@pytest.mark.parametrize(("decide_by", "problems"), [(decide, []), (deaf, ["two groups commit"])])
def test_it_finds_two_groups_that_commit(decide_by: Decide, problems: list[str]) -> None:
    """While the group of three does not reach storage the fourth host, which waits beside them, takes over."""
    apart = FleetFault(60.0, FaultKind.NETWORK, (3,), 200.0)
    result = simulated([apart, FleetFault(90.0, FaultKind.STORAGE, (0, 1, 2), 60.0)], decide_by=decide_by)
    assert [problem for problem in problems if problem in " ".join(result.broken)] == problems
    assert bool(result.broken) == bool(problems)
