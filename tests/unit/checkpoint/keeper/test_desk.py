from typing import cast

from elastictrain.checkpoint.keeper.desk import Desk, Station
from elastictrain.checkpoint.keeper.pins import Pinned
from elastictrain.checkpoint.memory.slot import Slot
from tests.unit.checkpoint.memory.madeslots import facts_of, layout_of

STATION = Station("000001-aa", 4, (2, 3))


def pinned(rank: int, step: int) -> Pinned:
    return Pinned(cast(Slot, None), facts_of(step, rank=rank, world_size=4, reason="interval"), layout_of())


def test_a_step_is_handed_over_when_the_last_rank_of_the_host_has_it() -> None:
    desk = Desk(STATION)
    assert desk.arrived(pinned(3, 5)) == ()
    assert desk.arrived(pinned(2, 6)) == ()
    job = desk.arrived(pinned(2, 5))
    assert [(one.facts.rank, one.facts.step) for one in job] == [(2, 5), (3, 5)]
    assert set(desk.waiting) == {6}
    assert not STATION.leader


def test_a_new_incarnation_gives_up_what_waits_and_may_begin_at_an_older_step() -> None:
    desk = Desk(STATION, saved_step=9)
    waiting = pinned(3, 12)
    desk.arrived(waiting)
    assert desk.move_to(STATION) == []
    assert desk.waiting
    assert desk.move_to(Station("000002-bb", 4, (2, 3))) == [waiting]
    assert not desk.waiting
    assert desk.saved_step == -1


def test_what_all_ranks_have_passed_is_overtaken() -> None:
    desk = Desk(STATION)
    late = pinned(3, 5)
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
    desk = Desk(STATION)
    one = pinned(3, 5)
    desk.arrived(one)
    assert desk.give_up(4) == []
    assert desk.give_up(5) == [one]
    assert desk.give_up(5) == []
    assert Desk().overtaken() == []
