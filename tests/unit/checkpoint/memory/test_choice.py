import random
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastictrain.checkpoint.memory.choice import SlotBook
from tests.unit.examples import examples

SLOTS = [(step, busy, torn) for step in (None, 5, 6, 9) for busy in (False, True) for torn in (False, True)]
"""With the flags of step 8: nothing is known yet of a snapshot of step 9."""


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("protected", [(), (5, None), (6,)])
def test_every_combination(count: int, protected: tuple[int | None, ...]) -> None:
    for slots in product(SLOTS, repeat=count):
        book = SlotBook([step for step, _, _ in slots])
        book.update(8, busy=[busy for _, busy, _ in slots], torn=[torn for _, _, torn in slots])
        whole = [step in (5, 6) and not torn for step, _, torn in slots]
        free = [not busy and (step is None or (step != 9 and torn)) for step, busy, torn in slots]
        chosen = book.choose(protected=protected)
        if chosen is None:
            assert not any(free)
            continue
        step, busy, _ = slots[chosen]
        assert not busy
        assert step != 9
        if any(free):
            assert chosen == free.index(True)
            continue
        # A whole snapshot goes, the oldest that may: another one stays, unless this is the only slot.
        assert step not in protected
        assert sum(whole) > 1 or count == 1
        assert all(step <= other for other, busy, _ in slots if not busy and other not in (None, 9, *protected))


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
