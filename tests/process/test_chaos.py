"""`python -m elastictrain.chaos` on this machine as the only host, and what it says of wrong input."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from torchruns import environment

from elastictrain.errors import EXIT_CONFIG, EXIT_OK, EXIT_USAGE

CHAOS = (sys.executable, "-m", "elastictrain.chaos")


def run(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    hosts = () if "--simulated" in arguments else ("--hosts", "1")
    return subprocess.run(
        [*CHAOS, *hosts, *arguments], cwd=folder, env=environment(), capture_output=True, text=True, timeout=280, check=False
    )


def test_three_faults_break_nothing_and_the_plan_can_be_carried_out_again(tmp_path: Path) -> None:
    kinds = ("kill_worker", "flip_gradient", "store_503")
    done = run(
        tmp_path, "--faults", "3", "--every", "0", "1", "--seed", "3", "--keep", str(tmp_path / "kept"), "--kinds", *kinds
    )
    assert done.returncode == EXIT_OK, done.stdout[-8000:] + done.stderr[-4000:]
    plan = json.loads((tmp_path / "chaos-3.json").read_text())
    assert sorted(fault["kind"] for fault in plan["faults"]) == sorted(kinds)
    assert "--replay chaos-3.json" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    causes = {words[0]: line for line in done.stdout.splitlines() if (words := line.split()) and words[0] in kinds}
    assert "replicas diverged"[:9] in causes["flip_gradient"]
    assert "SIGKILL" in causes["kill_worker"]


def test_simulated_faults_need_no_processes(tmp_path: Path) -> None:
    done = run(tmp_path, "--simulated", "--faults", "50")
    assert done.returncode == EXIT_OK, done.stdout + done.stderr
    assert not [*tmp_path.rglob("chaos-*.json")]


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("--hosts", "0"), EXIT_USAGE),
        (("--kinds", "earthquake"), EXIT_USAGE),
        (("--faults", "1", "--", "train.steps"), EXIT_USAGE),
        (("--faults", "1", "--", "train.steps=-1"), EXIT_CONFIG),
        (("--replay", "absent.json"), EXIT_USAGE),
        (("--keep", "/proc/nowhere"), EXIT_USAGE),
        (("--simulated", "--replay", "absent.json"), EXIT_USAGE),
        (("--simulated", "--kinds", "flip_gradient"), EXIT_USAGE),
    ],
)
def test_wrong_input_has_a_message_and_a_code(arguments: tuple[str, ...], code: int, tmp_path: Path) -> None:
    done = run(tmp_path, *arguments)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.strip()
