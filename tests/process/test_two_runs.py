"""Two runs in one folder: the second one is refused or waits, and one that was replaced saves nothing any more."""

import json
import os
import re
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from torchruns import (
    TINY,
    Run,
    alone,
    events,
    kill,
    last_step,
    losses,
    memory_arguments,
    started,
    torchrun,
    train_warm,
    wait_until,
)

STEPS = 30
ARGUMENTS = (*TINY, f"train.steps={STEPS}", "train.eval_every_steps=0", "checkpoint.every_steps=5")
PACED = ("task._target_=tests.process.paced.PacedLlama", "task.pause_s=0.05")
ENDLESS = (*ARGUMENTS, *PACED, "train.steps=100000", "optim.schedule=constant")
SYNCHRONOUS = ("checkpoint.buffers=0",)
TAKEOVER_S = 30.0


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    folder = tmp_path_factory.mktemp("undisturbed")
    return losses(train_warm([*ARGUMENTS, *PACED, "task.pause_s=0"], world_size=2, folder=folder))


@contextmanager
def lone(arguments: Sequence[str], *, folder: Path) -> Iterator[Run]:
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "elastictrain.run", *arguments, *memory_arguments(arguments, folder)]
    with started(command, log=folder / "log.txt") as run:
        yield run


@contextmanager
def launcher(run_dir: Path, *, folder: Path) -> Iterator[Run]:
    folder.mkdir(parents=True, exist_ok=True)
    arguments = [*ENDLESS, "launch.processes=1", "launch.poll_s=0.2", "launch.notices=false", f"run.dir={run_dir}"]
    command = [sys.executable, "-m", "elastictrain.launch", *arguments, *memory_arguments(arguments, folder)]
    with started(command, log=folder / "launch.txt") as run:
        yield run


def manifests(run_dir: Path) -> dict[int, dict[str, object]]:
    paths = (run_dir / "checkpoints").glob("step-*/manifest.json")
    documents = [json.loads(path.read_text()) for path in paths]
    return {document["step"]: document for document in documents}


def test_a_second_torchrun_ends_and_the_first_is_not_disturbed(tmp_path: Path, undisturbed: dict[int, float]) -> None:
    run_dir = tmp_path / "run"
    gate = tmp_path / "gate"
    arguments = [*ARGUMENTS, *PACED, f"task.gate={gate}", "fault.hang_floor_s=100", f"run.dir={run_dir}"]
    with torchrun(arguments, world_size=2, folder=tmp_path / "first", max_restarts=1) as first:
        wait_until(lambda: last_step(run_dir) >= 2, what="step 2")
        # It has to be there when the second one comes, however long that takes.
        gate.touch()
        with torchrun(arguments, world_size=2, folder=tmp_path / "second") as second:
            assert second.wait(90) != 0
            assert re.search(r"exitcode\s*: 75", second.output())
            assert str(first.process.pid) in second.output().split()
        gate.unlink()
        # Workers that the same torchrun starts again are the same run.
        kill(first.workers()[0])
        assert first.wait(120) == 0, first.output()[-4000:]
    assert losses(run_dir) == undisturbed
    assert len({row["incarnation"] for row in events(run_dir)}) == 2
    assert [int(document["incarnation"][:6]) for _, document in sorted(manifests(run_dir).items())][-1] == 2  # type: ignore[index]


