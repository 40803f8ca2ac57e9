import json
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from elastictrain.bounded_json import encode_record
from elastictrain.config.composed import FaultGroup
from elastictrain.liveness import heartbeats as module
from elastictrain.liveness.diagnosis import RankStatus
from elastictrain.liveness.flight_recorder import Entered
from elastictrain.liveness.heartbeats import Heartbeat, HeartbeatStore, PeerMonitor
from elastictrain.liveness.progress import Phase, ProgressMark


def heartbeats(
    store: dist.Store,
    rank: int,
    *,
    step: int = 3,
    interval_s: float = 0.005,
    clock: Callable[[], float] = time.time,
    stopwatch: Callable[[], float] = time.monotonic,
) -> HeartbeatStore:
    mark = ProgressMark(Phase.REDUCE, step, 0, 0.0, True)
    options = FaultGroup(heartbeat_s=interval_s)
    return HeartbeatStore(
        store, rank=rank, hosts=("a", "b", "c"), mark=lambda: mark, options=options, clock=clock, stopwatch=stopwatch
    )


def name(rank: int) -> str:
    return f"rank {rank} on {'abc'[rank]}"


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5.0
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_nobody_heard_yet() -> None:
    reader = heartbeats(dist.HashStore(), 1)
    heard = reader.last_heard()
    assert list(heard) == [name(2), name(0)]
    assert all("never" in text for text in heard.values())


def test_says_where_each_rank_was_oldest_news_first() -> None:
    store = dist.PrefixStore("incarnation", dist.HashStore())
    writers = [heartbeats(store, rank, step=rank + 1, clock=lambda rank=rank: 100.0 + rank) for rank in (0, 2)]
    for writer in writers:
        writer.start()
    reader = heartbeats(store, 1, clock=lambda: 103.5)
    wait_for(lambda: not any("never" in text for text in reader.last_heard().values()))
    for writer in writers:
        writer.close()
    wanted = {name(0): (1, "3.5 s"), name(2): (3, "1.5 s")}
    heard = reader.last_heard()
    assert list(heard) == list(wanted)
    for rank, (step, age) in wanted.items():
        assert str(ProgressMark(Phase.REDUCE, step, 0, 0.0, True)) in heard[rank]
        assert age in heard[rank]


def test_a_closed_board_writes_no_more() -> None:
    store = dist.HashStore()
    times = iter(range(10**9))
    writer = heartbeats(store, 0, clock=lambda: float(next(times)))
    writer.start()
    wait_for(lambda: store.check(["beat/0"]))
    writer.close()
    before = store.get("beat/0")
    time.sleep(0.03)
    assert store.get("beat/0") == before
    assert not [thread for thread in threading.enumerate() if thread.name == "heartbeat"]


class LostStore:
    """A store whose host is gone."""

    def clone(self) -> "LostStore":
        return self

    def set_timeout(self, timeout: object) -> None:
        pass

    def check(self, keys: list[str]) -> bool:
        raise RuntimeError("BrokenLinks pipe")

    def get(self, key: str) -> bytes:
        raise RuntimeError("BrokenLinks pipe")

    def set(self, key: str, value: str) -> None:
        raise RuntimeError("BrokenLinks pipe")


def test_a_lost_store_is_what_was_heard_last() -> None:
    lost = heartbeats(LostStore(), 0)  # type: ignore[arg-type]
    lost.start()
    (text,) = lost.last_heard().values()
    assert "RuntimeError" in text
    lost.close()


def test_the_first_word_comes_at_once() -> None:
    store = dist.HashStore()
    writer = heartbeats(store, 0, interval_s=60.0)
    writer.start()
    wait_for(lambda: store.check(["beat/0"]))
    writer.close()


class ReturningStore(LostStore):
    """A store that is away for a while."""

    def __init__(self) -> None:
        self.failures = 3
        self.written: list[str] = []

    def set(self, key: str, value: str) -> None:
        if self.failures:
            self.failures -= 1
            raise RuntimeError("BrokenLinks pipe")
        self.written.append(key)


def test_a_store_that_comes_back_is_written_to_again() -> None:
    store = ReturningStore()
    writer = heartbeats(store, 2)  # type: ignore[arg-type]
    writer.start()
    wait_for(lambda: bool(store.written))
    writer.close()
    assert set(store.written) == {"beat/2"}


