"""Hosts decide only when something has changed, and one for all that are in the same position: the outcome is the same."""

from dataclasses import replace
from random import Random

import pytest

from elastictrain.config.composed import LaunchGroup
from elastictrain.launch.membership.records import GenerationOutcome
from elastictrain.simulate.faults import FaultKind, FleetFault
from elastictrain.simulate.run import Simulation
from elastictrain.simulate.scenario import Scenario

MANY = (FaultKind.NETWORK, FaultKind.ONE_WAY, FaultKind.STORAGE)


def history(seed: int, *, polled: bool) -> Simulation:
    """Eight faults of all kinds, some while the one before is not over."""
    chance, at_s, faults = Random(seed), 60.0, []
    for _ in range(8):
        kind = chance.choice([one for one in FaultKind if one is not FaultKind.COME])
        machines = chance.sample(range(5), chance.randint(1, 4) if kind in MANY else 1)
        faults.append(FleetFault(at_s, kind, tuple(machines), chance.uniform(1, 60)))
        at_s += chance.choice((chance.uniform(0.3, 12), chance.uniform(20, 90)))
    launch = LaunchGroup(
        min_hosts=chance.choice((1, 2, 3)),
        max_hosts=chance.choice((0, 3, 4)),
        wait_s=0.0,
        join_s=5.0,
        grow_after_s=5.0,
        grow_every_s=chance.choice((10.0, 40.0)),
        retry_unfit_s=60.0,
        max_failures=99,  # while a host is unfit, generations fail one after the other
    )
    scenario = Scenario(hosts=5, days=(at_s + 100) / 86_400, launch=launch, every_s=15.0, seed=seed)
    simulation = Simulation(scenario, iter(faults), turn_s=launch.poll_s, polled=polled)
    simulation.run()
    return simulation


@pytest.mark.parametrize("seed", range(8))
def test_generations_are_those_of_hosts_that_all_decide_all_the_time(seed: int) -> None:
    polled, fast = history(seed, polled=True), history(seed, polled=False)
    when = [list(zip(one.fleet.created_s, map(bare, one.fleet.generations), strict=True)) for one in (polled, fast)]
    assert when[1] == when[0]
    assert fast.training.totals == polled.training.totals
    assert fast.broken == polled.broken == []
    assert fast.fleet.decisions < polled.fleet.decisions / 3


def bare(generation: object) -> object:
    """Without sentences, which name hosts in the order in which they were seen."""
    return replace(generation, reason="", failures=())  # type: ignore[type-var]


def run(*faults: FleetFault, hosts: int = 4, hours: float = 1.0, **launch: object) -> Simulation:
    options = LaunchGroup(wait_s=0.0, join_s=5.0, **launch)  # type: ignore[arg-type]
    simulation = Simulation(Scenario(hosts=hosts, days=hours / 24, launch=options), iter(faults))
    simulation.run()
    return simulation


def sizes(simulation: Simulation) -> list[int]:
    return [len(generation.members) for generation in simulation.fleet.generations]


def test_a_lost_host_is_left_out_and_taken_in_again() -> None:
    simulation = run(FleetFault(600.0, FaultKind.HOST, (1,), 600.0))
    assert sizes(simulation) == [4, 3, 4]
    lost_s = simulation.fleet.created_s[1] - 600.0
    assert 4.0 < lost_s < 12.0


def test_spare_hosts_wait_beside_a_full_group_and_take_a_place_in_it() -> None:
    simulation = run(FleetFault(600.0, FaultKind.HOST, (1,)), hosts=5, max_hosts=4)
    assert sizes(simulation) == [4, 4]


def test_a_host_that_is_told_leaves_with_everything_saved() -> None:
    simulation = run(FleetFault(600.0, FaultKind.NOTICE, (1,)), min_hosts=3)
    assert sizes(simulation) == [4, 3]
    assert simulation.training.totals.lost_steps < 1


def test_below_its_least_number_of_hosts_a_run_stands_still() -> None:
    simulation = run(FleetFault(600.0, FaultKind.HOST, (1,), 1800.0), min_hosts=4)
    assert sizes(simulation) == [4, 4]
    assert 1800 < 3600 - simulation.training.totals.progress_s < 1900


def test_a_run_that_fails_again_and_again_is_given_up() -> None:
    deaths = [FleetFault(600.0 + 3 * number, FaultKind.WORKER, (0,)) for number in range(300)]
    simulation = run(*deaths, hosts=1, max_failures=1)
    assert simulation.fleet.generations[-1].outcome is GenerationOutcome.GIVE_UP
    assert simulation.given_up_s is not None
    assert "given up" in simulation.broken[0]
