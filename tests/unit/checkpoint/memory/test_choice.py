import random
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastictrain.checkpoint.memory.choice import SlotBook, SlotView, choose_slot
from tests.unit.examples import examples

VIEWS = [
    SlotView(step, whole, busy)
    for step, whole, busy in product((None, 5, 6), (False, True), (False, True))
    if step or not whole
]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_every_combination(count: int) -> None:
    for slots in product(VIEWS, repeat=count):
        chosen = choose_slot(slots)
        if chosen is None:
            # Nothing was to be had: each slot is busy, or holds what nothing else stands in for.
            assert all(slot.busy or slot.step is not None for slot in slots)
            continue
        assert not slots[chosen].busy
        others = [slot for place, slot in enumerate(slots) if place != chosen]
        if slots[chosen].whole and others:
            assert any(other.whole for other in others)
        for place, slot in enumerate(slots):
            if not slot.busy and any(other.whole for at, other in enumerate(slots) if at != place):
                assert (slots[chosen].step or 0) <= (slot.step or 0)


def test_nothing_is_known_of_a_snapshot_before_the_next_word() -> None:
    book = SlotBook([None, None])
    assert book.choose() is None
    book.update(4, busy=[False, False], torn=[True, True])
    assert book.choose() == 0
    book.started(0, 5)
    assert book.choose() == 1
    book.started(1, 6)
    # This was said before either of them began.
    book.update(5, busy=[False, False], torn=[True, True])
    assert book.choose() is None
    book.update(7, busy=[True, False], torn=[False, False])
    assert book.choose() == 1


def test_snapshots_that_came_to_nothing_leave_their_slots_free() -> None:
    """Both copies failed on some rank: a third one must be possible."""
    book = SlotBook([None, None])
    book.update(4, busy=[False, False], torn=[True, True])
    book.started(0, 5)
    book.started(1, 6)
    book.update(8, busy=[False, False], torn=[True, True])
    assert book.choose() == 0


class Rank:
    """What one rank does with its slots: copies that take a while, and sometimes fail."""

    def __init__(self, count: int) -> None:
        self.steps: list[int | None] = [None] * count
        self.taking: dict[int, tuple[int, int, bool]] = {}

    def begin(self, place: int, step: int, *, until: int, fails: bool) -> None:
        assert place not in self.taking, "a slot is written while it is being written"
        self.steps[place] = None
        self.taking[place] = (step, until, fails)

    def work(self, now: int) -> None:
        for place, (step, until, fails) in list(self.taking.items()):
            if now >= until:
                self.steps[place] = None if fails else step
                del self.taking[place]


def whole(ranks: list[Rank], count: int) -> set[int]:
    """Steps that every rank holds."""
    held = [{step for step in rank.steps if step is not None} for rank in ranks]
    return set.intersection(*held) if count else set()


@settings(max_examples=examples(200))
@given(
    seed=st.integers(0, 2**32), world_size=st.integers(1, 4), count=st.integers(2, 3), failing=st.sampled_from([0.0, 0.1, 0.5])
)
def test_the_only_whole_snapshot_is_never_overwritten(seed: int, world_size: int, count: int, failing: float) -> None:
    chance = random.Random(seed)
    ranks = [Rank(count) for _ in range(world_size)]
    books = [SlotBook([None] * count) for _ in range(world_size)]
    best = 0
    said: tuple[int, list[bool], list[bool]] | None = None
    for step in range(1, 60):
        for rank in ranks:
            rank.work(step)
        best = max(best, max(whole(ranks, count), default=0))
        # One of the whole steps outlives whatever is being written over.
        assert not best or whole(ranks, count), step
        notes = [
            [
                (place in rank.taking or chance.random() < 0.2, place in rank.taking or rank.steps[place] is None)
                for place in range(count)
            ]
            for rank in ranks
        ]
        if said is not None:
            for book in books:
                book.update(said[0], busy=said[1], torn=said[2])
        # What is said in this step is heard in the next.
        said = (
            step,
            [any(note[place][0] for note in notes) for place in range(count)],
            [any(note[place][1] for note in notes) for place in range(count)],
        )
        chosen = {book.choose() for book in books}
        assert len(chosen) == 1
        (place,) = chosen
        if place is not None and chance.random() < 0.7:
            for rank, book in zip(ranks, books, strict=True):
                rank.begin(place, step, until=step + chance.randint(1, 6), fails=chance.random() < failing)
                book.started(place, step)
    if not failing:
        assert best > 15
