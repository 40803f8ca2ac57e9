import fcntl
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastictrain.config.composed import FaultGroup
from elastictrain.liveness.monitor_client import MonitoredHost, RankMonitorClient, hold, sweep
from elastictrain.liveness.progress_file import ProgressFile
from elastictrain.liveness.stacks import STACKS_SIGNAL

FACTS = MonitoredHost("000002-abc", "b", (0, 1), "/run", 1.0, 1.0)
UNKNOWN_HERE = 2**22 + 1


@pytest.fixture(autouse=True)
def the_signal_as_before() -> Iterator[None]:
    before = signal.getsignal(STACKS_SIGNAL)
    yield
    signal.signal(STACKS_SIGNAL, before)


def abandon(parent: Path, name: str) -> Path:
    """A folder of a worker that was killed."""
    folder = parent / name
    folder.mkdir(parents=True)
    ProgressFile(str(folder), rank=0, stopped_s=1.0, grace_s=1.0)
    (folder / "r00001.marks.77").touch()
    (folder / "r00000.stacks").touch()
    return folder


def later() -> float:
    return time.time() + 2 * 86400


def test_what_was_left_long_ago_by_the_dead_is_swept(tmp_path: Path) -> None:
    folder, other = abandon(tmp_path / "marks", "000001-old-r00000"), tmp_path / "marks" / "file"
    other.touch()
    assert sweep(str(tmp_path / "marks"), now=time.time()) == []
    assert sweep(str(tmp_path / "marks"), now=later()) == [str(folder)]
    assert list((tmp_path / "marks").iterdir()) == [other]
    assert sweep(str(tmp_path / "nowhere"), now=later()) == []


def test_the_living_of_another_container_keep_theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parent = tmp_path / "marks"
    with monkeypatch.context() as container:
        container.setattr(os, "getpid", lambda: UNKNOWN_HERE)
        monitor_client = RankMonitorClient(FACTS, rank=1, options=FaultGroup(), parent=str(parent))
    with monitor_client:
        before = sorted(Path(monitor_client.folder).iterdir())
        assert sweep(str(parent), now=later()) == []
        assert sorted(Path(monitor_client.folder).iterdir()) == before


def test_one_that_stays_does_not_keep_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, third = (abandon(tmp_path / "marks", f"00000{number}-old-r00000") for number in range(3))
    real = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: sorted(real(path), key=lambda entry: entry.name))
    held = hold(str(first))
    assert sweep(str(tmp_path / "marks"), now=later()) == [str(second), str(third)]
    os.close(held)
    assert sweep(str(tmp_path / "marks"), now=later()) == [str(first)]


def test_several_hold_a_folder_and_nobody_who_sweeps_it(tmp_path: Path) -> None:
    holders = [hold(str(tmp_path)) for _ in range(2)]
    for one in holders:
        os.close(one)
    sweeper = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(sweeper, fcntl.LOCK_EX)
    with pytest.raises(BlockingIOError):
        hold(str(tmp_path))
    os.close(sweeper)
