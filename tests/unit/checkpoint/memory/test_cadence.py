"""The learned interval between snapshots: its cost, its speed, and what must not move it."""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from elastictrain.checkpoint.memory.cadence import (
    FIRST,
    FRESH_STEPS,
    LEAST_COSTS,
    MOST,
    RARE,
    SHARE,
    TOUCHED,
    Cadence,
    decide_interval,
    least_interval,
    middle,
    spread_interval,
)
from tests.unit.examples import examples


def costs(seconds: float, number: int = LEAST_COSTS) -> list[tuple[float, float]]:
    return [(0.75 * seconds, 0.25 * seconds)] * number


@dataclass
class Training:
    """Rank 0 of a run: what a step takes, and what a snapshot adds to the two steps that it touches."""

    step_s: Callable[[int], float] = lambda step: 1.0
    cost_s: Callable[[int], float] = lambda step: 0.1
    noise: float = 0.0  # standard deviation, as a share of a step
    other_s: Callable[[int], tuple[float, bool]] = lambda step: (0.0, True)  # seconds of anything else, and whether it is known
    slots: int = 2
    lag: int = 3  # steps until a snapshot is known to be whole
    seed: int = 0
    pause_s: float = 0.0
    taken: list[int] = field(default_factory=list)
    intervals: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.cadence = Cadence(self.slots, pause_s=self.pause_s)
        self.chance = random.Random(self.seed)
        self.step = 0
        self.agreed = FIRST

    def run(self, steps: int) -> None:
        heard = self.cadence.interval
        for step in range(self.step + 1, self.step + steps + 1):
            # Flags are read a step late.
            self.agreed, heard = heard, self.cadence.interval
            last = self.taken[-1] if self.taken else 0
            kept = self.taken[-self.slots + 1 :][:1] if self.slots > 1 else [last]
            free = len(self.taken) < self.slots or kept[0] + self.lag <= step
            began = step - last >= self.agreed and free
            if began:
                self.taken.append(step)
            since = step - self.taken[-1] if self.taken else TOUCHED
            share = (0.7, 0.3)[since] if since < TOUCHED else 0.0
            noise = max(0.2, self.chance.gauss(1.0, self.noise))
            other_s, usable = self.other_s(step)
            seconds = self.step_s(step) * noise + share * self.cost_s(step) + other_s
            self.cadence.step_took(seconds, began=began, usable=usable)
            self.intervals.append(self.cadence.interval)
        self.step += steps

    def share(self, last: int) -> float:
        """Of the time of the last steps: what snapshots took."""
        steps = range(self.step - last + 1, self.step + 1)
        return sum(self.cost_s(step) for step in self.taken if step in steps) / sum(map(self.step_s, steps))


@pytest.mark.parametrize("cost", [0.0, 0.002, 0.02, 0.055, 0.1, 0.34, 1.0, 4.0])
@pytest.mark.parametrize("slots", [2, 3])
def test_snapshots_cost_at_most_their_share_and_are_as_frequent_as_that_allows(cost: float, slots: int) -> None:
    one = Training(cost_s=lambda step: cost, slots=slots)
    one.run(3000)
    best = max(least_interval(slots), math.ceil(cost / SHARE))
    assert one.share(2000) <= SHARE * 1.05 + cost / 2000
    assert best <= one.intervals[-1] <= max(best + TOUCHED, 1.3 * best)


@pytest.mark.parametrize("seed", range(examples(20)))
def test_noise_neither_makes_snapshots_dear_nor_rare(seed: int) -> None:
    chance = random.Random(seed)
    cost, noise = chance.choice([0.0, 0.01, 0.05, 0.1, 0.3, 1.0]), chance.choice([0.003, 0.01, 0.03, 0.1, 0.2])
    step_s = 10 ** chance.uniform(-3, 1)
    one = Training(lambda step: step_s, lambda step: cost * step_s, noise=noise, slots=chance.choice([2, 3]), seed=seed)
    one.run(4000)
    best = max(least_interval(one.slots), cost / SHARE)
    # The cost of a snapshot is known to about this share of a step.
    doubt = 1.2 * noise
    assert one.share(2000) <= SHARE + doubt * SHARE / max(cost, SHARE) * 4 + 0.001, (cost, noise)
    average = 2000 / sum(step > 2000 for step in one.taken)
    assert average <= 1.35 * best + 2.5 * doubt / SHARE + TOUCHED + 1, (cost, noise)