class SilentStore(LostStore):
    """A store whose host went away without a word."""

    def __init__(self) -> None:
        self.answer = threading.Event()

    def check(self, keys: list[str]) -> bool:
        self.answer.wait(10.0)
        return False


def test_a_store_that_never_answers_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_READ_LIMIT_S", 0.05)
    store = SilentStore()
    began_s = time.monotonic()
    heard = heartbeats(store, 0).last_heard()  # type: ignore[arg-type]
    assert time.monotonic() - began_s < 5.0
    assert len(heard) == 1
    assert not {name(1), name(2)} & set(heard)
    store.answer.set()


def test_statuses_tell_how_long_nothing_new_came_whatever_the_clocks_of_hosts_say() -> None:
    store = dist.HashStore()
    now_s = [50.0]
    reader = heartbeats(store, 1, stopwatch=lambda: now_s[0])
    assert reader.statuses() == []
    writer = heartbeats(store, 0, interval_s=60.0, clock=lambda: 1e9, stopwatch=lambda: 4.5)
    writer.entered = Entered({"0": 57}, last="all_reduce no. 57")
    writer.start()
    wait_for(lambda: bool(reader.statuses()))
    now_s[0] += 4.0
    (first,) = reader.statuses()
    writer.close()
    assert (first.name, first.mark, first.entered) == (name(0), writer.mark(), writer.entered)
    # What it did not say any more has passed, too.
    assert (first.still_s, first.silent_s, first.bound_s) == (4.0, 8.5, 120.0)
    store.set("beat/0", json.dumps({**json.loads(store.get("beat/0")), "number": 2}))
    (second,) = reader.statuses()
    assert second.still_s == 0.0


MARK = {"phase": "data", "step": 1, "micro_batch": 0, "since_s": 0.0, "first_step_done": True}


@pytest.mark.parametrize(
    "broken",
    [
        {"mark": {**MARK, "phase": "lunch"}},
        {"mark": {**MARK, "step": "seven"}},
        {"mark": {**MARK, "micro_batch": True}},
        {"bound_s": None},
        {"silent_s": float("inf")},
        {"entered": {"sequences": {"0": "many"}}},
        {"entered": {"last": "x" * 1000}},
    ],
)
def test_a_heartbeat_of_another_release_was_not_heard(broken: dict[str, Any]) -> None:
    store = dist.HashStore()
    writer = heartbeats(store, 0, interval_s=60.0)
    writer.start()
    wait_for(lambda: store.check(["beat/0"]))
    writer.close()
    reader = heartbeats(store, 1)
    good = json.loads(store.get("beat/0"))
    assert [one.rank for one in reader.statuses()] == [0]
    for beat in ({**good, "status": {**good["status"], **broken}}, {"where": "data of step 1"}, 5):
        store.set("beat/0", json.dumps(beat))
        assert reader.statuses() == []


def test_a_rank_that_falls_is_heard_of_by_all_others() -> None:
    store = dist.HashStore()
    one, other = heartbeats(store, 0), heartbeats(store, 1)
    assert other.failed_peer() is None
    one.announce_failure()
    assert other.failed_peer() == name(0)
    assert one.failed_peer() is None


def test_the_first_one_to_fall_is_the_one_that_is_named() -> None:
    store = dist.HashStore()
    one, two, three = (heartbeats(store, rank) for rank in range(3))
    two.announce_failure()
    one.announce_failure()
    assert three.failed_peer() == name(1)


def test_to_fall_where_the_store_is_lost_is_no_error() -> None:
    heartbeats(LostStore(), 0).announce_failure()  # type: ignore[arg-type]


OPTIONS = FaultGroup(heartbeat_s=1.0)
HOSTS = ("a", "b", "c")


