"""Hosts that hear each other, of which one cannot reach the store of torchrun on the other: nobody failed, and it is named."""

from pathlib import Path

from torchruns import TINY, events, wait_until

from elastictrain.chaos.fleet import LauncherFleet
from elastictrain.chaos.network.hosts import VirtualNetwork
from elastictrain.errors import EXIT_TRANSPORT

ARGUMENTS = (*TINY, "train.steps=30", "train.eval_every_steps=0", "fault.heartbeat_s=0.2", "fault.rendezvous_timeout_s=6")
LAUNCH = ("launch.min_hosts=2", "launch.max_hosts=2", "launch.max_failures=1", "launch.notices=false")


def test_a_store_behind_a_firewall_is_named_and_does_not_end_the_run(network: VirtualNetwork, tmp_path: Path) -> None:
    a, b = (network.add(name) for name in "ab")
    place = a.namespaces
    rule = ("from", b.address, "ipproto", "tcp", "blackhole")
    # Its own addresses are looked up first of all: after this, only after the rule below.
    place.ip("rule", "add", "pref", "100", "lookup", "local")
    place.ip("rule", "del", "pref", "0")
    place.ip("rule", "add", "pref", "10", *rule)
    fleet = LauncherFleet(tmp_path / "run", tmp_path / "logs", [*ARGUMENTS, *LAUNCH])
    fleet.start(a, b)
    try:
        wait_until(lambda: len(fleet.generations()) > 2, timeout_s=90, what="two generations without a step")
    except AssertionError as error:
        raise AssertionError(f"{error}\n{fleet.output()[-12000:]}") from None
    place.ip("rule", "del", "pref", "10")
    assert fleet.wait(timeout_s=90) == {"a": 0, "b": 0}, fleet.output()[-12000:]
    ended = events(fleet.run_dir, "generation_ended")
    assert sorted((row["kind"], row["exit_code"]) for row in ended) == [("done", 0)] * 2 + [("lost", EXIT_TRANSPORT)] * 4
    assert all(not generation["failures"] for generation in fleet.generations())
    assert f"on a at {a.address}:" in fleet.output()
    # Neither Python's nor those of torch's C++ code.
    assert "Traceback" not in fleet.output()
    assert "frame #" not in fleet.output()
