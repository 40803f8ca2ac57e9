"""Launchers on four hosts that all see storage, and a network between them that falls apart."""

import os
import signal
import time
from pathlib import Path

from torchruns import TINY, wait_until

from elastictrain.chaos.fleet import LauncherFleet, launcher_of
from elastictrain.chaos.network.hosts import VirtualHost, VirtualNetwork

GOES_ON_WITHIN_S = 15.0
ARGUMENTS = (
    *TINY,
    "train.steps=1000000",
    "train.global_batch=12",
    "train.eval_every_steps=0",
    "checkpoint.every_steps=20",
    "task._target_=tests.process.paced.PacedLlama",
    "task.pause_s=0.1",
    "launch.min_hosts=2",
    "launch.max_hosts=4",
    "launch.join_s=120",
    "launch.grow_after_s=1",
    "launch.grow_every_s=1",
    "launch.notices=false",
)
"""The limits on failures are the default ones."""


def generations_with(fleet: LauncherFleet, *groups: str) -> None:
    """Until the newest generation is one of these, in time."""
    began_s = time.monotonic()
    while "".join(sorted(fleet.members())) not in groups:
        assert time.monotonic() < began_s + GOES_ON_WITHIN_S, fleet.output()[-8000:]
        time.sleep(0.05)


def together(fleet: LauncherFleet, network: VirtualNetwork, hosts: list[VirtualHost]) -> None:
    network.join()
    fleet.wait_for_members([host.name for host in hosts])
    fleet.go_on()


def test_a_network_that_falls_apart_never_ends_the_run(network: VirtualNetwork, tmp_path: Path) -> None:
    hosts = a, b, c, d = [network.add(name) for name in "abcd"]
    fleet = LauncherFleet(tmp_path / "run", tmp_path / "logs", [*ARGUMENTS])
    fleet.start(*hosts)
    fleet.wait_for_members(list("abcd"))
    fleet.wait_for_step(5)

    # The first host, which the store of the group is on, is the one alone.
    network.split([b, c, d], [a])
    generations_with(fleet, "bcd")
    fleet.go_on()
    together(fleet, network, hosts)

    network.split([a, b], [c, d])
    generations_with(fleet, "ab", "cd")
    fleet.go_on()
    number = len(fleet.generations())
    together(fleet, network, hosts)
    assert len(fleet.generations()) == number + 1

    number = len(fleet.generations())
    network.split([a], [b], [c], [d])
    time.sleep(2 * GOES_ON_WITHIN_S)
    assert len(fleet.generations()) == number
    assert all(run.process.poll() is None for run in fleet.launchers.values())
    together(fleet, network, hosts)

    assert all(generation["failures"] == [] for generation in fleet.generations())
    for host in hosts:
        os.kill(launcher_of(host), signal.SIGTERM)
    assert fleet.wait() == dict.fromkeys("abcd", 75), fleet.output()[-8000:]


def test_a_host_whose_address_changes_is_taken_in_under_the_new_one(network: VirtualNetwork, tmp_path: Path) -> None:
    a, b = (network.add(name) for name in "ab")
    fleet = LauncherFleet(tmp_path / "run", tmp_path / "logs", [*ARGUMENTS, "launch.max_hosts=2"])
    fleet.start(a, b)
    fleet.wait_for_members(["a", "b"])
    fleet.wait_for_step(3)
    b.move("10.89.0.77")

    def addresses() -> dict[str, str]:
        return {member["name"]: member["address"] for member in fleet.generations()[-1]["members"]}

    wait_until(lambda: addresses() == {"a": a.address, "b": "10.89.0.77"}, timeout_s=60, what="the new address")
    fleet.go_on()
    assert all(run.process.poll() is None for run in fleet.launchers.values())
    assert fleet.generations()[-1]["failures"] == []