@pytest.mark.parametrize("saving", [(), SYNCHRONOUS], ids=["saver", "synchronous"])
def test_a_frozen_run_is_replaced_and_saves_nothing_when_it_thaws(saving: tuple[str, ...], tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    # A host memory of its own for each: they stand for two hosts.
    with lone([*ENDLESS, *saving, f"run.dir={run_dir}"], folder=tmp_path / "first" / "log") as first:
        wait_until(lambda: bool(manifests(run_dir)), what="the first checkpoint")
        first.process.send_signal(signal.SIGSTOP)
        frozen_s = time.monotonic()
        arguments = [*ENDLESS, *saving, "run.on_held=wait", f"run.dir={run_dir}"]
        with lone(arguments, folder=tmp_path / "second" / "log") as second:
            wait_until(lambda: len(events(run_dir, "resume")) == 2, what="the second start", timeout_s=60)
            assert time.monotonic() - frozen_s < TAKEOVER_S + 10.0
            resumed = events(run_dir, "resume")[1]
            first.process.send_signal(signal.SIGCONT)
            assert first.wait(30) == 75, first.output()[-4000:]
            goal = last_step(run_dir) + 10
            wait_until(lambda: last_step(run_dir) >= goal, what="the second run to go on")
            mine = {row["incarnation"] for row in events(run_dir) if row["incarnation"].startswith("000002-")}
            later = [document for step, document in manifests(run_dir).items() if step > resumed["step"]]
            assert {document["incarnation"] for document in later} == mine
            second.process.send_signal(signal.SIGTERM)
            assert second.wait(60) == 75
    # It gave the lease back: the next start has nobody to wait for, and neither has one after a kill on this host.
    for number in ("third", "fourth"):
        begun, again_s = len(events(run_dir, "resume")), time.monotonic()
        with lone([*ENDLESS, *saving, f"run.dir={run_dir}"], folder=tmp_path / number / "log") as again:
            wait_until(lambda at=begun: len(events(run_dir, "resume")) > at, what=f"the {number} start", timeout_s=60)
            assert time.monotonic() - again_s < 15.0
            os.kill(again.process.pid, signal.SIGKILL)
            again.process.wait(30)


def test_a_launcher_and_a_bare_run_refuse_each_other(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with launcher(run_dir, folder=tmp_path / "launcher") as first:
        wait_until(lambda: last_step(run_dir) >= 2, what="step 2")
        code, output = alone([*ENDLESS, f"run.dir={run_dir}"], folder=tmp_path / "second" / "log", timeout_s=60)
        assert code == 75, output[-4000:]
        steps = last_step(run_dir)
        wait_until(lambda: last_step(run_dir) > steps, what="the launcher's run to go on")
        first.process.send_signal(signal.SIGTERM)
        assert first.wait(60) == 75
    with lone([*ENDLESS, f"run.dir={run_dir}"], folder=tmp_path / "third" / "log") as third:
        wait_until(lambda: len(events(run_dir, "resume")) == 2, what="the bare run", timeout_s=60)
        with launcher(run_dir, folder=tmp_path / "fourth") as fourth:
            assert fourth.wait(60) == 75, fourth.output()[-4000:]
            assert f"process {third.process.pid} on " in fourth.output()
        steps = last_step(run_dir)
        wait_until(lambda: last_step(run_dir) > steps, what="the bare run to go on")
    assert not [row for row in events(run_dir, "failure") if row["exit_code"] != 75]


def test_a_launcher_that_is_slower_than_a_bare_run_waits_for_it_if_it_is_to(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    arguments = [*ARGUMENTS, "run.on_held=wait", "launch.processes=1", "launch.notices=false", f"run.dir={run_dir}"]
    # It looks around for two of these before its first generation, in which the bare run is faster.
    arguments += ["launch.poll_s=6", "launch.lost_s=7"]
    command = [sys.executable, "-m", "elastictrain.launch", *arguments, *memory_arguments(arguments, tmp_path / "launcher")]
    with started(command, log=tmp_path / "launch.txt") as slower:
        hosts = run_dir / "launch/hosts"
        wait_until(lambda: slower.process.poll() is not None or any(hosts.glob("*.json")), what="the launcher")
        code, output = alone([*ARGUMENTS, f"run.dir={run_dir}"], folder=tmp_path / "bare", timeout_s=120)
        assert code == 0, output[-4000:]
        assert slower.wait(90) == 0, slower.output()[-4000:]
    outcomes = [json.loads(path.read_text()) for path in sorted((run_dir / "launch/generations").glob("*.json"))]
    assert outcomes[0]["owner"].startswith("alone-")
    assert {one["owner"] for one in outcomes[1:]} == {"launch"}
