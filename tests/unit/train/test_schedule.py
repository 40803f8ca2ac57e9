import math
from itertools import pairwise
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastictrain.config.optim import OptimGroup
from elastictrain.train.optimizer import describe_short_warmup, learning_rate

Schedule = Literal["constant", "linear", "cosine"]
schedules = st.sampled_from(["constant", "linear", "cosine"])


def options(schedule: Schedule, *, warmup: int = 10, final: float = 0.1) -> OptimGroup:
    return OptimGroup(lr=2.0, schedule=schedule, warmup_steps=warmup, final_lr_ratio=final)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_warm_up_rises_linearly_from_the_first_step_to_the_peak(schedule: Schedule) -> None:
    rates = [learning_rate(step, options(schedule), total_steps=100) for step in range(1, 11)]
    assert rates == pytest.approx([0.2 * step for step in range(1, 11)])
    assert rates[-1] == 2.0


@pytest.mark.parametrize(("schedule", "middle", "end"), [("constant", 2.0, 2.0), ("linear", 1.1, 0.2), ("cosine", 1.1, 0.2)])
def test_the_middle_and_the_end(schedule: Schedule, middle: float, end: float) -> None:
    assert learning_rate(55, options(schedule), total_steps=100) == pytest.approx(middle)
    assert learning_rate(100, options(schedule), total_steps=100) == pytest.approx(end)


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [("constant", [0.2, 0.4, 0.6]), ("linear", [2 / 3, 4 / 3, 2.0]), ("cosine", [2 / 3, 4 / 3, 2.0])],
)
def test_a_run_shorter_than_its_warm_up(schedule: Schedule, rates: list[float]) -> None:
    """A constant schedule may be continued to more steps later, so its rates are those of the longer run."""
    assert [learning_rate(step, options(schedule), total_steps=3) for step in (1, 2, 3)] == pytest.approx(rates)
    assert "10" in describe_short_warmup(options(schedule), total_steps=3)
    assert describe_short_warmup(options(schedule), total_steps=10) == ""


def test_cosine_is_a_cosine() -> None:
    rate = learning_rate(25, OptimGroup(lr=1.0, schedule="cosine", final_lr_ratio=0.0), total_steps=100)
    assert rate == pytest.approx(0.5 * (1 + math.cos(math.pi / 4)))


def test_without_warm_up_the_first_step_is_near_the_peak() -> None:
    assert learning_rate(1, options("linear", warmup=0, final=0.0), total_steps=4) == 1.5
    assert learning_rate(1, options("constant", warmup=0), total_steps=4) == 2.0


@given(schedule=schedules, warmup=st.integers(0, 50), total=st.integers(1, 200), final=st.floats(0.0, 1.0))
def test_never_negative_never_above_the_peak_and_never_rising_after_warm_up(
    schedule: Schedule, warmup: int, total: int, final: float
) -> None:
    chosen = options(schedule, warmup=warmup, final=final)
    warmup = min(warmup, total)
    rates = [learning_rate(step, chosen, total_steps=total) for step in range(1, total + 1)]
    assert all(0.0 <= rate <= 2.0 + 1e-12 for rate in rates)
    after = rates[max(0, warmup - 1) :]
    assert all(later <= earlier + 1e-12 for earlier, later in pairwise(after))
    if schedule != "constant" and warmup < total:
        assert rates[-1] == pytest.approx(2.0 * final)


@given(schedule=schedules, steps=st.permutations(range(1, 31)))
def test_a_rate_does_not_depend_on_which_steps_came_before(schedule: Schedule, steps: list[int]) -> None:
    chosen = options(schedule)
    in_order = {step: learning_rate(step, chosen, total_steps=30) for step in range(1, 31)}
    assert {step: learning_rate(step, chosen, total_steps=30) for step in steps} == in_order
