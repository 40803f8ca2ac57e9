import sys
import threading
import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastictrain.events import Hang
from elastictrain.fault.reasons import Reason
from elastictrain.liveness import rank_monitor as module
from elastictrain.liveness.monitor_client import MonitoredHost
from elastictrain.liveness.progress import Phase
from elastictrain.liveness.rank_monitor import ENDING_S, LAUNCHED_S, PULSE_S, SURVIVOR_S, ObservedRank, RankMonitor, judge
from tests.unit.liveness.observed_ranks import seen


def name(rank: int) -> str:
    return f"rank {rank} on b"


class FakeWorker:
    """Looks as it is told to."""

    def __init__(self, look: ObservedRank | None, *, on_kill: Callable[[], None] = lambda: None) -> None:
        self.now = look
        self.vanished = self.closed = False
        self.on_kill = on_kill
        self.awake_s: list[float] = []
        self.killed = 0

    def look(self, awake_s: float) -> ObservedRank | None:
        self.awake_s.append(awake_s)
        if self.vanished:
            raise ProcessLookupError
        return self.now

    def finished_step(self) -> int:
        if self.closed:
            raise ValueError
        return self.now.marks.mark.finished_step if self.now is not None else 0

    def close(self) -> None:
        self.closed = True

    def kill(self) -> None:
        self.on_kill()
        self.killed += 1


class Host:
    """A watcher of two fake workers in simulated time."""

    def __init__(self, workers: dict[int, FakeWorker], monkeypatch: pytest.MonkeyPatch, *, launched: bool = True) -> None:
        self.now_s = 100.0
        self.workers = workers
        self.hangs: list[tuple[Hang, str]] = []
        self.recorded = threading.Event()
        self.found: list[int] = []
        self.asked: list[tuple[int, int]] = []
        monkeypatch.setattr(module, "take_stacks", self._stacks)
        ranks = tuple(sorted({0, 1, *workers}))
        facts = MonitoredHost("000001-abc", "b", ranks, "/run", 1.0, 1.0)
        self.rank_monitor = RankMonitor(
            "/folder",
            facts,
            find=self._find,  # type: ignore[arg-type]
            record=self._record,
            survivor_s=LAUNCHED_S if launched else SURVIVOR_S,
            clock=lambda: self.now_s,
        )

    @property
    def reasons(self) -> list[Reason]:
        return [reason for reason, _ in self.rank_monitor.reasons]

    def turn(self, after_s: float = 0.2) -> bool:
        self.now_s += after_s
        return self.rank_monitor.turn()

    def _find(self, folder: str, rank: int) -> FakeWorker:
        if rank not in self.workers:
            raise FileNotFoundError(folder)
        self.found.append(rank)
        return self.workers[rank]

    def _stacks(self, folder: str, ranks: list[tuple[int, int]]) -> str:
        self.asked += ranks
        return "stacks\n"

    def _record(self, hang: Hang, stacks: str) -> None:
        self.hangs.append((hang, stacks))
        self.recorded.set()


