"""Somebody deletes the checkpoints, or the whole run folder: what still knows of the state restores it, or stops the run."""

import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from torchruns import TINY, Run, alone, events, kill, last_step, losses, memory_arguments, started, torchrun, wait_until

STEPS = 40
ARGUMENTS = (
    *TINY,
    "task._target_=tests.process.paced.PacedLlama",
    "task.pause_s=0.05",
    f"train.steps={STEPS}",
    "train.eval_every_steps=0",
    "fault.heartbeat_s=0.2",
)
QUICK = ("launch.processes=1", "launch.poll_s=0.2", "launch.lost_s=2", "launch.backoff_s=0.1", "launch.notices=false")
IN_MEMORY = ("checkpoint.every_steps=0", "checkpoint.snapshot_every_steps=2")
IN_STORAGE = ("checkpoint.every_steps=5", "checkpoint.buffers=0")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, float]]:
    """A finished run of one rank, and its losses."""
    folder = tmp_path_factory.mktemp("undisturbed") / "job"
    arguments = [*ARGUMENTS, *IN_STORAGE, "task.pause_s=0", f"run.dir={folder}/run"]
    code, output = alone(arguments, folder=folder)
    assert code == 0, output
    return folder / "run", losses(folder / "run")


def test_a_deleted_folder_of_checkpoints_stops_until_told_to_start_over(
    undisturbed: tuple[Path, dict[int, float]], tmp_path: Path
) -> None:
    run_dir = Path(shutil.copytree(undisturbed[0], tmp_path / "job/run"))
    arguments = [*ARGUMENTS, *IN_STORAGE, "task.pause_s=0", f"run.dir={run_dir}"]
    shutil.rmtree(run_dir / "checkpoints")
    (run_dir / "committed.json").unlink()
    for _ in range(2):
        # Once by the events alone.
        code, output = alone(arguments, folder=run_dir.parent)
        assert code == 74, output
        assert "checkpoint.on_invalid=fresh" in output
        assert "Traceback" not in output
        assert len(events(run_dir, "resume")) == 1
    code, output = alone([*arguments, "checkpoint.on_invalid=fresh"], folder=run_dir.parent)
    assert code == 0, output
    assert [row["step"] for row in events(run_dir, "resume")] == [0, 0]


@contextmanager
def job(kind: str, arguments: Sequence[str], *, folder: Path) -> Iterator[Run]:
    """One worker of a torchrun, or of a launcher, that starts it again."""
    if kind == "torchrun":
        with torchrun(arguments, world_size=1, folder=folder, max_restarts=3) as run:
            yield run
        return
    folder.mkdir(parents=True, exist_ok=True)
    command = [
        sys.executable,
        "-m",
        "elastictrain.launch",
        *QUICK,
        *arguments,
        *memory_arguments(arguments, folder),
    ]
    with started(command, log=folder / "log.txt") as run:
        yield run


def delete_and_kill(run: Run, run_dir: Path, *, after_step: int) -> int:
    """While nobody writes; returns the last step that was recorded."""
    wait_until(lambda: last_step(run_dir) >= after_step, what=f"step {after_step}", timeout_s=60)
    workers = run.workers()
    for worker in workers:
        worker.suspend()
    step = last_step(run_dir)
    shutil.rmtree(run_dir)
    for worker in workers:
        kill(worker)
    return step


@pytest.mark.parametrize("kind", ["torchrun", "launcher"])
def test_a_deleted_run_goes_on_from_host_memory(kind: str, undisturbed: tuple[Path, dict[int, float]], tmp_path: Path) -> None:
    run_dir = tmp_path / "job/run"
    with job(kind, [*ARGUMENTS, *IN_MEMORY, f"run.dir={run_dir}"], folder=run_dir.parent) as run:
        step = delete_and_kill(run, run_dir, after_step=12)
        assert run.wait() == 0, run.output()
    (resumed,) = events(run_dir, "resume")
    assert (resumed["tier"], resumed["step"] >= step - 4) == ("memory", True), (resumed, step)
    again = losses(run_dir)
    assert again == {number: loss for number, loss in undisturbed[1].items() if number > resumed["step"]}


def test_a_deleted_run_that_nothing_holds_any_more_ends(tmp_path: Path) -> None:
    run_dir = tmp_path / "job/run"
    with job("torchrun", [*ARGUMENTS, *IN_STORAGE, f"run.dir={run_dir}"], folder=run_dir.parent) as run:
        delete_and_kill(run, run_dir, after_step=12)
        code = run.wait()
    assert code == 1, run.output()
    assert not events(run_dir, "resume"), run.output()
    assert {row["exit_code"] for row in events(run_dir, "failure")} == {74}
