import threading
import time
from collections.abc import Callable

from elastictrain.preflight.group.attendance import Attendance, DeadlineThread, Entries, PartState, RankResult
from tests.unit.preflight.table import Table

DONE = RankResult(PartState.DONE, {"figure": 1.5})
LIMIT_S, GRACE_S = 0.2, 0.1


def settle(behaviour: list[Callable[[Entries, float], Attendance | None]]) -> list[Attendance | None]:
    """What each rank makes of a part in which each behaves in its own way."""
    table, found = Table(), [None] * len(behaviour)

    def be(rank: int) -> None:
        entries = Entries(table, rank=rank, world_size=len(behaviour), grace_s=GRACE_S)
        found[rank] = behaviour[rank](entries, time.monotonic())

    threads = [threading.Thread(target=be, args=(rank,)) for rank in range(len(behaviour))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def well(entries: Entries, began: float) -> Attendance:
    entries.enter("part")
    return entries.settle("part", DONE, began=began, limit_s=LIMIT_S)


def absent(entries: Entries, began: float) -> None:
    """Does nothing."""


def silent(entries: Entries, began: float) -> None:
    entries.enter("part")


def test_all_hear_the_same() -> None:
    found = settle([well, well, well])
    assert found[0] is not None
    assert found[0].complete
    assert found[0].words == {0: DONE, 1: DONE, 2: DONE}
    assert found[1] == found[2] == found[0]


def test_who_is_missing_and_who_entered() -> None:
    began = time.monotonic()
    found = settle([well, absent, silent, well])
    assert time.monotonic() - began < 1.0
    assert found[0] is not None
    assert not found[0].complete
    assert found[0].entered == {0, 2, 3}
    assert set(found[0].words) == {0, 3}
    assert found[3] == found[0]


def test_without_rank_0_the_others_find_out_for_themselves() -> None:
    found = settle([absent, well, well])
    for one in found[1:]:
        assert one is not None
        assert one.entered == {1, 2}
        assert set(one.words) == {1, 2}


def test_one_that_waits_for_trouble_gets_all_words() -> None:
    """A rank that fails at once must not publish before the others, which are stuck with it, have said so."""

    def broken(entries: Entries, began: float) -> Attendance:
        entries.enter("part")
        return entries.settle("part", RankResult(PartState.BROKEN, detail="no room"), began=began, limit_s=LIMIT_S)

    def stuck(entries: Entries, began: float) -> Attendance:
        entries.enter("part")
        time.sleep(LIMIT_S)
        return entries.settle("part", RankResult(PartState.STUCK, num_begun=2), began=began, limit_s=LIMIT_S)

    found = settle([broken, stuck, stuck])
    assert found[0] is not None
    assert [word.state for _, word in sorted(found[0].words.items())] == [PartState.BROKEN, PartState.STUCK, PartState.STUCK]


def test_parts_do_not_mix() -> None:
    table = Table()
    entries = Entries(table, rank=0, world_size=1, grace_s=0.0)
    entries.enter("a")
    first = entries.settle("a", DONE, began=0.0, limit_s=0.0)
    second = entries.settle("b", RankResult(PartState.BROKEN, detail="x"), began=0.0, limit_s=0.0)
    assert first.complete
    assert not second.complete


def test_a_lane_answers_whatever_happens() -> None:
    lane, gate = DeadlineThread(lambda: None), threading.Event()

    def fine(at: Callable[[str], None]) -> object:
        at("one")
        at("two")
        return [1, 2]

    def broken(at: Callable[[str], None]) -> object:
        at("three")
        raise ValueError("first line\nsecond line")

    def unspeakable(at: Callable[[str], None]) -> object:
        return object()

    def endless(at: Callable[[str], None]) -> object:
        at("four")
        gate.wait(30)
        return None

    assert lane.run(fine, limit_s=10) == RankResult(PartState.DONE, [1, 2], num_begun=2)
    assert lane.run(broken, limit_s=10) == RankResult(PartState.BROKEN, detail="ValueError: first line (three)", num_begun=1)
    assert lane.run(unspeakable, limit_s=10).state is PartState.BROKEN
    assert lane.run(endless, limit_s=0.1) == RankResult(PartState.STUCK, detail="four", num_begun=1)
    assert lane.run(fine, limit_s=0.1).state is PartState.STUCK
    gate.set()
    lane.close()


def test_a_lane_prepares_its_own_thread() -> None:
    names = []
    lane = DeadlineThread(lambda: names.append(threading.current_thread().name))
    assert lane.run(lambda _: threading.current_thread().name, limit_s=10).figure == names[0] == "group-checks"
    lane.close()
