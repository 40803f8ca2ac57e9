import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastictrain.telemetry.window import RemainingTime


def test_nothing_is_estimated_before_a_step_has_passed() -> None:
    remaining = RemainingTime(total_steps=10)
    assert remaining.estimate_s() is None
    remaining.observe(time_s=1.0, step=4)
    assert remaining.estimate_s() is None


def test_a_resumed_run_counts_only_its_own_steps() -> None:
    remaining = RemainingTime(total_steps=100)
    remaining.observe(time_s=50.0, step=90)
    remaining.observe(time_s=54.0, step=92)
    assert remaining.estimate_s() == pytest.approx(16.0)


def test_a_slow_start_is_forgotten() -> None:
    remaining = RemainingTime(total_steps=2000, window_s=60.0)
    remaining.observe(time_s=0.0, step=0)
    for step in range(1, 1001):
        remaining.observe(time_s=500.0 + step, step=step)
    assert remaining.estimate_s() == pytest.approx(1000.0)


def test_steps_longer_than_the_window_still_have_a_speed() -> None:
    remaining = RemainingTime(total_steps=10, window_s=1.0)
    for step in range(4):
        remaining.observe(time_s=100.0 * step, step=step)
    assert remaining.estimate_s() == pytest.approx(700.0)


@given(step_s=st.floats(1e-3, 1e3), start=st.integers(0, 50), steps=st.integers(1, 300))
def test_an_even_pace_gives_the_exact_answer(step_s: float, start: int, steps: int) -> None:
    remaining = RemainingTime(total_steps=1000)
    for count in range(steps + 1):
        remaining.observe(time_s=count * step_s, step=start + count)
    assert remaining.estimate_s() == pytest.approx((1000 - start - steps) * step_s)
