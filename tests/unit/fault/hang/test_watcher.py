import threading
from pathlib import Path

import pytest

from elastictrain.events import Hang
from elastictrain.fault.hang import watcher as module
from elastictrain.fault.hang.judge import Seen
from elastictrain.fault.hang.outpost import HostFacts
from elastictrain.fault.hang.watcher import Watcher
from elastictrain.fault.reasons import read_reasons
from elastictrain.fault.whereabouts import Phase
from tests.unit.fault.hang.seen import seen


class FakeWorker:
    """Looks as it is told to."""

    def __init__(self, look: Seen | None) -> None:
        self.now = look
        self.awake_s: list[float] = []
        self.killed = 0

    def look(self, awake_s: float) -> Seen | None:
        self.awake_s.append(awake_s)
        return self.now

    def kill(self) -> None:
        self.killed += 1


class Host:
    """A watcher of two fake workers in simulated time."""

    def __init__(self, folder: Path, workers: dict[int, FakeWorker], monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        self.workers = workers
        self.hangs: list[tuple[Hang, str]] = []
        self.recorded = threading.Event()
        self.asked: list[tuple[int, int]] = []
        monkeypatch.setattr(module, "take_stacks", self._stacks)
        facts = HostFacts("000001-abc", "b", (0, 1), "/run", 1.0, 1.0, launcher_folder=str(folder))
        self.watcher = Watcher("/folder", facts, find=self._find, record=self._record, clock=lambda: self.now_s)

    def turn(self, after_s: float = 0.2) -> bool:
        self.now_s += after_s
        return self.watcher.turn()

    def _find(self, folder: str, rank: int) -> FakeWorker:
        if rank not in self.workers:
            raise FileNotFoundError(folder)
        return self.workers[rank]

    def _stacks(self, folder: str, ranks: list[tuple[int, int]]) -> str:
        self.asked += ranks
        return "stacks\n"

    def _record(self, hang: Hang, stacks: str) -> None:
        self.hangs.append((hang, stacks))
        self.recorded.set()


def test_a_frozen_rank_is_ended_named_and_recorded_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    frozen = FakeWorker(seen(1, phase=Phase.FORWARD, unchanged_s=10.5, still_s=10.4))
    host = Host(tmp_path, {0: FakeWorker(seen(0, unchanged_s=10.3)), 1: frozen}, monkeypatch)
    assert host.turn()
    assert host.turn()
    assert host.recorded.wait(5)
    assert (frozen.killed, host.workers[0].killed) == (1, 0)
    ((hang, stacks),) = host.hangs
    assert (hang.guilty, hang.hosts, hang.reason) == (("rank 1 on b",), ("b",), "frozen")
    assert (hang.phase, hang.step, hang.silent_s, hang.bound_s) == ("forward", 7, 10.5, 10.0)
    assert hang.waiting == {"rank 0 on b": "reduce of step 7"}
    assert stacks == "stacks\n"
    assert host.asked == [(0, 1000), (1, 1001)]
    told = capfd.readouterr().err
    assert told.count("rank 1 on b has been in forward of step 7, micro-batch 0 for 10.5 s (bound 10 s)") == 1
    assert "rank 0 in reduce of step 7" in told
    (reason,) = read_reasons(str(tmp_path))
    assert (reason.rank, reason.exit_code, reason.phase, reason.step) == (1, 71, "forward", 7)


def test_a_survivor_is_ended_without_a_record_of_a_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    host = Host(tmp_path, {0: FakeWorker(seen(0)), 1: FakeWorker(seen(1, gone_s=1.5))}, monkeypatch)
    assert host.turn()
    assert host.workers[0].killed == 1
    assert not host.hangs
    assert "rank 0 on b waits in reduce of step 7 for a rank of this host that is gone" in capfd.readouterr().err


def test_a_watcher_that_was_frozen_itself_blames_nobody_for_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = FakeWorker(seen(0))
    host = Host(tmp_path, {0: worker}, monkeypatch)
    host.turn()
    host.turn(after_s=600.0)
    assert worker.awake_s == [pytest.approx(0.2), 1.0]


def test_it_leaves_when_the_last_one_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(tmp_path, {0: FakeWorker(seen(0, phase=Phase.END)), 1: FakeWorker(seen(1, gone_s=9.0))}, monkeypatch)
    assert host.turn()
    host.workers[0].now = seen(0, gone_s=0.0)
    assert not host.turn()


def test_it_does_not_wait_for_ever_for_a_first_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(tmp_path, {}, monkeypatch)
    assert host.turn(9.0)
    assert not host.turn(2.0)