@pytest.mark.parametrize("seed", range(examples(20)))
@pytest.mark.parametrize("cost", [0.004, 0.03])
def test_cheap_snapshots_are_frequent_soon(seed: int, cost: float) -> None:
    one = Training(cost_s=lambda step: cost, noise=0.003, seed=seed)
    one.run(10 * (LEAST_COSTS + 3))
    assert one.intervals[-1] <= 4 if cost > 0.02 else one.intervals[-1] == least_interval(2)


@pytest.mark.parametrize("seed", range(examples(10)))
def test_dear_snapshots_are_rare_soon(seed: int) -> None:
    one = Training(cost_s=lambda step: 0.8, noise=0.05, seed=seed)
    one.run(400)
    assert one.share(200) <= 1.5 * SHARE


@pytest.mark.parametrize("seed", range(examples(10)))
def test_a_change_of_cost_is_followed(seed: int) -> None:
    one = Training(cost_s=lambda step: 0.02 if step <= 1000 or step > 3000 else 0.5, noise=0.02, seed=seed)
    one.run(1000)
    assert one.intervals[-1] <= 6
    one.run(2000)
    assert one.share(1000) <= 1.3 * SHARE
    assert 40 <= one.intervals[-1] <= 80
    one.run(3000)
    assert one.intervals[-1] <= 8


@pytest.mark.parametrize("factor", [0.25, 0.5, 2.0, 4.0])
@pytest.mark.parametrize("slots", [2, 3])
@pytest.mark.parametrize("seed", range(examples(5)))
def test_a_change_of_steps_is_no_change_of_cost(factor: float, slots: int, seed: int) -> None:
    one = Training(lambda step: 1.0 if step <= 1000 else factor, lambda step: 0.02, noise=0.01, slots=slots, seed=seed)
    one.run(3000)
    best = max(least_interval(slots), 2 / factor)
    assert one.share(1000) <= 1.25 * SHARE
    assert one.intervals[-1] <= 1.5 * best + 2


@pytest.mark.parametrize("every", [2, 7, 10, 50])
@pytest.mark.parametrize("stall_s", [3.0, 1000.0])
@pytest.mark.parametrize("known", [False, True])
def test_what_else_takes_time_is_no_cost_of_snapshots(every: int, stall_s: float, known: bool) -> None:
    """An evaluation is known; of stalls nothing is, but they are rare."""
    every = every if known else max(50, every)
    one = Training(
        cost_s=lambda step: 0.02,
        noise=0.003,
        other_s=lambda step: (stall_s if step % every == 0 else 0.0, not (known and step % every == 0)),
    )
    one.run(3000)
    # With an evaluation at every second step no snapshot can be measured.
    assert one.intervals[-1] <= (least_interval(2) + 1 if every == 2 else 5)


def test_a_first_step_that_takes_minutes_does_no_harm() -> None:
    one = Training(cost_s=lambda step: 0.02, other_s=lambda step: (300.0 if step == 1 else 0.0, True))
    one.run(200)
    assert one.intervals[-1] == least_interval(2)


def test_a_whole_slow_hour_is_forgotten() -> None:
    one = Training(lambda step: 1.0 if step <= 500 or step > 800 else 30.0, lambda step: 0.02, noise=0.01)
    one.run(1600)
    assert one.intervals[-1] <= 5


def test_slots_that_are_free_late_make_snapshots_rarer_but_even() -> None:
    one = Training(cost_s=lambda step: 0.0, lag=9)
    one.run(600)
    assert {after - before for before, after in zip(one.taken[-20:], one.taken[-19:], strict=False)} == {9}


def test_steps_to_compare_with_stay_fresh_where_every_step_is_touched() -> None:
    one = Training(cost_s=lambda step: 0.0, slots=3)
    one.run(3000)
    gaps = [after - before for before, after in zip(one.taken[-300:], one.taken[-299:], strict=False)]
    assert set(gaps) == {TOUCHED, TOUCHED + 2}
    assert gaps.count(TOUCHED + 2) <= 3 * sum(gaps) / FRESH_STEPS


def test_over_a_network_snapshots_are_a_second_apart() -> None:
    one = Training(lambda step: 0.05, lambda step: 0.0, pause_s=1.0)
    one.run(1000)
    assert one.intervals[-1] == 20


