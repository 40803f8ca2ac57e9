"""What the processes of a run open below `run.dir`."""

import os
import sys
from pathlib import Path

from torchruns import REPOSITORY, TINY, last_wins, memory_arguments, started

AUDIT = Path(__file__).parent / "audit"


def test_nothing_below_the_run_folder_is_opened_by_its_path(tmp_path: Path) -> None:
    """Whatever is opened by a path of several parts follows links in the middle of it."""
    run_dir, audited = tmp_path / "run", tmp_path / "audited.txt"
    arguments = (
        *TINY,
        "train.steps=10",
        "train.eval_every_steps=0",
        "checkpoint.every_steps=5",
        "checkpoint.keep_last=1",
        "telemetry.loggers=[tensorboard]",
        "data.ledger=true",
        "preflight=quick",
        "launch.processes=2",
        "launch.notices=false",
        f"run.dir={run_dir}",
    )
    command = [sys.executable, "-m", "elastictrain.launch", *arguments, *memory_arguments(arguments, tmp_path)]
    variables = {
        "PYTHONPATH": os.pathsep.join((str(AUDIT), str(REPOSITORY))),
        "AUDITED": str(run_dir),
        "AUDIT_FILE": str(audited),
    }
    with started(last_wins(command), log=tmp_path / "log.txt", extra_environment=variables) as run:
        assert run.wait(120) == 0, run.output()
    for folder in ("checkpoints", "events", "ledger", "launch", "tensorboard"):
        assert (run_dir / folder).is_dir(), folder
    assert set(audited.read_text().splitlines()) == {str(run_dir)}
