"""Launchers on three hosts that lose workers, launchers, hosts and cables, and go on as one run."""

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest
from torchruns import TINY, events, kill, last_step, last_wins, train_warm, wait_until

from elastictrain.chaos.damage import generation_of
from elastictrain.chaos.fleet import LauncherFleet, launcher_of, workers
from elastictrain.chaos.invariants import ChaosFacts, ResumeFact
from elastictrain.chaos.invariants import check as check_invariants
from elastictrain.chaos.network.hosts import VirtualHost, VirtualNetwork
from elastictrain.chaos.run_events import generation_facts
from elastictrain.config.load import load
from elastictrain.data.ledger import check_exactly_once, fold, read_ledger
from elastictrain.data.opening import open_datasets
from elastictrain.storage.opening import open_store

STEPS = 600
BATCH = 8
ARGUMENTS = (
    *TINY,
    f"train.steps={STEPS}",
    f"train.global_batch={BATCH}",
    "train.eval_every_steps=0",
    "checkpoint.every_steps=20",
    "checkpoint.manifest_mb=0",
    "data.ledger=true",
    "fault.heartbeat_s=0.2",
    "fault.step_timeout_s=30",
    "fault.init_timeout_s=90",
)
PACED = ("task._target_=tests.process.paced.PacedLlama",)
LAUNCH = (
    "launch.min_hosts=2",
    "launch.max_hosts=3",
    "launch.join_s=120",
    "launch.grow_after_s=1",
    "launch.grow_every_s=1",
    "launch.notices=false",
)
FLAP_S = 3.0


@pytest.fixture
def undisturbed(tmp_path: Path) -> Path:
    folder = tmp_path / "undisturbed"
    train_warm([*ARGUMENTS, *PACED, f"run.dir={folder}/run"], world_size=1, folder=folder)
    return folder / "run"


def freeze(host: VirtualHost, number: int) -> None:
    for pid in host.namespaces.inhabitants():
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def lose_and_replace(fleet: LauncherFleet, gone: VirtualHost, others: list[VirtualHost]) -> None:
    """The others go on without it, and take it in when it is back."""
    names = [host.name for host in others]
    fleet.wait_for_members(names)
    fleet.go_on()
    gone.restore()
    fleet.start(gone)
    fleet.wait_for_members([*names, gone.name])
    fleet.go_on()


def test_whatever_is_lost_the_run_is_the_same(network: VirtualNetwork, tmp_path: Path, undisturbed: Path) -> None:
    a, b, c = (network.add(name) for name in "abc")
    fleet = LauncherFleet(tmp_path / "run", tmp_path / "logs", [*ARGUMENTS, *PACED, "task.pause_s=0.05", *LAUNCH])
    fleet.start(a, b, c)
    fleet.wait_for_step(12)

    kill(workers(b)[0])
    fleet.go_on()
    assert sorted(fleet.members()) == ["a", "b", "c"]

    # A link that is away for less than `launch.lost_s` costs nothing.
    generations = len(fleet.generations())
    c.cut()
    time.sleep(FLAP_S)
    c.restore()
    fleet.go_on()
    assert len(fleet.generations()) == generations

    os.kill(launcher_of(c), signal.SIGKILL)
    lose_and_replace(fleet, c, [a, b])

    # The first host, which the store is on, and without a word.
    a.lose()
    lose_and_replace(fleet, a, [b, c])

    freeze(b, signal.SIGSTOP)
    fleet.wait_for_members(["a", "c"])
    fleet.go_on()
    generations = len(fleet.generations())
    freeze(b, signal.SIGCONT)
    # It finds out that it was given up, and comes as any other.
    fleet.wait_for_members(["a", "b", "c"])
    fleet.go_on()
    assert len(fleet.generations()) > generations

    # One that is asked to leave does so with everything saved, and the others do not wait for a time limit.
    os.kill(launcher_of(b), signal.SIGTERM)
    assert fleet.launchers.pop("b").wait(60) == 75
    fleet.wait_for_members(["a", "c"])
    fleet.go_on()

    # All are taken away, and the same command goes on, here in a hurry.
    for host in (a, c):
        os.kill(launcher_of(host), signal.SIGTERM)
    assert fleet.wait() == {"a": 75, "c": 75}, fleet.output()[-8000:]
    fleet.arguments = [*ARGUMENTS, *PACED, *LAUNCH, "launch.max_hosts=2"]
    fleet.start(a, c)
    assert fleet.wait() == {"a": 0, "c": 0}, fleet.output()[-8000:]
    check(fleet, undisturbed)


def check(fleet: LauncherFleet, undisturbed: Path) -> None:
    """The losses are those of the undisturbed run, and each sample was consumed once."""
    right = {row["step"]: row["loss"] for row in events(undisturbed, "step")}
    rows = events(fleet.run_dir, "step")
    assert {row["step"] for row in rows} == set(right)
    for row in rows:
        assert row["loss"] == pytest.approx(right[row["step"]], rel=1e-5)
    config = load(last_wins([*ARGUMENTS, "run.dir=unused"]))
    num_samples = len(open_datasets(config.data, seq_len=config.train.seq_len).train)
    ledger = list(read_ledger(open_store(str(fleet.run_dir))))
    problems = check_exactly_once(
        ledger,
        steps=STEPS,
        global_batch=BATCH,
        num_samples=num_samples,
        seed=config.run.seed,
        shuffle=config.data.shuffle,
    )
    assert problems == ()
    assert fold(ledger) == fold(list(read_ledger(open_store(str(undisturbed)))))
    # No lost host has taken away what two had, and there was something to take away.
    fleet.events.update()
    generations = generation_facts(fleet.generations(), savers=fleet.events.savers)
    resumed = {generation_of(row["incarnation"]): row["step"] for row in events(fleet.run_dir, "resume")}
    assert sum(one.replicated > 0 for one in generations) > 2
    resumes = [ResumeFact(0.0, number, step) for number, step in resumed.items()]
    assert check_invariants(ChaosFacts(resumes=resumes, generations=generations)) == []
    # Every generation but the first went on from where another had been: no start from the beginning.
    assert [row["step"] for row in events(fleet.run_dir, "resume")].count(0) == 1
    wait_until(lambda: last_step(fleet.run_dir) == STEPS, what="the last step")
