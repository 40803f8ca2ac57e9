"""Leases on slots, snapshots that wait for the other ranks of their host, and what became of their steps."""

from pathlib import Path

import pytest

from elastictrain.checkpoint.memory.slot import Slot
from elastictrain.checkpoint.saver.messages import HostRanks, Saved
from elastictrain.checkpoint.saver.pending_snapshots import IncarnationSaves, LeasedSnapshot, lease
from elastictrain.errors import InvalidCheckpointError
from tests.unit.checkpoint.memory.madeslots import facts_of, fill, layout_of, put


def writer_of(folder: Path, name: str) -> Slot:
    return Slot.make(f"{folder}/{name}", size_bytes=layout_of().size_bytes)


def test_a_leased_snapshot_cannot_be_written_until_the_last_lease_ends(tmp_path: Path) -> None:
    name = put(tmp_path, facts_of(3))
    folder, writer = str(tmp_path), writer_of(tmp_path, name)
    first, second = lease(folder, name), lease(folder, name)
    assert first is not None
    assert second is not None
    assert first.facts == facts_of(3)
    assert first.layout == layout_of()
    first.slot.close()
    first.slot.close()
    assert not writer.lock(shared=False), "a second release of one lease ends no other one"
    second.slot.close()
    assert writer.lock(shared=False)
    assert lease(folder, name) is None
    writer.begin()
    writer.unlock()
    assert lease(folder, name) is None, "it is torn"
    assert writer.lock(shared=False), "and not held for that"
    writer.close()


def test_a_slot_made_anew_under_the_same_name_is_another(tmp_path: Path) -> None:
    name = put(tmp_path, facts_of(3))
    folder = str(tmp_path)
    old = lease(folder, name)
    assert old is not None
    (tmp_path / name).unlink()
    put(tmp_path, facts_of(8))
    new = lease(folder, name)
    assert new is not None
    assert (old.slot.facts, new.facts) == (facts_of(3), facts_of(8))
    # Letting go of the old one lets go of nothing else.
    old.slot.close()
    writer = writer_of(tmp_path, name)
    assert not writer.lock(shared=False)
    new.slot.close()
    assert writer.lock(shared=False)
    writer.close()


def test_what_cannot_be_leased(tmp_path: Path) -> None:
    folder = str(tmp_path)
    with pytest.raises(OSError):
        lease(folder, "own-r00000-s0")
    name = put(tmp_path, facts_of(3))
    for layout in tmp_path.glob("layout-*"):
        layout.unlink()
    with pytest.raises(InvalidCheckpointError, match="layout-"):
        lease(folder, name)
    writer = writer_of(tmp_path, name)
    assert writer.lock(shared=False), "a failure holds nothing"
    fill(writer, facts_of(4), layout_of())
    writer.close()


RANKS = HostRanks("000001-aa", 4, (2, 3))


class FakeSlot:
    def __init__(self) -> None:
        self.closed = 0

    def close(self) -> None:
        self.closed += 1


def leased(rank: int, step: int) -> LeasedSnapshot:
    return LeasedSnapshot(FakeSlot(), facts_of(step, rank=rank, world_size=4, reason="interval"), layout_of())  # type: ignore[arg-type]


def test_a_step_is_handed_over_when_the_last_rank_of_the_host_has_it() -> None:
    saves = IncarnationSaves(RANKS)
    assert saves.arrived(leased(3, 5)) == ()
    assert saves.arrived(leased(2, 6)) == ()
    job = saves.arrived(leased(2, 5))
    assert [(one.facts.rank, one.facts.step) for one in job] == [(2, 5), (3, 5)]
    assert set(saves.waiting) == {6}


def test_a_snapshot_is_wanted_once_and_only_if_it_is_durable_and_newer_than_what_is_saved() -> None:
    saves = IncarnationSaves(RANKS, saved_step=4)
    one = leased(3, 5)
    assert saves.is_wanted(one.facts)
    saves.arrived(one)
    assert not saves.is_wanted(one.facts)
    assert not saves.is_wanted(leased(3, 4).facts)
    assert not saves.is_wanted(facts_of(6, rank=3, world_size=4))
    saves.handed_over.add(7)
    assert not saves.is_wanted(leased(3, 7).facts)


def test_a_step_that_is_given_up_releases_what_waits() -> None:
    saves = IncarnationSaves(RANKS)
    waiting = leased(3, 12)
    saves.arrived(waiting)
    saves.give_up(waiting.facts.step)
    assert not saves.waiting
    assert waiting.slot.closed == 1  # type: ignore[attr-defined]


def test_what_all_ranks_have_passed_is_overtaken() -> None:
    saves = IncarnationSaves(RANKS)
    late = leased(3, 5)
    saves.arrived(late)
    saves.newest = {3: 8}
    assert saves.overtaken() == [], "nothing is known of rank 2"
    saves.newest = {2: 5, 3: 8}
    assert saves.overtaken() == []
    saves.newest = {2: 6, 3: 8}
    assert saves.overtaken() == [late.facts.step]
    saves.give_up(late.facts.step)
    assert saves.overtaken() == []


def test_a_step_is_given_up_and_released_once() -> None:
    saves = IncarnationSaves(RANKS)
    one = leased(3, 5)
    saves.arrived(one)
    for step, closed in ((4, 0), (5, 1), (5, 1)):
        saves.give_up(step)
        assert one.slot.closed == closed  # type: ignore[attr-defined]


def is_handed_over(saves: IncarnationSaves, step: int) -> bool:
    return not saves.is_wanted(leased(2, step).facts)


def test_a_step_is_saved_once_and_again_where_it_failed() -> None:
    saves = IncarnationSaves(RANKS)
    saves.announced(5)
    assert not is_handed_over(saves, 5)
    saves.handed_over.add(5)
    saves.announced(5)
    assert is_handed_over(saves, 5), "it is announced once more by a worker that was not connected"
    saves.failed(5)
    assert not is_handed_over(saves, 5)


def test_a_host_that_has_done_its_part_takes_part_in_the_next_attempt() -> None:
    saves = IncarnationSaves(RANKS)
    saves.handed_over.add(5)
    saves.done_here.add(5)
    assert is_handed_over(saves, 5)
    saves.announced(5)
    assert not is_handed_over(saves, 5)
    saves.handed_over.add(5)
    saves.announced(5)
    assert is_handed_over(saves, 5)


def test_the_newest_outcomes_are_sent_again_until_a_step_is_tried_again() -> None:
    saves = IncarnationSaves(RANKS)
    outcomes = [Saved(step, "c", 1) for step in range(12)]
    for outcome in outcomes:
        saves.sent(outcome.step, outcome)
    assert list(saves.outcomes.values()) == outcomes[4:]
    saves.announced(7)
    assert 7 not in saves.outcomes
