"""`scripts/soak.py`, for two kinds of faults."""

import subprocess
import sys
from pathlib import Path

from torchruns import REPOSITORY, environment


def test_the_soak_finds_the_run_the_same_after_a_killed_worker_and_a_host_that_was_replaced(tmp_path: Path) -> None:
    command = [
        sys.executable,
        REPOSITORY / "scripts" / "soak.py",
        "--minutes",
        "0.2",
        "--every",
        "0",
        "1",
        "--kinds",
        "worker",
        "swap",
        "--html",
        tmp_path / "page.html",
    ]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-8000:]
    table = {words[0]: words[1:] for words in map(str.split, done.stdout.splitlines()) if len(words) == 6}
    assert {"worker", "swap"} <= table.keys()
    assert "<h2>Hosts</h2>" in (tmp_path / "page.html").read_text()
    *_, median, most = table["swap"]
    assert (median, most) == ("0", "0"), "a host that leaves in order costs no step"
