"""`checkpoint.snapshot_every_steps=auto`: rank 0 learns the interval, and all ranks take the same snapshots."""

import random
from itertools import pairwise

import pytest

from elastictrain.checkpoint.memory.cadence import FIRST, RARE, least_interval
from elastictrain.checkpoint.memory.choice import Rounds
from elastictrain.checkpoint.saver.messages import Saved
from elastictrain.train.step import StepFlags
from tests.unit.examples import examples
from tests.unit.train.test_snapshot_saving import INTERVAL, Stage, stage


def world(size: int, *, slots: int = 2, interval: int = 0) -> list[Stage]:
    """`interval`: what the generation before has learned."""
    return [
        stage(
            rank=rank,
            slots=slots,
            snapshot_every_steps="auto",
            save_timeout_s=1e6,
            learned_interval=interval if rank == 0 else 0,
        )
        for rank in range(size)
    ]


def train(ranks: list[Stage], first: int, last: int, *, seconds: float = 1.0, cost_s: float = 0.0) -> None:
    """As the loop does it: the flags of a step are summed, and read after the next step is launched."""
    agreed: StepFlags | None = None
    for step in range(first, last + 1):
        told = [one.saving.flags(step).encode() for one in ranks]
        for one in ranks:
            if agreed is not None:
                one.saving.step_finished(step - 1)
                one.saving.on_flags(step - 1, agreed)
            one.saving.snapshot(step, reason=None)
            begun = bool(one.snapshots.began) and one.snapshots.began[-1][1] == step
            # Clocks of other ranks may go as they like.
            one.clock[0] += (seconds + cost_s * begun) * (1.0 if one is ranks[0] else 5.0)
        agreed = StepFlags.decode([sum(column) for column in zip(*told, strict=True)])


def steps_of(one: Stage) -> list[int]:
    return [step for _, step, _ in one.snapshots.began]


@pytest.mark.parametrize(("cost_s", "interval"), [(0.0, least_interval(2)), (0.055, 6), (0.5, 50)])
def test_the_interval_follows_the_cost(cost_s: float, interval: int) -> None:
    ranks = world(2)
    train(ranks, 1, 1500, cost_s=cost_s)
    taken = steps_of(ranks[0])
    assert taken[0] == FIRST
    assert taken[-1] - taken[-2] == interval
    assert ranks[1].snapshots.began == ranks[0].snapshots.began
    assert (ranks[0].learned[-1:], ranks[1].learned) == ([interval] * (interval != least_interval(2)), [])


def test_the_next_generation_begins_with_what_was_learned() -> None:
    """Rank 0 alone knows it, and the other ranks learn it by the first flags."""
    ranks = world(2, interval=4)
    train(ranks, 101, 120)
    assert steps_of(ranks[0]) == steps_of(ranks[1]) == [102, 106, 110, 114, 118]


@pytest.mark.parametrize("seed", range(examples(50)))
def test_all_ranks_take_the_same_snapshots_whatever_their_clocks_and_slots_do(seed: int) -> None:
    chance = random.Random(seed)
    ranks = world(3, slots=chance.choice([1, 2, 3]))
    step = 1
    while step < 400:
        steps = chance.randint(1, 30)
        for one in ranks:
            one.snapshots.busy = chance.random() < 0.2
            one.snapshots.slow = chance.random() < 0.2
        train(ranks, step, step + steps, seconds=chance.random(), cost_s=chance.choice([0.0, 0.0, 1.0]))
        step += steps + 1
        if chance.random() < 0.3:
            for one in ranks:
                one.saving.snapshot(step - 1, reason=INTERVAL)
    assert len(ranks[0].snapshots.began) > 2
    assert ranks[1].snapshots.began == ranks[2].snapshots.began == ranks[0].snapshots.began


