"""Leases on slots, snapshots that wait for the other ranks of their host, and what became of their steps."""

from pathlib import Path
from typing import cast

import pytest

from elastictrain.checkpoint.memory.slot import Slot
from elastictrain.checkpoint.saver.messages import HostRanks, Message
from elastictrain.checkpoint.saver.pending_snapshots import LeasedSnapshot, PendingSnapshots, SlotLeases, StepOutcomes
from elastictrain.errors import InvalidCheckpointError
from tests.unit.checkpoint.memory.madeslots import facts_of, fill, layout_of, put


def writer_of(folder: Path, name: str) -> Slot:
    return Slot.make(f"{folder}/{name}", size_bytes=layout_of().size_bytes)


def test_a_pinned_snapshot_cannot_be_written_until_the_last_pin_goes(tmp_path: Path) -> None:
    name = put(tmp_path, facts_of(3))
    leases, writer = SlotLeases(str(tmp_path)), writer_of(tmp_path, name)
    first, second = leases.lease(name), leases.lease(name)
    assert first is not None
    assert second is not None
    assert first.facts == facts_of(3)
    assert first.layout == layout_of()
    leases.release(first)
    assert not writer.lock(shared=False)
    leases.release(second)
    assert writer.lock(shared=False)
    assert leases.lease(name) is None
    writer.begin()
    writer.unlock()
    assert leases.lease(name) is None, "it is torn"
    assert writer.lock(shared=False), "and not held for that"
    writer.close()
    leases.close()


def test_a_slot_made_anew_under_the_same_name_is_another(tmp_path: Path) -> None:
    name = put(tmp_path, facts_of(3))
    leases = SlotLeases(str(tmp_path))
    old = leases.lease(name)
    assert old is not None
    (tmp_path / name).unlink()
    put(tmp_path, facts_of(8))
    new, again = leases.lease(name), leases.lease(name)
    assert new is not None
    assert again is not None
    assert (old.slot.facts, new.facts) == (facts_of(3), facts_of(8))
    # Letting go of the old one lets go of nothing else.
    leases.release(old)
    with pytest.raises(OSError, match="Bad file descriptor"):
        old.slot.lock(shared=True)
    leases.release(again)
    writer = writer_of(tmp_path, name)
    assert not writer.lock(shared=False)
    leases.release(new)
    assert writer.lock(shared=False)
    writer.close()
    leases.close()


def test_what_cannot_be_pinned(tmp_path: Path) -> None:
    leases = SlotLeases(str(tmp_path))
    with pytest.raises(OSError):
        leases.lease("own-r00000-s0")
    name = put(tmp_path, facts_of(3))
    for layout in tmp_path.glob("layout-*"):
        layout.unlink()
    with pytest.raises(InvalidCheckpointError, match="layout-"):
        leases.lease(name)
    writer = writer_of(tmp_path, name)
    assert writer.lock(shared=False), "a failure holds nothing"
    fill(writer, facts_of(4), layout_of())
    writer.close()
    leases.close()


STATION = HostRanks("000001-aa", 4, (2, 3))


def leased(rank: int, step: int) -> LeasedSnapshot:
    return LeasedSnapshot(cast(Slot, None), facts_of(step, rank=rank, world_size=4, reason="interval"), layout_of())


def test_a_step_is_handed_over_when_the_last_rank_of_the_host_has_it() -> None:
    desk = PendingSnapshots(STATION)
    assert desk.arrived(leased(3, 5)) == ()
    assert desk.arrived(leased(2, 6)) == ()
    job = desk.arrived(leased(2, 5))
    assert [(one.facts.rank, one.facts.step) for one in job] == [(2, 5), (3, 5)]
    assert set(desk.waiting) == {6}
    assert not STATION.leader


def test_a_new_incarnation_gives_up_what_waits_and_may_begin_at_an_older_step() -> None:
    desk = PendingSnapshots(STATION, saved_step=9)
    waiting = leased(3, 12)
    desk.arrived(waiting)
    assert desk.move_to(STATION) == []
    assert desk.waiting
    assert desk.move_to(HostRanks("000002-bb", 4, (2, 3))) == [waiting]
    assert not desk.waiting
    assert desk.saved_step == -1


def test_what_all_ranks_have_passed_is_overtaken() -> None:
    desk = PendingSnapshots(STATION)
    late = leased(3, 5)
    desk.arrived(late)
    desk.newest = {3: 8}
    assert desk.overtaken() == [], "nothing is known of rank 2"
    desk.newest = {2: 5, 3: 8}
    assert desk.overtaken() == []
    desk.newest = {2: 6, 3: 8}
    assert desk.overtaken() == [late.facts.step]
    desk.give_up(late.facts.step)
    assert desk.overtaken() == []


def test_a_step_is_given_up() -> None:
    desk = PendingSnapshots(STATION)
    one = leased(3, 5)
    desk.arrived(one)
    assert desk.give_up(4) == []
    assert desk.give_up(5) == [one]
    assert desk.give_up(5) == []
    assert PendingSnapshots().overtaken() == []


def said(step: int) -> Message:
    return {"op": "saved", "step": step}


def test_a_step_is_saved_once_and_again_where_it_failed() -> None:
    books = StepOutcomes()
    books.announced(5)
    assert not books.is_handed_over(5)
    books.handed_over(5)
    books.announced(5)
    assert books.is_handed_over(5), "it is announced once more by a worker that was not connected"
    books.failed(5)
    assert not books.is_handed_over(5)


def test_who_has_done_its_part_takes_part_in_the_next_attempt() -> None:
    books = StepOutcomes()
    books.handed_over(5)
    books.done_here(5)
    assert books.is_handed_over(5)
    books.announced(5)
    assert not books.is_handed_over(5)
    books.handed_over(5)
    books.announced(5)
    assert books.is_handed_over(5)


def test_the_newest_outcomes_are_told_again_until_a_step_is_tried_again() -> None:
    books = StepOutcomes()
    for step in range(12):
        books.told(step, said(step))
    assert [message["step"] for message in books.to_tell_again] == list(range(4, 12))
    books.announced(7)
    assert said(7) not in books.to_tell_again
    books.clear()
    assert books.to_tell_again == ()
