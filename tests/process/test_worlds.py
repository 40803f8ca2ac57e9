"""One run on 2, then 1, then 3, then 2 processes, with a global batch that 3 does not divide: it stays the same run."""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from torchruns import TINY, Run, events, kill, last_step, last_wins, started, torchrun, train_warm, wait_until

from elastictrain.config.load import load
from elastictrain.data.ledger import check_exactly_once, fold, read_ledger
from elastictrain.data.opening import open_datasets
from elastictrain.storage.opening import open_store

STEPS = 50
BATCH = 8
LEG_STEPS = 6
SAVE_EVERY = 5
ARGUMENTS = (
    *TINY,
    "task._target_=tests.process.paced.PacedLlama",
    f"train.steps={STEPS}",
    f"train.global_batch={BATCH}",
    "train.eval_every_steps=0",
    f"checkpoint.every_steps={SAVE_EVERY}",
    "data.ledger=true",
    "fault.heartbeat_s=0.2",
)
PACED = (*ARGUMENTS, "task.pause_s=0.03")


@dataclass(frozen=True)
class Leg:
    """Part of the run that one world did."""

    world_size: int
    resumed_from: int
    steps: tuple[dict[str, Any], ...]


def legs(run_dir: Path) -> list[Leg]:
    """One leg for each incarnation, in order."""
    resumed = {row["incarnation"]: row["step"] for row in events(run_dir, "resume")}
    steps = events(run_dir, "step")
    return [
        Leg(
            row["world_size"],
            resumed[row["incarnation"]],
            tuple(step for step in steps if step["incarnation"] == row["incarnation"]),
        )
        for row in events(run_dir, "start")
    ]


def figures(row: dict[str, Any]) -> tuple[float, float, float]:
    """What must be the same, bit for bit, wherever a step is done again by the same world."""
    return row["loss"], row["grad_norm"], row["lr"]


def stop_after_a_while(run: Run, run_dir: Path, *, disturb: Callable[[], None] = lambda: None) -> None:
    begun = last_step(run_dir)
    wait_until(lambda: last_step(run_dir) >= begun + LEG_STEPS, what=f"step {begun + LEG_STEPS}")
    disturb()
    run.process.terminate()
    run.wait(60)


def stop_between_saves(worker: psutil.Process, run_dir: Path) -> int:
    """Freeze a worker, and thereby all, while there are steps that no save has; returns the last of them."""
    while True:
        worker.suspend()
        time.sleep(0.3)  # the others go on until they need it
        if (step := last_step(run_dir)) % SAVE_EVERY:
            return step
        worker.resume()
        wait_until(lambda: last_step(run_dir) > step, what="another step")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_warm(ARGUMENTS, world_size=2, folder=tmp_path_factory.mktemp("undisturbed"))


@pytest.fixture(scope="module")
def travelled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder after DDP on 2, one process alone, DDP on 3 with a SIGKILL in between, and FSDP on 2."""
    folder = tmp_path_factory.mktemp("travelled")
    run_dir = folder / "run"
    arguments = [*PACED, f"run.dir={run_dir}"]

    with torchrun(arguments, world_size=2, folder=folder / "ddp2") as run:
        stop_after_a_while(run, run_dir)

    with started([sys.executable, "-m", "elastictrain.run", *arguments], log=folder / "alone.txt") as run:
        stop_after_a_while(run, run_dir)

    with torchrun(arguments, world_size=3, folder=folder / "ddp3", max_restarts=1) as run:

        def kill_one() -> None:
            victim = run.workers()[1]
            before = stop_between_saves(victim, run_dir)
            kill(victim)
            wait_until(lambda: last_step(run_dir) > before + 1, what="more steps after the restart")

        stop_after_a_while(run, run_dir, disturb=kill_one)

    return train_warm([*ARGUMENTS, "parallel=fsdp"], world_size=2, folder=folder)


def test_every_world_did_a_part(travelled: Path) -> None:
    found = legs(travelled)
    assert [leg.world_size for leg in found] == [2, 1, 3, 3, 2]
    assert all(len(leg.steps) > 1 for leg in found)
    # Whoever was asked to stop saved at its last step, and nothing was done twice.
    for before, after in ((0, 1), (1, 2), (3, 4)):
        assert found[before].steps[-1]["step"] == found[after].resumed_from
    assert [row["exit_code"] for row in events(travelled, "stop")] == [75, 75, 75, 0]


def test_every_position_is_consumed_once_and_in_order(travelled: Path, undisturbed: Path) -> None:
    config = load(last_wins([*ARGUMENTS, "run.dir=unused"]))
    num_samples = len(open_datasets(config.data, seq_len=config.train.seq_len).train)
    rows = list(read_ledger(open_store(str(travelled))))
    problems = check_exactly_once(
        rows, steps=STEPS, global_batch=BATCH, num_samples=num_samples, seed=config.run.seed, shuffle=config.data.shuffle
    )
    assert problems == ()
    assert fold(rows) == fold(list(read_ledger(open_store(str(undisturbed)))))
    for leg in legs(travelled):
        assert [row["step"] for row in leg.steps] == list(range(leg.resumed_from + 1, leg.resumed_from + len(leg.steps) + 1))
        assert all(row["positions"] == [BATCH * (row["step"] - 1), BATCH * row["step"]] for row in leg.steps)


def test_figures_are_those_of_the_undisturbed_run(travelled: Path, undisturbed: Path) -> None:
    right = {row["step"]: row for row in events(undisturbed, "step")}
    rows = events(travelled, "step")
    assert {row["step"] for row in rows} == set(right) == set(range(1, STEPS + 1))
    for row in rows:
        wanted = right[row["step"]]
        assert row["lr"] == wanted["lr"]
        assert row["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
    for row in legs(travelled)[0].steps:
        assert figures(row) == figures(right[row["step"]])


def test_restart_of_three_ranks_is_bit_for_bit(travelled: Path) -> None:
    """Also in its first step: three summands round differently in another order, and DDP must not change the order."""
    killed, restarted = (leg for leg in legs(travelled) if leg.world_size == 3)
    again = {row["step"]: figures(row) for row in restarted.steps}
    repeated = {row["step"]: figures(row) for row in killed.steps if row["step"] in again}
    assert repeated
    assert repeated == {step: again[step] for step in repeated}
