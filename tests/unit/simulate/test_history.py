"""Faults that have happened to a real run, played by the simulator."""

import json
from math import inf
from pathlib import Path

import pytest

from elastictrain.config.composed import LaunchGroup
from elastictrain.errors import EXIT_OK, EXIT_USAGE
from elastictrain.simulate.__main__ import main
from elastictrain.simulate.costs import RunCosts
from elastictrain.simulate.faults import FaultHistory, FaultKind, FleetFault, read_history, write_history
from elastictrain.simulate.run import Simulation
from elastictrain.simulate.scenario import Scenario

LOST_S = 5.0
COSTS = RunCosts(step_s=1.0, recovery_s=1.0, restart_s=2.0, restore_s=1.0, snapshot_stall_s=0.0, save_stall_s=0.0)


def simulated(*faults: FleetFault) -> tuple[Simulation, list[float]]:
    """Three hosts for 200 s; also when generations were made."""
    launch = LaunchGroup(wait_s=0.0, max_hosts=3, lost_s=LOST_S, grow_after_s=1.0, grow_every_s=2.0, max_failures=9)
    simulation = Simulation(Scenario(hosts=3, days=200 / 86_400, launch=launch, costs=COSTS, every_s=20.0), iter(faults))
    assert simulation.run().broken == []
    return simulation, simulation.fleet.created_s


def test_a_killed_launcher_is_noticed_at_once_and_followed_on_its_host() -> None:
    simulation, created_s = simulated(FleetFault(100.0, FaultKind.LAUNCHER, (1,), 1.0))
    assert len(created_s) == 2
    # Hosts wait for a while in which heartbeats would show whether the network is down.
    assert 100.0 + 3 / 4 * LOST_S <= created_s[1] < 100.0 + LOST_S
    assert len(simulation.fleet.generations[-1].members) == 3
    _, silent_s = simulated(FleetFault(100.0, FaultKind.HOST, (1,), 1.0))
    assert silent_s[1] > created_s[1] + LOST_S / 2


def test_launchers_that_follow_on_all_hosts_wait_for_nobody() -> None:
    simulation, created_s = simulated(FleetFault(100.0, FaultKind.LAUNCHER, (0, 1, 2), 1.0))
    assert created_s[1] < 100.0 + 3.0
    assert simulation.training.totals.from_storage == 1


def test_what_is_lost_with_all_hosts_is_what_was_not_saved() -> None:
    """A checkpoint every 20 s."""
    gone = FleetFault(98.0, FaultKind.LAUNCHER, (0, 1, 2), 1.0)
    refused, damaged = FleetFault(50.0, FaultKind.SAVES, (), 45.0), FleetFault(98.0, FaultKind.SHARD, (), 0.0)
    lost = [simulated(*faults)[0].training.totals.lost_steps for faults in ((gone,), (damaged, gone), (refused, gone))]
    assert lost[0] < 20.0
    assert lost[1] == pytest.approx(lost[0] + 20.0, abs=2.0)
    # The saves of 60 and 80 s wait for storage, and are tried again too late.
    assert lost[2] == pytest.approx(lost[0] + 40.0, abs=2.0)


def test_a_hang_costs_the_time_until_it_is_noticed() -> None:
    (killed, _), (hung, created_s) = (
        simulated(FleetFault(100.0, kind, (1,), 10.0)) for kind in (FaultKind.WORKER, FaultKind.HANG)
    )
    assert created_s[1] >= 110.0
    # A save meanwhile does not end it.
    trained_s = [one.training.totals.progress_s + one.training.totals.repeated_s for one in (killed, hung)]
    assert trained_s[0] >= trained_s[1] + 10.0


def test_no_generation_trains_with_a_host_that_fails_its_checks() -> None:
    faults = (FleetFault(100.0, FaultKind.UNFIT, (1,), 20.0), FleetFault(100.0, FaultKind.LAUNCHER, (1,), 0.0))
    simulation, created_s = simulated(*faults)
    assert len([one for one in created_s if 100.0 < one < 120.0]) > 1
    trained_s = simulation.training.totals.progress_s + simulation.training.totals.repeated_s
    assert 200.0 - 35.0 < trained_s < 200.0 - 20.0


def test_a_history_is_read_as_it_was_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    faults = (FleetFault(30.0, FaultKind.NOTICE, (1,), inf), FleetFault(60.5, FaultKind.COME, (1,), 2.0))
    history, file = FaultHistory(2, 360.0, faults), tmp_path / "history.json"
    file.write_text(write_history(history))
    assert read_history(file) == history
    assert main(["--history", str(file), "--json", "launch.min_hosts=1"]) == EXIT_OK
    found = json.loads(capsys.readouterr().out)
    assert (found["hours"], found["faults"]) == (0.1, {"notice": 1, "come": 1})


@pytest.mark.parametrize("machine", [2, -1])
def test_a_history_of_other_hosts_is_refused(machine: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "history.json"
    file.write_text(write_history(FaultHistory(2, 360.0, (FleetFault(30.0, FaultKind.WORKER, (machine,)),))))
    assert main(["--history", str(file)]) == EXIT_USAGE
    assert "machines from 0 to 1" in capsys.readouterr().err
