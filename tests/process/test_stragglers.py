"""A rank that is slower than the others is named, and its host is left out if that is wanted."""

import signal
import threading
from pathlib import Path

import pytest
from torchruns import TINY, events, last_step, torchrun, train, wait_until

from elastictrain.train.straggler import IN_A_ROW, WINDOW_STEPS

STEPS = (IN_A_ROW + 1) * WINDOW_STEPS
ARGUMENTS = (
    *TINY,
    "task._target_=tests.process.lagging.LaggingLlama",
    f"train.steps={STEPS}",
    "train.global_batch=2",
    "train.micro_batch=1",
    "train.eval_every_steps=0",
    "checkpoint.every_steps=50",
)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_the_slow_rank_is_named_with_its_phase(tmp_path: Path, kind: str) -> None:
    arguments = [*ARGUMENTS, f"parallel={kind}", "task.lags=1", "task.longer_s=0.02", f"run.dir={tmp_path}/run"]
    output = train(arguments, world_size=2, folder=tmp_path)
    (found,) = events(tmp_path / "run", "straggler")
    assert (found["rank"], found["of_rank"], found["phase"], found["over"]) == (0, 1, "forward", False)
    assert found["step"] <= STEPS
    assert found["own_s"] - found["others_s"] == pytest.approx(0.02, abs=0.01)
    assert found["step_s"] >= found["own_s"]
    assert "rank 1" in output


def test_a_slow_backward_pass_is_told_from_the_wait_for_gradients(tmp_path: Path) -> None:
    options = ("task.lags=0", "task.longer_s=0.02", "task.backward=true")
    train([*ARGUMENTS, *options, f"run.dir={tmp_path}/run"], world_size=2, folder=tmp_path)
    (found,) = events(tmp_path / "run", "straggler")
    assert (found["of_rank"], found["phase"]) == (0, "backward")


def test_a_process_that_is_often_stopped_is_named(tmp_path: Path) -> None:
    """As by a neighbor that takes its processor: a third of the time, at no particular place."""
    done, run_dir = threading.Event(), tmp_path / "run"
    with torchrun([*ARGUMENTS, f"train.steps={4 * STEPS}", f"run.dir={run_dir}"], world_size=2, folder=tmp_path) as run:
        wait_until(lambda: last_step(run_dir) >= 10, what="step 10")
        worker = run.workers()[1]

        def disturb() -> None:
            while not done.is_set() and worker.is_running():
                worker.send_signal(signal.SIGSTOP)
                done.wait(0.02)
                worker.send_signal(signal.SIGCONT)
                done.wait(0.02)

        thread = threading.Thread(target=disturb)
        thread.start()
        try:
            wait_until(lambda: bool(events(run_dir, "straggler")), timeout_s=60, what="a straggler")
        finally:
            done.set()
            thread.join()
        assert run.wait(90) == 0, run.output()
    first, *_ = events(run_dir, "straggler")
    assert first["of_rank"] == 1
