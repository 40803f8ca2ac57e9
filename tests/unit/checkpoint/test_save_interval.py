"""The interval between saves: its formula, its bounds, what it learns, and what it is worth on made-up histories."""

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastictrain.bounded_json import encode_record, parse_record
from elastictrain.checkpoint.save_interval import (
    FIRST_SAVE_S,
    LEAST_S,
    PRIOR_S,
    FailureCounts,
    SaveCosts,
    SaveTuner,
    decide_save_interval,
    optimal_interval,
)
from scripts.bench_save_interval import compare, made_up

HOUR_S = 3600.0
seconds = st.floats(0.001, 1e4)


def availability(interval_s: float, *, save_s: float, recover_s: float, failure_s: float) -> float:
    """Exact, where failures come at random: the share of time that is training and is not lost (Daly 2006)."""
    period = math.expm1((interval_s + save_s) / failure_s)
    return interval_s / ((failure_s + recover_s) * period)


@given(st.floats(0.1, 60.0), st.floats(0.0, 300.0), st.floats(1800.0, 1e6))
def test_no_other_interval_is_clearly_better(save_s: float, recover_s: float, failure_s: float) -> None:
    best_s = optimal_interval(save_s=save_s, recover_s=recover_s, failure_s=failure_s)
    known = {"save_s": save_s, "recover_s": recover_s, "failure_s": failure_s}
    found = availability(best_s, **known)
    assert all(
        availability(best_s * factor, **known) < found + 0.002 for factor in (0.1, 0.3, 0.5, 0.7, 0.9, 1.1, 1.5, 2.0, 5.0)
    )


def test_where_failures_are_rare_it_is_youngs() -> None:
    assert optimal_interval(save_s=1.0, recover_s=10.0, failure_s=1e6) == pytest.approx(math.sqrt(2e6), rel=0.001)


@given(seconds, seconds, seconds, st.integers(0, 1000), st.floats(0, 1e7), st.floats(1.0, 1e5))
def test_bounds_hold_and_the_optimum_is_taken_within_them(
    save_s: float, write_s: float, recover_s: float, losses: int, trained_s: float, max_lost_s: float
) -> None:
    counts = FailureCounts(losses, 3, trained_s)
    found = decide_save_interval(SaveCosts(save_s, write_s, recover_s), counts, max_lost_s=max_lost_s)
    best_s = optimal_interval(save_s=save_s, recover_s=recover_s, failure_s=counts.mean_time_to_loss_s)
    assert found.seconds >= max(LEAST_S, write_s)
    if found.limited_by == "":
        assert found.seconds == max(best_s, LEAST_S)
    if found.limited_by != "write_s":
        assert found.seconds + write_s <= max_lost_s * (1 + 1e-9)


def test_more_losses_mean_more_saves_and_failures_that_memory_outlives_do_not() -> None:
    def interval_s(*, losses: int, kept: int = 0, hours: float = 24.0) -> float:
        counts = FailureCounts(losses, kept, hours * HOUR_S)
        return decide_save_interval(SaveCosts(5.0, 20.0, 60.0), counts, max_lost_s=1e9).seconds

    assert interval_s(losses=0) > interval_s(losses=1) > interval_s(losses=10)
    assert interval_s(losses=1, kept=50) == interval_s(losses=1)
    assert interval_s(losses=0, hours=240.0) > interval_s(losses=0)
    assert FailureCounts().mean_time_to_loss_s == PRIOR_S


def test_the_cost_of_a_save_is_learned_from_the_steps_beside_it() -> None:
    tuner = SaveTuner(FailureCounts(), max_lost_s=1e9)
    assert tuner.costs.save_s == FIRST_SAVE_S
    chance, now_s = random.Random(1), 0.0
    for save in range(12):
        for step in range(100):
            saving = save > 0 and step < 20
            # Single stalls, such as evaluations, are no cost of a save.
            took_s = chance.gauss(1.25 if saving else 1.0, 0.02) + (30.0 if step % 45 == 7 else 0.0)
            now_s += took_s
            tuner.step_took(took_s, now_s=now_s, saving=saving)
        tuner.save_began(now_s, stall_s=0.5)
    assert tuner.costs.save_s == pytest.approx(0.5 + 20 * 0.25, rel=0.1)
    assert tuner.costs.write_s == pytest.approx(20 * 1.25 + 30.0 + 1.0 + 0.5, rel=0.1)
    assert tuner.trained_s == pytest.approx(now_s)
    before = tuner.take_change()
    assert before is not None
    assert (before, tuner.take_change()) == (tuner.interval, None)


