"""Samples that are drawn at random are the same in any process and after any failure, and others in each epoch."""

import signal
from pathlib import Path

import pytest
from torchruns import events, kill, last_step, losses, memory_arguments, torchrun, train_warm, wait_until, warm_ranks_started

STEPS = 30
RUN = (
    "recipe=digits_ddp",
    "task._target_=tests.process.augmenting.Augmenting",
    "model.dropout=0.2",
    f"train.steps={STEPS}",
    "train.global_batch=12",
    "train.micro_batch=4",
    "train.eval_every_steps=10",
    "train.eval_samples=10",
    "checkpoint.every_steps=5",
    "telemetry.log_every_steps=1000",
    "telemetry.loggers=[]",
    "fault.heartbeat_s=0.2",
    "preflight=off",
)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = train_warm(RUN, world_size=2, folder=tmp_path_factory.mktemp("undisturbed"))
    assert sorted(losses(run_dir)) == list(range(1, STEPS + 1))
    return run_dir


@pytest.mark.parametrize("workers", [0, 2])
def test_the_same_run_twice_whoever_reads(workers: int, undisturbed: Path, tmp_path: Path) -> None:
    again = train_warm([*RUN, f"data.workers={workers}"], world_size=2, folder=tmp_path)
    assert losses(again) == losses(undisturbed)
    assert losses(again, "eval") == losses(undisturbed, "eval")


def test_killed_and_resumed(undisturbed: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    arguments = [*RUN, "data.workers=1", f"run.dir={run_dir}"]
    with torchrun(arguments, world_size=2, folder=tmp_path, max_restarts=1) as run:
        wait_until(lambda: last_step(run_dir) >= 8, what="step 8")
        kill(run.workers()[1])
        assert run.wait() == 0, run.output()[-5000:]
    assert events(run_dir, "resume")[-1]["step"] > 0
    assert losses(run_dir) == losses(undisturbed)
    assert losses(run_dir, "eval") == losses(undisturbed, "eval")


def test_on_another_world_the_samples_are_the_same(undisturbed: Path, tmp_path: Path) -> None:
    """Sums are rounded in another order; other pictures would differ in the second digit."""
    alone = train_warm(RUN, world_size=1, folder=tmp_path)
    right = losses(undisturbed)
    assert {step: pytest.approx(loss, rel=1e-4) for step, loss in right.items()} == losses(alone)


def test_ranks_with_other_metrics_are_refused(tmp_path: Path) -> None:
    where = (f"run.dir={tmp_path}/run", *memory_arguments(RUN, tmp_path))
    program = ["-m", "elastictrain.run", *RUN, "task._target_=tests.process.augmenting.UnevenMetrics", *where]
    with warm_ranks_started(program, world_size=2, folder=tmp_path) as runs:
        # The first one to leave has the other one ended.
        assert {run.wait(60) for run in runs} <= {78, -signal.SIGKILL}, runs[0].output()
    assert 78 in {row["exit_code"] for row in events(tmp_path / "run", "failure")}
    assert not losses(tmp_path / "run")
