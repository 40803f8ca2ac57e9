"""`prepare`, killed at any point and started again, yields the same bytes."""

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest


def command(source: Path, out: str) -> list[str]:
    return [sys.executable, "-m", "elastictrain.data", "prepare", str(source), "--out", out, "--shard-tokens", "20000"]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if not path.name.startswith(".")}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    dice = random.Random(5)
    for number in range(30):
        words = (dice.choice(("one", "two", "three", "wörter\n")) for _ in range(dice.randrange(20_000)))
        (folder / f"{number:02d}.txt").write_text(" ".join(words))
    return folder


def test_killed_at_random_points(source: Path, tmp_path: Path) -> None:
    started = time.monotonic()
    subprocess.run(command(source, str(tmp_path / "whole")), check=True, capture_output=True, env=environment())
    duration_s = time.monotonic() - started
    whole = contents(tmp_path / "whole")
    assert len(whole) > 50
    dice = random.Random(1)
    unfinished = 0
    for attempt in range(2):
        out = tmp_path / f"out-{attempt}"
        for _ in range(3):
            process = subprocess.Popen(
                command(source, str(out)), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment()
            )
            time.sleep(dice.uniform(0.2, 1.0) * duration_s)
            process.kill()
            unfinished += process.wait() != 0 and out.exists() and not (out / "index.json").exists()
        subprocess.run(command(source, str(out)), check=True, capture_output=True, env=environment())
        assert contents(out) == whole
    assert unfinished


def test_two_at_once_on_one_folder(source: Path, tmp_path: Path) -> None:
    both = [
        subprocess.Popen(command(source, str(tmp_path / "out")), stdout=subprocess.DEVNULL, env=environment()) for _ in range(2)
    ]
    assert [process.wait(timeout=60) for process in both] == [0, 0]
    subprocess.run(command(source, str(tmp_path / "whole")), check=True, capture_output=True, env=environment())
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_ends_with_one_line_and_no_traceback(tmp_path: Path) -> None:
    result = subprocess.run(
        command(tmp_path / "missing", "out"), capture_output=True, text=True, env=environment(), check=False
    )
    assert result.returncode == 78
    assert result.stderr.startswith("elastictrain: input ")
    assert result.stderr.count("\n") == 1