@pytest.mark.parametrize(("slots", "least"), [(1, RARE), (2, 3), (3, 2), (4, 1)])
def test_slots_bound_the_interval(slots: int, least: int) -> None:
    assert least_interval(slots) == least
    assert Cadence(slots).interval == max(FIRST, least)


@pytest.mark.parametrize("age", [0, 1, 3, 10, 100, 2500])
def test_one_slot_to_overwrite_makes_the_fewest_repeated_steps(age: int) -> None:
    def repeated(interval: int) -> float:
        """On average: a failure comes in any step, and in the first two of an interval the copy is torn."""
        return sum(age + step if step < TOUCHED else step for step in range(interval)) / interval

    best = min(map(repeated, range(TOUCHED, 200)))
    assert repeated(max(TOUCHED, spread_interval(age))) <= 1.1 * best + 0.5


def test_steps_without_duration_decide_nothing() -> None:
    one = Training(lambda step: 0.0, lambda step: 0.0)
    one.run(500)
    assert set(one.intervals) == {least_interval(2)}
    assert decide_interval(7, costs_s=costs(1.0), usual_s=0.0)[0] == 7


@pytest.mark.parametrize(
    ("interval", "cost_s", "least", "after"),
    [
        (10, 0.1, 1, 10),
        (10, 0.09, 1, 10),
        (10, 0.08, 1, 8),
        (10, 0.05, 1, 5),
        (10, 0.0, 1, 1),
        (10, -1.0, 1, 1),
        (10, 0.0, 3, 3),
        (4, 0.0, 3, 3),
        (10, 0.11, 1, 11),
        (10, 5.0, 1, 20),
        (2, 0.0, 3, 3),
        (MOST, 1e9, 1, MOST),
    ],
)
def test_decisions(interval: int, cost_s: float, least: int, after: int) -> None:
    assert decide_interval(interval, costs_s=costs(cost_s), usual_s=1.0, least=least)[0] == after
    assert decide_interval(interval, costs_s=costs(cost_s)[1:], usual_s=1.0, least=least)[0] == max(interval, least)


def test_any_durations_give_an_interval_within_bounds() -> None:
    for seed in range(examples(1000)):
        chance = random.Random(seed)
        one = Cadence(chance.randint(1, 3), pause_s=chance.choice([0.0, 1.0]))
        scale = 10 ** chance.uniform(-9, 9)
        for _ in range(chance.randint(0, 100)):
            seconds = chance.choice([0.0, scale, scale * chance.random(), 1e6 * chance.random()])
            one.step_took(seconds, began=chance.random() < 0.2, usable=chance.random() < 0.9)
            assert 2 <= one.interval <= MOST + 1, seed


def test_the_middle_leaves_the_ends_out() -> None:
    assert middle([1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1e9]) == (1.0, 0.0)
    assert middle([5.0]) == (5.0, math.inf)
    assert middle([])[0] == 0.0
    draws = [random.Random(1).gauss(10.0, 2.0) for _ in range(1)] + [
        random.Random(seed).gauss(10.0, 2.0) for seed in range(2000)
    ]
    value, error = middle(draws)
    assert value == pytest.approx(10.0, abs=0.2)
    assert error == pytest.approx(2.0 / math.sqrt(2000), rel=0.2)


@pytest.mark.parametrize("seed", range(examples(30)))
def test_a_machine_that_others_use_at_times_makes_snapshots_neither_cheap_nor_dear(seed: int) -> None:
    """Steps become slower and faster, for many at a time; what a snapshot costs is seen beside its neighbours alone."""
    chance = random.Random(seed)
    phases = [chance.uniform(1.0, 4.0) for _ in range(200)]
    cost_s = chance.choice([0.06, 0.1, 0.3])

    def step_s(step: int) -> float:
        before, after, part = phases[step // 50], phases[step // 50 + 1], step % 50 / 50
        return before + part * (after - before)

    one = Training(step_s, lambda step: cost_s * step_s(step), noise=0.02, seed=seed)
    one.run(4000)
    assert sum(one.cost_s(step) for step in one.taken) / sum(map(step_s, range(1, 4001))) <= 1.4 * SHARE
    assert cost_s / SHARE / 1.4 <= one.intervals[-1] <= 3 * cost_s / SHARE
