"""`python -m elastictrain.checkpoint` as a person or a script starts it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from torchruns import environment

from tests.integration.checkpoint.commands.made import flip, save, shard

TORCH_FREE = """
import sys
from elastictrain.checkpoint.__main__ import main
code = main(sys.argv[1:])
assert "torch" not in sys.modules
sys.exit(code)
"""


def start(*arguments: str, stdin: int = subprocess.DEVNULL) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, stdin=stdin, env=environment(), timeout=120, check=False
    )


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return start("-m", "elastictrain.checkpoint", *arguments)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step in (10, 20, 30):
        save(tmp_path, step, world_size=2)
    return tmp_path


def test_ls_verify_and_prune(run: Path) -> None:
    done = command("ls", str(run), "--json")
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)["checkpoints"]
    assert [(one["step"], one["state"], one["resume"]) for one in found] == [
        (30, "valid", True),
        (20, "valid", False),
        (10, "valid", False),
    ]
    done = command("verify", str(run), "--all")
    assert (done.returncode, done.stderr) == (0, "")

    bad = flip(shard(run / "checkpoints" / "step-000000030", 1))
    done = command("verify", str(run))
    assert done.returncode == 74
    assert bad.name in done.stdout
    done = command("prune", str(run), "--keep-last", "1", "--yes")
    assert done.returncode == 74
    assert bad.name in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr

    flip(bad)
    assert command("prune", str(run), "--keep-last", "1").returncode == 64, "there is no terminal to ask on"
    done = command("prune", str(run), "--keep-last", "1", "--yes")
    assert done.returncode == 0
    assert [one.name for one in (run / "checkpoints").iterdir()] == ["step-000000030"]


def test_the_console_script_knows_it(run: Path) -> None:
    done = start("-m", "elastictrain", "checkpoint", "diff", str(run), f"{run}/checkpoints/step-000000010", "--json")
    assert done.returncode == 1
    assert json.loads(done.stdout)["differing"] == 5


@pytest.mark.parametrize("arguments", [("ls",), ("verify", "--all"), ("prune", "--keep-last", "1", "--yes")])
def test_what_only_looks_at_files_does_not_wait_for_torch(arguments: tuple[str, ...], run: Path) -> None:
    done = start("-c", TORCH_FREE, *arguments, str(run))
    assert done.returncode == 0, done.stderr


def test_mistakes_end_in_one_line(tmp_path: Path) -> None:
    done = command("verify", f"{tmp_path}/nowhere")
    assert done.returncode == 74
    assert done.stderr.startswith(f"elastictrain: {tmp_path}/nowhere must be the folder of a run")
    assert done.stderr.count("\n") == 1


def test_a_reader_that_has_seen_enough(run: Path) -> None:
    """What is written goes to a buffer first, so the broken pipe shows only at the end."""
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "elastictrain.checkpoint", "ls", str(run)],
        stdout=writing,
        stderr=subprocess.PIPE,
        env=environment({"PYTHONUNBUFFERED": ""}),
        timeout=120,
        check=False,
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")
