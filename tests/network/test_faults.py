"""`scripts/faults.py`, for three faults."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from torchruns import REPOSITORY, environment


@pytest.mark.skipif(shutil.which("nft") is None, reason="needs nft, for firewalls")
def test_faults_are_named_and_a_healthy_start_passes(tmp_path: Path) -> None:
    only = ["docker0 is chosen", "nothing goes out to one host", "not shared by one (full)"]
    command = [sys.executable, REPOSITORY / "scripts" / "faults.py", "--healthy", "1", "--json", tmp_path / "figures.json"]
    done = subprocess.run(
        [*command, "--only", *only], capture_output=True, text=True, timeout=200, check=False, env=environment({})
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "figures.json").read_text())
    assert [bool(row["wanted"]) for row in rows] == [True, True, True, False]
    assert all(row["right"] for row in rows)
    checks = {check for row in rows for check, _ in row["named"]}
    assert checks == {"interface", "reachable", "storage"}
