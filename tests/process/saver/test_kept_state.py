"""Storage refuses the newest state to the end of a run: its host's memory keeps it, and the next start goes on from there."""

import time
from pathlib import Path

from faultyruns import ARGUMENTS, STEPS, check_nothing_left, launched
from torchruns import events, losses, savers, wait_until

AFTER_TRIES_S = 8.0
"""By then the saver has tried all that it holds, and once more."""


def test_what_storage_refused_is_kept_and_the_next_start_uses_it(tmp_path: Path, undisturbed: dict[int, float]) -> None:
    run_dir = tmp_path / "job/run"
    arguments = [*ARGUMENTS, f"train.steps={STEPS}", f"run.dir={run_dir}", "checkpoint.max_failed_saves=2", "task.pause_s=0.05"]
    checkpoints, away = run_dir / "checkpoints", run_dir / "away"
    with launched(arguments, world_size=1, folder=run_dir.parent) as run:
        wait_until(lambda: bool(events(run_dir, "checkpoint_saved")), what="a checkpoint")
        # No user, root neither, makes a file in a file.
        checkpoints.rename(away)
        checkpoints.touch()
        assert run.wait() == 74, run.output()
    # It says what it leaves, and where: the folder of its snapshots.
    (memory,) = (tmp_path / "host-memory").glob("*/*")
    assert str(memory) in events(run_dir, "failure")[-1]["error"]
    held = max(row["step"] for row in events(run_dir, "snapshot"))
    saved = max(row["step"] for row in events(run_dir, "checkpoint_saved"))
    assert held > saved
    time.sleep(AFTER_TRIES_S)
    (saver,) = savers(tmp_path)
    with launched(arguments, world_size=1, folder=run_dir.parent) as run:
        wait_until(lambda: len(events(run_dir, "resume")) == 2, what="the restore")
        assert savers(tmp_path) == [saver]
        checkpoints.unlink()
        away.rename(checkpoints)
        assert run.wait() == 0, run.output()
    resumed = events(run_dir, "resume")[-1]
    assert (resumed["tier"], resumed["step"] >= held) == ("memory", True), (resumed, held)
    assert losses(run_dir) == undisturbed
    check_nothing_left(tmp_path)
