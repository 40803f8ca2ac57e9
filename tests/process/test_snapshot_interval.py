"""`checkpoint.snapshot_every_steps` as it is by default: what a killed worker costs."""

from itertools import pairwise
from pathlib import Path

from torchruns import TINY, events, kill, last_step, losses, torchrun, wait_until

from elastictrain.checkpoint.memory.cadence import FIRST, least_interval

ARGUMENTS = (
    *TINY,
    "task._target_=tests.process.paced.PacedLlama",
    "task.pause_s=0.03",
    "train.eval_every_steps=0",
    "checkpoint.every_steps=0",
    "train.steps=260",
    "fault.heartbeat_s=0.2",
)


def test_a_kill_repeats_at_most_the_interval_and_one_step(tmp_path: Path) -> None:
    """All ranks take the same snapshots: a step that one rank lacks could not be resumed from."""
    run_dir = tmp_path / "run"
    arguments = [*ARGUMENTS, f"run.dir={run_dir}"]
    killed_at = []
    with torchrun(arguments, world_size=2, folder=tmp_path, max_restarts=2) as run:
        for number, step in enumerate((110, 160), start=1):
            wait_until(lambda number=number: len(events(run_dir, "resume")) == number, what="resume")
            wait_until(lambda step=step: last_step(run_dir) >= step, what=f"step {step}")
            victims = run.workers()
            kill(victims[number % 2])
            wait_until(lambda victims=victims: not any(one.is_running() for one in victims), timeout_s=15, what="end")
            killed_at.append(max(row["step"] for row in events(run_dir, "step")))
        assert run.wait(240) == 0, run.output()[-5000:]
    assert sorted(losses(run_dir)) == list(range(1, 261))
    resumed = events(run_dir, "resume")
    assert [row["tier"] for row in resumed] == ["none", "memory", "memory"]
    for row, killed, before in zip(resumed[1:], killed_at, resumed, strict=False):
        taken = [one["step"] for one in events(run_dir, "snapshot") if one["incarnation"] == before["incarnation"]]
        gaps = [after - step for step, after in pairwise(taken)]
        # The interval may have grown with the last snapshot.
        assert killed - row["step"] <= 2 * max(gaps[-3:]) + 1, (taken, killed, row["step"])
        assert min(gaps) >= least_interval(3)
    first = min(one["step"] for one in events(run_dir, "snapshot"))
    # Slots are made once the first step is done, and flags tell of them a step later.
    assert FIRST <= first <= FIRST + 2