def test_a_save_that_makes_training_wait_costs_all_of_it() -> None:
    tuner = SaveTuner(FailureCounts(), max_lost_s=1e9)
    for step in range(40):
        if step % 10 == 0:
            tuner.save_began(20.0 * step, stall_s=8.0)
        tuner.step_took(1.0, now_s=20.0 * step, saving=False)
    assert (tuner.costs.save_s, tuner.costs.write_s) == (8.0, 8.0)


@pytest.mark.parametrize("write_s", [100.0, 200.0, 600.0])
def test_a_save_waits_for_the_one_before_it_however_long_that_takes(write_s: float) -> None:
    tuner = SaveTuner(FailureCounts(), max_lost_s=1e9)
    last_s = free_s = 0.0
    for now_s in map(float, range(4000)):
        tuner.step_took(1.0, now_s=now_s, saving=now_s < free_s)
        if tuner.is_due(now_s - last_s):
            assert now_s >= free_s
            tuner.save_began(now_s, stall_s=0.02)
            last_s, free_s = now_s, now_s + write_s
    assert tuner.costs.write_s == pytest.approx(write_s, rel=0.05)
    assert tuner.interval.seconds >= write_s


def test_it_learns_from_saves_that_overlap_and_asks_again_after_one_that_failed() -> None:
    tuner = SaveTuner(FailureCounts(), max_lost_s=1e9)
    for now_s in map(float, range(1000)):
        tuner.step_took(1.0, now_s=now_s, saving=True)
        if now_s % 300 == 0:
            # As `checkpoint.every_minutes` asks for one.
            tuner.save_began(now_s, stall_s=0.02)
    assert tuner.costs.write_s == pytest.approx(300.0, rel=0.05)
    assert not tuner.is_due(1000.0)
    tuner.step_took(1.0, now_s=1000.0, saving=True, failing=True)
    assert tuner.is_due(1000.0)


def test_after_a_loss_saves_come_more_often_until_none_has_come_for_long() -> None:
    counts = FailureCounts()
    for _ in range(10):
        for _ in range(3):
            counts = counts.trained(300.0).failed(lost=True)
        counts = counts.trained(12 * HOUR_S)
    counts = counts.failed(lost=True)
    burst_s, calm_s = counts.time_to_loss_s, counts.trained(6 * HOUR_S).time_to_loss_s
    assert burst_s < counts.mean_time_to_loss_s / 2
    assert calm_s > 1.5 * counts.mean_time_to_loss_s
    assert counts.failed(lost=False) == replace(counts, kept=1)
    assert sum(losses for losses, _ in counts.by_age) == counts.losses == 31
    assert sum(trained_s for _, trained_s in counts.by_age) == pytest.approx(counts.trained_s)


def test_counts_of_an_earlier_release_have_no_ages() -> None:
    counts = parse_record(b'{"losses": 3, "kept": 1, "trained_s": 36000.0}', FailureCounts)
    assert counts.time_to_loss_s == counts.mean_time_to_loss_s
    assert counts.trained(60.0).failed(lost=True).losses == 4
    assert parse_record(encode_record(counts.trained(60.0)), FailureCounts) == counts.trained(60.0)


@pytest.mark.parametrize("costs", [SaveCosts(5.0, 60.0, 60.0), SaveCosts(30.0, 90.0, 300.0)])
@pytest.mark.parametrize("kind", ["random", "bursts", "more", "late"])
def test_it_is_within_a_point_of_the_best_fixed_interval_in_hindsight(kind: str, costs: SaveCosts) -> None:
    best, _, learned = compare([made_up(kind, hours=48.0, seed=seed) for seed in range(8)], costs)
    assert best - learned < 0.01


def test_on_bursts_it_is_better_than_any_fixed_interval() -> None:
    best, _, learned = compare([made_up("bursts", hours=96.0, seed=seed) for seed in range(3)], SaveCosts(20.0, 0.0, 60.0))
    assert learned > best