class Group:
    """Rank 0 looks at two others in simulated time; each step of theirs is usual at 0.1 s."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.store = dist.HashStore()
        self.mark = self.mark_of(Phase.REDUCE)
        self.heartbeats = HeartbeatStore(
            self.store, rank=0, hosts=HOSTS, mark=lambda: self.mark, options=OPTIONS, stopwatch=lambda: self.now_s
        )
        self.asked = 0
        self.number = 0
        self.peer_monitor = PeerMonitor(self.heartbeats, entered=self._entered)

    def mark_of(self, phase: Phase, *, step: int = 7) -> ProgressMark:
        return ProgressMark(phase, step, 0, self.now_s, True, usual_s=0.1)

    def beat(self, rank: int, phase: Phase, *, silent_s: float, bound_s: float = 10.0) -> None:
        self.number += 1
        status = RankStatus(rank, HOSTS[rank], ProgressMark(phase, 7, 0, 0.0, True), silent_s, bound_s)
        beat = Heartbeat(status, 0.0, self.number)
        self.store.set(f"beat/{rank}", encode_record(beat).decode())

    def pass_time(self, seconds: float, **phases: Phase) -> None:
        """Second by second; ranks that are named go on to give a pulse."""
        for _ in range(int(seconds)):
            self.now_s += 1.0
            for name, phase in phases.items():
                self.beat(int(name[1:]), phase, silent_s=self.now_s)
            self.peer_monitor.turn()

    def _entered(self) -> Entered:
        self.asked += 1
        return Entered({"0": 57}, last="all_reduce no. 57")


@pytest.fixture
def group() -> Group:
    return Group()


def test_as_long_as_all_goes_well_nobody_is_looked_at(group: Group) -> None:
    group.pass_time(4, r1=Phase.DATA, r2=Phase.REDUCE)
    assert (group.asked, group.peer_monitor.diagnosis, group.peer_monitor.in_vain) == (0, None, False)


def test_the_library_is_asked_once_for_each_silence_and_the_others_are_told(group: Group) -> None:
    group.pass_time(8, r1=Phase.DATA, r2=Phase.REDUCE)
    assert group.asked == 1
    group.mark = group.mark_of(Phase.DATA, step=8)
    assert group.peer_monitor.diagnosis is None, "what was found of another silence says nothing of this one"
    group.pass_time(1, r1=Phase.DATA, r2=Phase.REDUCE)
    group.pass_time(8, r1=Phase.DATA, r2=Phase.REDUCE)
    assert group.asked == 2


def test_who_waits_is_not_in_vain_before_the_guilty_one_had_its_time(group: Group) -> None:
    group.pass_time(12, r1=Phase.DATA, r2=Phase.REDUCE)
    assert not group.peer_monitor.in_vain
    group.pass_time(2, r1=Phase.DATA, r2=Phase.REDUCE)
    assert group.peer_monitor.in_vain
    found = group.peer_monitor.diagnosis
    assert found is not None
    assert [one.rank for one in found.guilty] == [1]
    assert [one.rank for one in found.waiting] == [0, 2]
    group.now_s += 0.5
    later = group.peer_monitor.diagnosis
    assert later is not None
    assert later.guilty[0].silent_s == found.guilty[0].silent_s + 0.5
    group.mark = group.mark_of(Phase.UPDATE)
    assert not group.peer_monitor.in_vain, "it goes on"


def test_a_rank_that_saves_or_compiles_is_waited_for(group: Group) -> None:
    for _ in range(100):
        group.now_s += 1.0
        group.beat(1, Phase.FORWARD, silent_s=group.now_s, bound_s=600.0)
        group.beat(2, Phase.REDUCE, silent_s=group.now_s)
        group.peer_monitor.turn()
    assert not group.peer_monitor.in_vain


def test_a_rank_that_gives_no_sign_any_more_is_frozen(group: Group) -> None:
    group.pass_time(5, r1=Phase.REDUCE, r2=Phase.REDUCE)
    group.pass_time(10, r2=Phase.REDUCE)
    found = group.peer_monitor.diagnosis
    assert found is not None
    assert (found.reason, [one.rank for one in found.guilty]) == ("frozen", [1])
    assert group.peer_monitor.in_vain


def test_who_is_guilty_itself_waits_no_longer(group: Group) -> None:
    group.mark = group.mark_of(Phase.DATA)
    group.pass_time(6, r1=Phase.REDUCE, r2=Phase.REDUCE)
    assert group.peer_monitor.in_vain


def test_a_rank_that_said_that_it_ends_is_lost(group: Group) -> None:
    other = HeartbeatStore(group.store, rank=2, hosts=HOSTS, mark=lambda: group.mark, options=OPTIONS)
    other.announce_failure()
    group.pass_time(1)
    assert group.peer_monitor.failed_peer is not None
    assert (group.peer_monitor.failed_peer.name, group.peer_monitor.failed_peer.since_s) == (name(2), 1.0)
