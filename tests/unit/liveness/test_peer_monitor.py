import json

import pytest
import torch.distributed as dist

from elastictrain.config.composed import FaultGroup
from elastictrain.liveness.diagnosis import Entered
from elastictrain.liveness.heartbeats import HeartbeatStore
from elastictrain.liveness.peer_monitor import PeerMonitor
from elastictrain.liveness.progress import Phase, ProgressMark

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
        self.peer_monitor = PeerMonitor(
            self.heartbeats, rank=0, mark=lambda: self.mark, entered=self._entered, options=OPTIONS, clock=lambda: self.now_s
        )

    def mark_of(self, phase: Phase, *, step: int = 7) -> ProgressMark:
        return ProgressMark(phase, step, 0, self.now_s, True, usual_s=0.1)

    def beat(self, rank: int, phase: Phase, *, silent_s: float, bound_s: float = 10.0) -> None:
        self.number += 1
        place = {"where": "", "phase": phase, "step": 7, "micro_batch": 0, "first_step_done": True}
        beat = {**place, "silent_s": silent_s, "bound_s": bound_s, "time": 0.0, "number": self.number}
        self.store.set(f"beat/{rank}", json.dumps(beat))

    def pass_time(self, seconds: float, **phases: Phase) -> None:
        """Second by second; ranks that are named go on to give a pulse."""
        for _ in range(int(seconds)):
            self.now_s += 1.0
            for name, phase in phases.items():
                self.beat(int(name[1:]), phase, silent_s=self.now_s)
            self.peer_monitor.turn()

    def _entered(self) -> Entered:
        self.asked += 1
        return Entered({"0": 57}, "all_reduce no. 57")


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
    assert [one.name for one in found.guilty] == ["rank 1 on b"]
    assert [one.name for one in found.waiting] == ["rank 0 on a", "rank 2 on c"]
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
    assert (group.peer_monitor.failed_peer.name, group.peer_monitor.failed_peer.since_s) == ("rank 2 on c", 1.0)
