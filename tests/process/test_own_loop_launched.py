"""The programs of docs/own-loop.md under the launcher: killed, stopped and moved to another world, they equal the one that
nothing happens to."""

import random
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import torch
from test_own_loop import PROGRAMS
from torchruns import Run, events, kill, last_step, losses, savers, started, wait_until

import elastictrain

STEPS = 90
SOON_S = 20.0
LAUNCH = ("preflight=off", "launch.notices=false", "launch.poll_s=0.2", "launch.backoff_s=0.1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The programs; each step takes a moment, so that there is time to kill it."""
    made = tmp_path_factory.mktemp("launched")
    (made / "host-memory").mkdir()
    first, second = (
        text.replace("scheduler.step()\n", "scheduler.step(); __import__('time').sleep(0.03)\n") for text in PROGRAMS
    )
    first = first.replace('"flush_s": 1.0', '"flush_s": 0.1')
    (made / "own_loop.py").write_text(first)
    head = first.partition("given = ")[0]
    assert "(folder, **options)" in head
    # Deaths hit the evaluation, in which most of the time is spent; the mode of the model must not outlive it.
    evaluation = "model.eval(); __import__('time').sleep(0.03); torch.distributed.barrier(); model.train()"
    second = second.replace("__import__('time').sleep(0.03)", evaluation)
    assert evaluation in second
    (made / "recoverable.py").write_text(head.replace("(folder, **options)", "(folder, recoverable=True, **options)") + second)
    yield made
    for saver in savers(made):
        saver.kill()


@contextmanager
def launched(
    folder: Path, run_dir: str, *, program: str = "own_loop.py", workers: int = 2, steps: int = STEPS
) -> Iterator[Run]:
    options = [*LAUNCH, f"launch.processes={workers}", f"run.dir={run_dir}", "checkpoint.memory_dir=host-memory"]
    command = [sys.executable, "-m", "elastictrain.launch", *options, "--", program, run_dir, str(steps)]
    with started(command, log=folder / f"{run_dir}.txt", cwd=folder) as run:
        yield run


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> Path:
    with launched(folder, "undisturbed") as run:
        assert run.wait(120) == 0, run.output()[-4000:]
    return folder / "undisturbed"


def strike(run: Run, run_dir: Path, *, step: int, chance: random.Random) -> list[int]:
    """Kill a worker after `step`, or in the first one; returns the pids of all there were, that of the victim first."""

    def reached() -> bool:
        return (last_step(run_dir) >= step and bool(events(run_dir, "resume"))) or run.process.poll() is not None

    wait_until(reached, timeout_s=60, what=f"step {step}")
    found: Sequence[psutil.Process] = run.workers()
    assert len(found) == 2, run.output()[-4000:]
    victim = chance.choice(found)
    kill(victim)
    return sorted((one.pid for one in found), key=lambda pid: pid != victim.pid)


def await_recovery(run_dir: Path, number: int) -> None:
    wait_until(lambda: len(events(run_dir, "recovery")) >= number, timeout_s=SOON_S, what=f"recovery {number}")


def assert_equal(run_dir: Path, right: Path) -> None:
    assert losses(run_dir) == losses(right)
    ours, theirs = elastictrain.load(str(run_dir)), elastictrain.load(str(right))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_all_are_started_anew_after_a_death_and_a_stop(folder: Path, undisturbed: Path) -> None:
    run_dir = folder / "restarted"
    with launched(folder, "restarted") as run:
        strike(run, run_dir, step=15, chance=random.Random(3))
        await_recovery(run_dir, 1)
        run.process.send_signal(signal.SIGTERM)
        assert run.wait(60) == 75, run.output()[-4000:]
    (recovery,), (stop,) = events(run_dir, "recovery"), events(run_dir, "stop")
    assert (recovery["rung"], recovery["world_size"]) == ("restart", 2)
    assert (stop["saved"], stop["saved_step"]) == ("storage", stop["step"])
    with launched(folder, "restarted") as run:
        assert run.wait(120) == 0, run.output()[-4000:]
    assert_equal(run_dir, undisturbed)
    assert [row["step"] for row in events(run_dir, "resume")] == [0, recovery["resumed_step"], stop["step"]]
    with launched(folder, "restarted", workers=1, steps=STEPS + 5) as run:
        assert run.wait(120) == 0, run.output()[-4000:]
    assert (events(run_dir, "resume")[-1]["step"], last_step(run_dir)) == (STEPS, STEPS + 5)


def test_survivors_of_a_recoverable_function_keep_their_processes(folder: Path, undisturbed: Path) -> None:
    """But for the first death, before there is a snapshot: the survivor has changed its first values."""
    run_dir, chance = folder / "recovered", random.Random(4)
    struck: list[list[int]] = []
    with launched(folder, "recovered", program="recoverable.py") as run:
        for number, step in enumerate((0, 15, 45), start=1):
            struck.append(strike(run, run_dir, step=step, chance=chance))
            await_recovery(run_dir, number)
        assert run.wait(60) == 0, run.output()[-4000:]
    first, *later = events(run_dir, "recovery")
    assert (first["rung"], first["resumed_step"]) == ("restart", 0)
    for (victim, survivor), told in zip(struck[1:], later, strict=True):
        assert told["rung"] == "in_place"
        assert survivor in told["pids"].values()
        assert victim not in told["pids"].values()
        assert told["seconds"]["total"] < SOON_S
    assert_equal(run_dir, undisturbed)
