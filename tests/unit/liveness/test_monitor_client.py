import errno
import fcntl
import os
import signal
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from elastictrain.config.composed import FaultGroup
from elastictrain.liveness import monitor_client as module
from elastictrain.liveness.monitor_client import MonitoredHost, RankMonitorClient, clear_if_unlocked, lock_folder, workers_of
from elastictrain.liveness.progress import Phase, ProgressMark
from elastictrain.liveness.progress_file import ProgressFile, ProgressFileReader, progress_path
from elastictrain.liveness.rank_monitor import LiveWorker
from elastictrain.liveness.stacks import STACKS_SIGNAL
from elastictrain.storage.private import NameTakenError, sweep_folders

FACTS = MonitoredHost("000001-abc", "b", (4, 5), "/run", 1.0, 1.0)
OPTIONS = FaultGroup(step_timeout_s=40.0)


@pytest.fixture(autouse=True)
def the_signal_as_before() -> Iterator[None]:
    before = signal.getsignal(STACKS_SIGNAL)
    yield
    signal.signal(STACKS_SIGNAL, before)


def test_it_shows_where_the_worker_is_and_leaves_nothing(tmp_path: Path) -> None:
    parent = tmp_path / "marks"
    with closing(RankMonitorClient(FACTS, rank=5, options=OPTIONS, parent=str(parent))) as monitor_client:
        assert parent.stat().st_mode & 0o777 == 0o700
        monitor_client.write(ProgressMark(Phase.REDUCE, 7, 0, 1.0, True, usual_s=2.0))
        found = ProgressFileReader(monitor_client.folder, 5).read()
        assert found is not None
        assert (found.mark.phase, found.bound_s, found.limit_s, found.stopped_s) == (Phase.REDUCE, 20.0, 40.0, 10.0)
        assert workers_of(monitor_client.folder, FACTS.ranks) == [(5, os.getpid())]
        assert "test_it_shows_where_the_worker_is" in monitor_client.take_stacks()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_others_can_enter_is_not_used(tmp_path: Path) -> None:
    parent = tmp_path / "marks"
    parent.mkdir(mode=0o755)
    parent.chmod(0o755)
    with pytest.raises(NameTakenError, match=str(parent)):
        RankMonitorClient(FACTS, rank=5, options=OPTIONS, parent=str(parent))


def test_a_living_worker_is_seen_to_go_on(tmp_path: Path) -> None:
    with closing(RankMonitorClient(FACTS, rank=5, options=OPTIONS, parent=str(tmp_path / "marks"))) as monitor_client:
        worker = LiveWorker(monitor_client.folder, 5)
        first = worker.look(0.0)
        second = worker.look(0.5)
        monitor_client.progress.beat()
        third = worker.look(0.5)
        monitor_client.write(ProgressMark(Phase.REDUCE, 9, 0, 1.0, True, finished_step=7))
        fourth = worker.look(0.5)
        steps = [worker.finished_step()]
        monitor_client.write(ProgressMark(Phase.DATA, 10, 0, 2.0, True, finished_step=8))
    # Its process has closed the file and removed it; what it has written last stays readable until the reader is closed.
    steps.append(worker.finished_step())
    worker.close()
    assert steps == [7, 8]
    with pytest.raises(ValueError, match="closed"):
        worker.finished_step()
    looks = [first, second, third, fourth]
    assert [(one.unchanged_s, one.still_s) for one in looks if one is not None] == [(0, 0), (0.5, 0.5), (1.0, 0), (0, 0.5)]
    assert all(one is not None and one.gone_s is None and not one.stopped for one in looks)


def test_one_that_was_killed_in_the_middle_of_its_first_mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone, end = os.pipe()
    # A descriptor of a process can be read from when that has ended.
    monkeypatch.setattr(os, "pidfd_open", lambda pid: gone)
    with closing(RankMonitorClient(FACTS, rank=5, options=OPTIONS, parent=str(tmp_path / "marks"))) as monitor_client:
        with open(progress_path(monitor_client.folder, 5), "r+b") as file:  # noqa: PTH123
            file.seek(64 + 20)
            file.write(b"\xff\xff")
        worker = LiveWorker(monitor_client.folder, 5)
        assert worker.look(0.0) is None
        assert worker.finished_step() == 0
        os.close(end)
        with pytest.raises(ProcessLookupError):
            worker.look(0.2)
    os.close(gone)


@pytest.mark.parametrize("fails", ["ProgressFile", "lock_folder", "dump_stacks_on_signal"])
def test_one_that_cannot_be_set_up_leaves_nothing(fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module, fails, refuse)
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    with pytest.raises(OSError) as refused:
        RankMonitorClient(FACTS, rank=5, options=OPTIONS, parent=str(tmp_path / "marks"))
    assert refused.value.errno == errno.ENOSPC
    assert list(tmp_path.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


SWEPT = MonitoredHost("000002-abc", "b", (0, 1), "/run", 1.0, 1.0)
UNKNOWN_HERE = 2**22 + 1


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
    assert sweep_folders(str(tmp_path / "marks"), clear=clear_if_unlocked, now=time.time()) == []
    assert sweep_folders(str(tmp_path / "marks"), clear=clear_if_unlocked, now=later()) == [str(folder)]
    assert list((tmp_path / "marks").iterdir()) == [other]
    assert sweep_folders(str(tmp_path / "nowhere"), clear=clear_if_unlocked, now=later()) == []


def test_the_living_of_another_container_keep_theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parent = tmp_path / "marks"
    with monkeypatch.context() as container:
        container.setattr(os, "getpid", lambda: UNKNOWN_HERE)
        monitor_client = RankMonitorClient(SWEPT, rank=1, options=FaultGroup(), parent=str(parent))
    with closing(monitor_client):
        before = sorted(Path(monitor_client.folder).iterdir())
        assert sweep_folders(str(parent), clear=clear_if_unlocked, now=later()) == []
        assert sorted(Path(monitor_client.folder).iterdir()) == before


def test_one_that_stays_does_not_keep_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, third = (abandon(tmp_path / "marks", f"00000{number}-old-r00000") for number in range(3))
    real = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: sorted(real(path), key=lambda entry: entry.name))
    held = lock_folder(str(first), fcntl.LOCK_SH)
    assert sweep_folders(str(tmp_path / "marks"), clear=clear_if_unlocked, now=later()) == [str(second), str(third)]
    os.close(held)
    assert sweep_folders(str(tmp_path / "marks"), clear=clear_if_unlocked, now=later()) == [str(first)]


def test_several_hold_a_folder_and_nobody_who_sweeps_it(tmp_path: Path) -> None:
    holders = [lock_folder(str(tmp_path), fcntl.LOCK_SH) for _ in range(2)]
    for one in holders:
        os.close(one)
    sweeper = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(sweeper, fcntl.LOCK_EX)
    with pytest.raises(BlockingIOError):
        lock_folder(str(tmp_path), fcntl.LOCK_SH)
    os.close(sweeper)
