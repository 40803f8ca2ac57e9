"""Several ranks' slots and one book: copies fail on some of them, and savers read as long as they like."""

import random
from dataclasses import dataclass, field
from typing import cast

from hypothesis import given, settings
from hypothesis import strategies as st

from elastictrain.checkpoint.copier import Arena, Copier
from elastictrain.checkpoint.memory.choice import SlotBook
from elastictrain.checkpoint.memory.folder import SlotName
from elastictrain.checkpoint.memory.slot import SnapshotFacts
from elastictrain.checkpoint.saver.link import SaverLink
from elastictrain.checkpoint.snapshots import Snapshots, _Taking
from tests.unit.examples import examples


@dataclass
class FakeSlot:
    path: str = ""
    locked: bool = False
    read_until: int = 0

    def is_current(self) -> bool:
        return True

    def lock(self, *, shared: bool) -> bool:
        self.locked = True
        return True

    def unlock(self) -> None:
        self.locked = False


@dataclass
class FakeArena:
    slots: list[FakeSlot]
    broken: str = ""

    @property
    def names(self) -> list[SlotName]:
        return [SlotName("own", 0, index) for index in range(len(self.slots))]

    def slot(self, place: int) -> FakeSlot:
        return self.slots[place]

    def close(self) -> None: ...


@dataclass
class Rank:
    """Real bookkeeping of slots; copies and savers are made up. It is also its own link."""

    count: int
    now: int = 0
    copies: dict[int, tuple[int, int, bool]] = field(default_factory=dict)
    """By slot: the step, when its copy ends, and whether it then fails."""

    def __post_init__(self) -> None:
        self.slots = [FakeSlot() for _ in range(self.count)]
        self.snapshots = Snapshots(
            cast(Arena, FakeArena(self.slots)),
            cast(Copier, None),
            cast(SaverLink, self),
            facts=cast(SnapshotFacts, None),
            steps=[None] * self.count,
            flush_records=lambda: None,
            record=None,
        )

    def needs(self, slot: int, step: int) -> bool:
        return self.now < self.slots[slot].read_until

    def begin(self, place: int, step: int, *, until: int, fails: bool) -> None:
        assert self.slots[place].locked, "a slot is written that somebody else may have"
        assert self.now >= self.slots[place].read_until, "a slot is written while its saver reads it"
        assert place not in self.copies, "a slot is written while it is being written"
        self.snapshots.steps[place] = None
        self.snapshots._taking[place] = cast(_Taking, object())
        self.copies[place] = (step, until, fails)

    def work(self, now: int, *, reads: int) -> None:
        self.now = now
        for place, (step, until, fails) in list(self.copies.items()):
            if now >= until:
                del self.copies[place], self.snapshots._taking[place]
                if not fails:
                    self.slots[place].unlock()
                    self.slots[place].read_until = now + reads
                    self.snapshots.steps[place] = step


def whole(ranks: list[Rank]) -> set[int]:
    return set.intersection(*({step for step in rank.snapshots.steps if step is not None} for rank in ranks))


@settings(max_examples=examples(100))
@given(
    seed=st.integers(0, 2**32), world_size=st.integers(1, 3), count=st.integers(2, 3), failing=st.sampled_from([0.0, 0.2, 0.6])
)
def test_a_copy_that_fails_on_some_ranks_ends_neither_snapshots_nor_the_last_whole_one(
    seed: int, world_size: int, count: int, failing: float
) -> None:
    chance = random.Random(seed)
    every = chance.choice([1, 5])
    ranks = [Rank(count) for _ in range(world_size)]
    book, none_had, began, ever = SlotBook([None] * count), False, 0, False
    said: tuple[int, list[bool], list[bool]] | None = None
    for step in range(1, 120):
        for rank in ranks:
            rank.work(step, reads=chance.choice([0, 0, 1, 8]))
        ever = ever or bool(whole(ranks))
        assert whole(ranks) or not ever, "the last whole snapshot is overwritten"
        due = (step + 1) % every <= 1
        notes = [rank.snapshots.status(due=due, none_had=none_had) for rank in ranks]
        if said is not None:
            book.update(said[0], busy=said[1], torn=said[2])
        said = (
            step,
            [any(busy[place] for busy, _ in notes) for place in range(count)],
            [any(torn[place] for _, torn in notes) for place in range(count)],
        )
        if step % every:
            continue
        place = book.choose()
        none_had = place is None
        if place is not None:
            began = step
            for rank in ranks:
                rank.begin(place, step, until=step + chance.randint(1, 6), fails=chance.random() < failing)
            book.started(place, step)
        # Copies and savers have long done what they had to do.
        assert step - began < 40, f"no slot is ever free again: {[rank.snapshots.steps for rank in ranks]}"
