"""Ranks that decide alike from what they said a step ago: no moment without a snapshot that is whole on all of them."""

import random
from dataclasses import dataclass, field

import pytest

from elastictrain.checkpoint.memory.choice import Rounds, SlotBook
from tests.unit.examples import examples


@dataclass
class Rank:
    """The slots of one simulated rank: what is whole, what is being copied, what a saver still reads."""

    num_slots: int
    chance: random.Random
    whole: list[int | None] = field(default_factory=list)
    copying: dict[int, tuple[int, int]] = field(default_factory=dict)
    """By slot: the step, and when its copy ends."""

    read_until: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.whole = [None] * self.num_slots
        self.read_until = [0] * self.num_slots

    def tick(self, now: int) -> None:
        for slot, (step, ends) in list(self.copying.items()):
            if now >= ends:
                self.whole[slot] = step
                self.read_until[slot] = now + self.chance.choice([0, 0, 1, 5, 30])
                del self.copying[slot]

    def notes(self, now: int) -> tuple[list[bool], list[bool]]:
        busy = [slot in self.copying or now < self.read_until[slot] for slot in range(self.num_slots)]
        return busy, [slot in self.copying or self.whole[slot] is None for slot in range(self.num_slots)]

    def begin(self, slot: int, step: int, now: int) -> None:
        self.whole[slot] = None
        self.copying[slot] = (step, now + self.chance.choice([0, 1, 2, 4]))


@pytest.mark.parametrize("num_slots", [2, 3])
@pytest.mark.parametrize("seed", range(examples(60)))
def test_a_kill_at_any_moment_finds_a_step_that_is_whole_on_all_ranks(seed: int, num_slots: int) -> None:
    chance = random.Random(f"{seed}-{num_slots}")
    ranks = [Rank(num_slots, chance) for _ in range(3)]
    book, said, ever, newest = SlotBook([None] * num_slots), None, False, -1
    every = chance.choice([1, 2, 5])
    for step in range(1, 200):
        notes = [rank.notes(step) for rank in ranks]
        if said is not None:
            book.update(
                step - 1,
                busy=[any(busy[slot] for busy, _ in said) for slot in range(num_slots)],
                torn=[any(torn[slot] for _, torn in said) for slot in range(num_slots)],
            )
        if step % every == 0 and (slot := book.choose()) is not None:
            # What a rank calls free it has locked until it is told otherwise.
            if any(step < rank.read_until[slot] or slot in rank.copying for rank in ranks):
                raise AssertionError(f"slot {slot} is still in use at step {step}")
            for rank in ranks:
                rank.begin(slot, step, step)
            book.started(slot, step)
        said = notes
        for rank in ranks:
            rank.tick(step)
        common = set.intersection(*({one for one in rank.whole if one is not None} for rank in ranks))
        ever = ever or bool(common)
        assert common or not ever, f"nothing whole at step {step}"
        newest = max(common, default=-1)
    assert newest > 100


def test_a_protected_step_stays_and_the_others_go_round() -> None:
    book = SlotBook([10, 20, 30])
    book.update(40, busy=[False] * 3, torn=[False] * 3)
    assert book.choose() == 0
    assert book.choose(protected=(10, None)) == 1
    assert book.choose(protected=(10, 20)) == 2
    assert book.choose(protected=(10, 20, 30)) is None
    assert book.newest_whole() == 30


def test_what_was_said_before_a_snapshot_says_nothing_about_it() -> None:
    book = SlotBook([10, None])
    book.update(12, busy=[False, False], torn=[False, True])
    assert book.choose() == 1
    book.started(1, 13)
    assert book.choose() is None
    book.update(13, busy=[False, False], torn=[False, False])
    assert book.newest_whole() == 10
    book.update(14, busy=[False, False], torn=[False, False])
    assert book.newest_whole() == 13
    assert book.choose() == 0


def test_rounds_of_replicas_follow_each_other() -> None:
    rounds = Rounds()
    assert rounds.next(None, at=1) is None
    assert rounds.next(10, at=12) == 10
    assert rounds.next(20, at=22) is None
    assert rounds.protected == (None, 10)
    # Said before the round began, and then by ranks that still send.
    rounds.update(12, sending=False, failed=False)
    rounds.update(13, sending=True, failed=False)
    assert rounds.under_way == 10
    rounds.update(14, sending=False, failed=False)
    assert rounds.protected == (10, None)
    assert rounds.next(10, at=15) is None
    assert rounds.next(20, at=23) == 20
    assert rounds.protected == (10, 20)
    rounds.update(24, sending=False, failed=True)
    assert rounds.protected == (10, None)
    assert rounds.next(30, at=31) == 30
