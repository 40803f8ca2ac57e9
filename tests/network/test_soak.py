"""`scripts/soak.py`, for one fault."""

import subprocess
import sys

from torchruns import REPOSITORY, environment


def test_the_soak_finds_the_run_the_same_after_a_killed_worker() -> None:
    command = [
        sys.executable,
        REPOSITORY / "scripts" / "soak.py",
        "--minutes",
        "0.01",
        "--every",
        "0",
        "1",
        "--kinds",
        "worker",
    ]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-8000:]
    assert "worker               1" in done.stdout