def test_a_frozen_rank_is_ended_named_and_recorded_once(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    frozen = FakeWorker(seen(1, phase=Phase.FORWARD, unchanged_s=10.5, still_s=10.4))
    host = Host({0: FakeWorker(seen(0, unchanged_s=10.3)), 1: frozen}, monkeypatch)
    assert host.turn()
    assert host.turn()
    assert host.recorded.wait(5)
    assert (frozen.killed, host.workers[0].killed) == (1, 0)
    ((hang, stacks),) = host.hangs
    assert (hang.guilty, hang.hosts, hang.reason) == ((name(1),), ("b",), "frozen")
    assert (hang.phase, hang.step, hang.silent_s, hang.bound_s) == ("forward", 7, 10.5, 10.0)
    assert hang.waiting == {name(0): str(seen(0).marks.mark)}
    assert stacks == "stacks\n"
    assert host.asked == [(0, 1000), (1, 1001)]
    told = capfd.readouterr().err
    assert told.count(hang.text) == 1
    (reason,) = host.reasons
    assert (reason.rank, reason.exit_code, reason.phase, reason.step) == (1, 71, "forward", 7)


def test_the_newest_finished_step_is_that_of_now_also_of_the_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = FakeWorker(seen(0, step=9, finished_step=7)), FakeWorker(seen(1, step=9, finished_step=8))
    host = Host({0: one, 1: other}, monkeypatch)
    assert host.rank_monitor.finished_step() == 0, "nobody was seen yet"
    host.turn()
    assert host.rank_monitor.finished_step() == 8
    # Between two turns it goes on, and dies.
    one.now = seen(0, step=12, finished_step=10, gone_s=0.0)
    assert host.rank_monitor.finished_step() == 10
    host.turn()
    one.closed = other.closed = True
    assert host.rank_monitor.finished_step() == 10


def test_a_survivor_is_ended_without_a_record_of_a_hang(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    host = Host({0: FakeWorker(seen(0)), 1: FakeWorker(seen(1, gone_s=LAUNCHED_S + 0.1))}, monkeypatch)
    assert host.turn()
    assert host.workers[0].killed == 1
    assert not host.hangs
    assert name(0) in capfd.readouterr().err
    assert not host.reasons[0].guilty


def test_a_watcher_that_was_frozen_itself_blames_nobody_for_that(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = FakeWorker(seen(0))
    host = Host({0: worker}, monkeypatch)
    host.turn()
    host.turn(after_s=600.0)
    assert worker.awake_s == [pytest.approx(0.2), 1.0]


def test_it_leaves_when_the_last_one_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host({0: FakeWorker(seen(0, phase=Phase.END)), 1: FakeWorker(seen(1, gone_s=9.0))}, monkeypatch)
    assert host.turn()
    host.workers[0].now = seen(0, gone_s=0.0)
    assert not host.turn()


def test_it_leaves_when_all_have_ended_or_left_the_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host({0: FakeWorker(seen(0)), 1: FakeWorker(seen(1, gone_s=0.1))}, monkeypatch)
    assert host.turn()
    host.workers[0].now = seen(0, phase=Phase.DETACH)
    assert host.turn()
    host.workers[0].now = seen(0, phase=Phase.DETACH, closed=True)
    assert not host.turn()
    assert (host.workers[0].killed, host.hangs) == (0, [])


def test_it_closes_what_it_has_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher watches one generation after the other."""
    monkeypatch.setattr(module, "TURN_S", 0.001)
    host = Host({0: FakeWorker(seen(0, closed=True)), 1: FakeWorker(seen(1, gone_s=0.1))}, monkeypatch)
    host.rank_monitor.run()
    assert [worker.closed for worker in host.workers.values()] == [True, True]


def test_it_does_not_wait_for_ever_for_a_first_one(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host({}, monkeypatch)
    assert host.turn(9.0)
    assert not host.turn(2.0)


class FullTerminal:
    """Whoever reads it has been stopped."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.reads_again = threading.Event()

    def write(self, text: str) -> None:
        self.told.append(text)
        self.reads_again.wait(10.0)

    def flush(self) -> None:
        pass


def test_a_terminal_that_is_not_read_keeps_nobody_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, told_at_kill, reasons_at_kill = FullTerminal(), [], []

    def on_kill() -> None:
        told_at_kill.append(len(terminal.told))
        reasons_at_kill.append(len(host.reasons))

    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(module, "_TELL_S", 0.01)
    frozen = FakeWorker(seen(1, phase=Phase.FORWARD, unchanged_s=10.5, still_s=10.4), on_kill=on_kill)
    host = Host({0: FakeWorker(seen(0)), 1: frozen}, monkeypatch)
    began_s = time.monotonic()
    try:
        assert host.turn()
        assert (told_at_kill, reasons_at_kill) == ([0], [1])
        assert host.recorded.wait(5)
        # What comes after that is seen to, too.
        frozen.now = seen(1, gone_s=LAUNCHED_S + 0.1)
        assert host.turn()
        assert host.workers[0].killed == 1
        assert time.monotonic() - began_s < 5
        assert len(terminal.told) == 2
    finally:
        terminal.reads_again.set()


@pytest.mark.parametrize(
    "ends",
    [seen(0, ending=True), seen(0, phase=Phase.END, unchanged_s=1000.0), seen(0, phase=Phase.END, stopped=True, still_s=9.0)],
    ids=["ending", "end", "stopped at the end"],
)
def test_why_a_rank_ends_is_its_own_to_say(ends: ObservedRank, monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host({0: FakeWorker(ends), 1: FakeWorker(seen(1, gone_s=8.5))}, monkeypatch)
    host.turn()
    assert host.workers[0].killed == 1
    ((reason, own_counts),) = host.rank_monitor.reasons
    assert (reason.rank, reason.exit_code, own_counts) == (0, 71, True)


def test_what_a_rank_said_before_it_hung_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    frozen = FakeWorker(seen(1, phase=Phase.FORWARD, unchanged_s=10.5, still_s=10.4))
    host = Host({1: frozen}, monkeypatch)
    host.turn()
    ((reason, own_counts),) = host.rank_monitor.reasons
    assert (reason.phase, own_counts) == ("forward", False)


def test_one_that_was_killed_before_it_showed_anything_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host({0: FakeWorker(None), 1: FakeWorker(seen(1))}, monkeypatch)
    assert host.turn(11.0)
    host.workers[0].vanished = True
    assert host.turn()
    host.workers[1].now = seen(1, gone_s=0.0)
    assert not host.turn()
    # Its number may be another process's by now.
    assert host.found == [0, 1]


def test_it_leaves_when_all_were_killed_before_they_showed_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host({0: FakeWorker(None), 1: FakeWorker(None)}, monkeypatch)
    assert host.turn(11.0)
    for worker in host.workers.values():
        worker.vanished = True
    assert not host.turn()


def kinds(*ranks: object) -> list[tuple[int, str]]:
    return [(one.seen.marks.rank, one.kind) for one in judge(ranks)]  # type: ignore[arg-type]


def test_a_healthy_host_is_left_alone() -> None:
    assert kinds(seen(0), seen(1, unchanged_s=9.0, still_s=0.3)) == []


@pytest.mark.parametrize(("still_s", "expected"), [(8.1, [(1, "stopped")]), (7.9, [])])
def test_who_is_stopped_is_given_the_time_to_be_continued(still_s: float, expected: list[tuple[int, str]]) -> None:
    assert kinds(seen(0), seen(1, phase=Phase.SAVE, unchanged_s=still_s, still_s=still_s, stopped=True)) == expected


@pytest.mark.parametrize(
    ("unchanged_s", "still_s", "expected"),
    [
        (10.1, PULSE_S + 0.1, [(0, "frozen")]),
        (9.9, 9.9, []),
        # It runs: it knows more of the group than we, and ends itself.
        (100.0, 0.2, []),
        (143.1, 0.2, [(0, "stuck")]),
        (142.9, 0.2, []),
    ],
)
def test_who_cannot_end_itself_is_ended(unchanged_s: float, still_s: float, expected: list[tuple[int, str]]) -> None:
    assert kinds(seen(0, unchanged_s=unchanged_s, still_s=still_s)) == expected


def test_a_rank_that_is_ended_as_left_behind_is_among_those_that_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    frozen = FakeWorker(seen(1, phase=Phase.FORWARD, unchanged_s=10.5, still_s=10.4))
    behind, gone = FakeWorker(seen(0)), FakeWorker(seen(2, gone_s=LAUNCHED_S + 0.1))
    host = Host({0: behind, 1: frozen, 2: gone}, monkeypatch)
    host.turn()
    assert host.recorded.wait(5)
    assert (behind.killed, frozen.killed) == (1, 1)
    ((hang, _),) = host.hangs
    assert hang.guilty == (name(1),)
    assert list(hang.waiting) == [name(0)]


def test_who_says_why_it_ends_is_not_taken_for_frozen() -> None:
    assert kinds(seen(0, unchanged_s=15.0, still_s=5.0, ending=True)) == []


def test_a_survivor_is_not_waited_for() -> None:
    gone = seen(1, gone_s=SURVIVOR_S + 0.1)
    assert kinds(seen(0), gone) == [(0, "left behind")]
    assert kinds(seen(0), seen(1, gone_s=SURVIVOR_S - 0.1)) == []
    assert kinds(seen(0, ending=True), gone) == []
    assert kinds(seen(0, ending=True), seen(1, gone_s=ENDING_S + 0.1)) == [(0, "left behind")]


@pytest.mark.parametrize(("launched", "patience_s"), [(True, LAUNCHED_S), (False, SURVIVOR_S)])
def test_a_launcher_gets_the_time_to_free_the_survivors(
    launched: bool, patience_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    for gone_s, killed in ((patience_s - 0.1, 0), (patience_s + 0.1, 1)):
        host = Host({0: FakeWorker(seen(0)), 1: FakeWorker(seen(1, gone_s=gone_s))}, monkeypatch, launched=launched)
        assert host.turn()
        assert host.workers[0].killed == killed


def test_at_the_end_of_a_run_the_others_leave_first() -> None:
    assert kinds(seen(0), seen(1, phase=Phase.END, gone_s=60.0)) == []
    assert kinds(seen(0, phase=Phase.END), seen(1, gone_s=60.0)) == []


@given(st.floats(0.0, 1e6), st.floats(0.0, 1e6), st.booleans(), st.booleans(), st.none() | st.floats(0.0, 1e6))
def test_who_has_left_its_generation_is_not_ended_and_nobody_is_left_behind_by_it(
    unchanged_s: float, still_s: float, stopped: bool, ending: bool, gone_s: float | None
) -> None:
    left = seen(
        0,
        phase=Phase.DETACH,
        unchanged_s=unchanged_s,
        still_s=still_s,
        stopped=stopped,
        ending=ending,
        gone_s=gone_s,
        closed=True,
    )
    assert kinds(left, seen(1)) == []
    assert kinds(left, seen(1, gone_s=SURVIVOR_S + 0.1), seen(2)) == [(2, "left behind")]
    assert kinds(left, seen(1, unchanged_s=10.5, still_s=10.4)) == [(1, "frozen")]


@given(unchanged_s=st.floats(0.0, 9.9), still_s=st.floats(0.0, 9.9), phase=st.sampled_from(list(Phase)))
def test_nobody_is_ended_within_its_bound(unchanged_s: float, still_s: float, phase: Phase) -> None:
    assert kinds(seen(0, phase=phase, unchanged_s=unchanged_s, still_s=still_s)) == []


@given(st.floats(0.0, 1e4), st.floats(0.0, 1e4), st.booleans())
def test_the_dead_are_not_ended_again(unchanged_s: float, still_s: float, stopped: bool) -> None:
    assert kinds(seen(0, unchanged_s=unchanged_s, still_s=still_s, stopped=stopped, gone_s=9.0)) == []


@pytest.mark.parametrize(
    ("look", "tokens"),
    [
        (seen(0, unchanged_s=10.5, still_s=8.5, stopped=True), ["8.5 s", "8 s"]),
        (seen(0, unchanged_s=10.5, still_s=10.4), ["10.5 s", "10 s", "10.4 s"]),
        (seen(0, unchanged_s=150.0), ["150.0 s"]),
    ],
    ids=["stopped", "frozen", "stuck"],
)
def test_a_decision_says_where_the_rank_is_and_how_long_it_was_waited_for(look: ObservedRank, tokens: list[str]) -> None:
    (decision,) = judge([look])
    assert [token for token in (str(look.marks.mark), *tokens) if token not in str(decision)] == []