def test_a_snapshot_that_finds_no_slot_is_taken_one_step_later() -> None:
    ranks = world(2, interval=10)
    train(ranks, 1, 20)
    ranks[1].snapshots.busy = True
    train(ranks, 21, 33)
    ranks[1].snapshots.busy = False
    train(ranks, 34, 40)
    assert steps_of(ranks[0]) == steps_of(ranks[1]) == [2, 12, 35]


def test_a_checkpoint_counts_as_a_snapshot() -> None:
    ranks = world(1, interval=10)
    train(ranks, 1, 18)
    ranks[0].saving.snapshot(18, reason=INTERVAL)
    train(ranks, 19, 30)
    assert steps_of(ranks[0]) == [2, 12, 18, 28]


@pytest.mark.parametrize(("learned", "first"), [(40, 2), (4, 2), (3, 2)])
def test_the_first_snapshot_is_early_whatever_was_learned(learned: int, first: int) -> None:
    """Where failures are more frequent than snapshots there would be no progress."""
    ranks = world(2, interval=learned)
    train(ranks, 101, 190)
    assert steps_of(ranks[0])[:3] == [100 + first, 100 + first + learned, 100 + first + 2 * learned]


@pytest.mark.parametrize(
    ("slots", "taken"),
    [(2, [103, 107, 110, 114, 119, 126, 132, 136, 140]), (3, [103, 107, 110, 114, 118, 122, 126, 130, 134, 138])],
)
def test_snapshots_are_rarer_while_a_save_leaves_one_slot(slots: int, taken: list[int]) -> None:
    """They would be torn half of the time, and a killed worker would resume from the save."""
    ranks = world(2, slots=slots, interval=4)
    train(ranks, 102, 109)
    for one in ranks:
        one.saving.on_flags(109, StepFlags.decode(one.saving.flags(110).encode()))
        one.saving.snapshot(110, reason=INTERVAL)
    train(ranks, 111, 130)
    ranks[0].link.saved = [Saved(110, "step-110", 8)]
    train(ranks, 131, 140)
    assert steps_of(ranks[0]) == steps_of(ranks[1]) == taken


def test_snapshots_are_rarer_while_replicas_leave_one_slot() -> None:
    """Rounds follow each other: the newest replicated step and the one under way keep their slots."""
    one = stage(slots=3, snapshot_every_steps="auto", rounds=Rounds(), learned_interval=3)
    train([one], 101, 110)
    assert [step for step in one.link.sent if step is not None] == [102]
    one.link.sends = (False, False)
    train([one], 111, 150)
    assert len(one.link.sent) == 2
    gaps = [after - step for step, after in pairwise(steps_of(one)) if step > 115]
    assert gaps == sorted(gaps), "the longer replicas take, the more a failure during a copy would cost"
    assert min(gaps) > 3
    assert max(gaps) >= RARE


def test_an_evaluation_is_no_cost_of_a_snapshot() -> None:
    one = stage(snapshot_every_steps="auto", eval_every_steps=10)
    agreed = StepFlags()
    for step in range(1, 600):
        flags = one.saving.flags(step)
        if step % 10 != 1:
            one.saving.step_finished(step - 1)
        one.saving.on_flags(step - 1, agreed)
        one.saving.snapshot(step, reason=None)
        one.clock[0] += 1.0
        if step % 10 == 0:
            # The loop finishes the step at once, and evaluates.
            one.saving.step_finished(step)
            one.clock[0] += 30.0
        agreed = StepFlags.decode(flags.encode())
    # One more than the least where an evaluation has hit the last one, so that it does not hit the next.
    assert steps_of(one)[-1] - steps_of(one)[-2] <= least_interval(2) + 1


@pytest.mark.parametrize("every_steps", [0, 7])
def test_a_set_interval_sends_none(every_steps: int) -> None:
    one = stage(snapshot_every_steps=every_steps)
    assert one.saving.flags(1).snapshot_interval == 0
    one = stage(snapshot_every_steps="auto")
    assert one.saving.flags(1).snapshot_interval == least_interval(2)
    one = stage(snapshot_every_steps="auto", rank=1)
    assert one.saving.flags(1).snapshot_interval == 0
