"""Streams of torchdata and grain, through `attach`: killed and resumed they give what they would have given undisturbed."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from torchruns import REPOSITORY, Run, events, kill, last_step, losses, savers, started, torchrun, wait_until

import elastictrain

pytest.importorskip("grain")
pytest.importorskip("torchdata")

STEPS = 45
PROGRAM = str(REPOSITORY / "tests/process/streaming.py")
AHEAD = {"AHEAD": "grain torchdata.stateful_dataloader"}


@pytest.fixture(autouse=True)
def _no_saver_is_left(tmp_path: Path) -> Iterator[None]:
    yield
    for saver in savers(tmp_path):
        saver.kill()


@contextmanager
def two_ranks(folder: Path) -> Iterator[Run]:
    folder.with_name(f"{folder.name}-memory").mkdir()
    log = folder.with_name(f"{folder.name}-log")
    arguments = [str(folder), str(STEPS)]
    with torchrun(arguments, world_size=2, folder=log, max_restarts=1, module=[PROGRAM], extra_environment=AHEAD) as run:
        yield run


def ranks(run: Run) -> list[psutil.Process]:
    """Workers of torchrun; not those of their loaders."""
    children = psutil.Process(run.process.pid).children()
    return [one for one in children if any("streaming.py" in word for word in one.cmdline())]


def test_each_rank_goes_on_in_its_own_streams(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    with two_ranks(whole) as run:
        assert run.wait(120) == 0, run.output()[-4000:]
    with two_ranks(killed) as run:
        # In the second epoch of the loader.
        wait_until(lambda: last_step(killed) >= 25, timeout_s=120, what="step 25")
        kill(ranks(run)[1])
        assert run.wait(120) == 0, run.output()[-4000:]
    assert events(killed, "resume")[-1]["step"] > 15
    assert losses(killed) == losses(whole)
    told = [{row["step"]: row["metrics"] for row in events(one, "step")} for one in (killed, whole)]
    assert told[0] == told[1]
    # 60 numbers an epoch of each rank, from 1 and from 101 on: all of them once.
    assert sum(told[0][step]["numbers"] for step in range(1, 16)) == sum(range(1, 61)) + sum(range(101, 161))
    stored = elastictrain.load(str(whole))
    assert {name: len(one) for name, one in stored.items() if "per_rank" in name} == dict.fromkeys(
        ("extra.loader.per_rank", "extra.pictures.per_rank"), 2
    )
    command = [sys.executable, "-m", "tests.process.streaming", str(killed), "50"]
    with started(command, log=tmp_path / "alone.txt", cwd=REPOSITORY, extra_environment=AHEAD) as run:
        assert run.wait(60) == 78
        assert "`extra.loader`" in run.output()
    assert last_step(killed) == STEPS
