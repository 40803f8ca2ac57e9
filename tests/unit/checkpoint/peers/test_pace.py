"""The rate follows what steps tell, within bounds, and says why; the bucket keeps to it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastictrain.checkpoint.peers.pace import Bucket, Pace, PaceOptions, StepTimes, decide_pace

OPTIONS = PaceOptions(first=100.0, least=10.0, most=1000.0, window=3, baseline=2, fresh_steps=20)
SECONDS = st.lists(st.floats(0, 1e6), max_size=8)


def decide(slowdown: float, *, rate: float = 100.0, limited: bool = True) -> Pace:
    return decide_pace(rate, sending=[1 + slowdown] * 3, quiet=[1.0, 1.0], limited=limited, options=OPTIONS)


@given(st.floats(10, 1000), SECONDS, SECONDS, st.booleans())
def test_the_rate_stays_within_its_bounds(rate: float, sending: list[float], quiet: list[float], limited: bool) -> None:
    pace = decide_pace(rate, sending=sending, quiet=quiet, limited=limited, options=OPTIONS)
    assert 10 <= pace.rate <= 1000
    assert pace.reason


@pytest.mark.parametrize(("slowdown", "rate"), [(0.021, 71.4), (0.03, 50.0), (0.5, 25.0), (0.015, 100.0), (0.005, 125.0)])
def test_rates(slowdown: float, rate: float) -> None:
    assert decide(slowdown).rate == pytest.approx(rate, rel=0.01)


def test_reasons() -> None:
    assert decide(0.5).reason == "steps take +50.0 % while sending at 0 MB/s: more than 2 %"
    assert "about as much" in decide(0.015).reason
    assert "clearly less" in decide(0.0).reason


def test_a_sender_that_something_else_holds_back_gets_no_higher_rate() -> None:
    assert decide(0.0, limited=False).rate == 100
    assert decide(0.5, limited=False).rate == 25


def test_too_few_steps_decide_nothing() -> None:
    for sending, quiet in (([9.0] * 2, [1.0] * 2), ([9.0] * 3, [1.0])):
        pace = decide_pace(100.0, sending=sending, quiet=quiet, limited=True, options=OPTIONS)
        assert pace.rate == 100
        assert "too few" in pace.reason


def test_the_median_overlooks_a_single_slow_step() -> None:
    assert decide_pace(100.0, sending=[1, 1, 50.0], quiet=[1, 1], limited=True, options=OPTIONS).rate == 125


@given(st.floats(20, 900))
def test_a_link_that_slows_steps_in_proportion_is_shared_within_the_limit(bearable: float) -> None:
    """Steps slow down by 2 % at `bearable`: the rate comes to rest at or below it, and not far below."""
    rate = OPTIONS.first
    for _ in range(60):
        slow = 1 + 0.02 * rate / bearable
        rate = decide_pace(rate, sending=[slow] * 3, quiet=[1.0] * 2, limited=True, options=OPTIONS).rate
    assert 0.45 * bearable <= rate <= bearable


def test_steps_are_told_apart() -> None:
    times = StepTimes(OPTIONS)
    times.took(1.0)
    times.switch(sending=True)
    times.took(2.0)
    times.switch(sending=True)
    times.took(3.0)
    times.switch(sending=False)
    times.took(4.0)
    times.took(5.0)
    times.switch(sending=True)
    times.switch(sending=False)
    times.took(6.0)
    assert times.sending == [3.0]
    assert list(times.quiet) == [1.0, 5.0]


def test_a_baseline_is_wanted_once_steps_are_told_of_and_again_when_it_is_old() -> None:
    times = StepTimes(OPTIONS)
    assert not times.needs_quiet
    times.took(1.0)
    assert times.needs_quiet
    times.took(1.0)
    assert not times.needs_quiet
    times.switch(sending=True)
    for _ in range(19):
        times.took(1.0)
        assert not times.needs_quiet
    times.took(1.0)
    assert times.needs_quiet


class Clock:
    def __init__(self) -> None:
        self.now = 0.0
        self.naps: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.naps.append(seconds)
        self.now += seconds


@given(st.lists(st.integers(1, 1000), min_size=5, max_size=50), st.floats(10, 1e5))
def test_the_bucket_keeps_to_its_rate(counts: list[int], rate: float) -> None:
    clock = Clock()
    bucket = Bucket(rate, clock=clock, sleep=clock.sleep, burst_s=0.05)
    for count in counts:
        bucket.take(count)
    # The last is let through before it is paid for, and naps have a least length.
    least_s = sum(counts[:-1]) / rate
    assert least_s * (1 - 1e-6) <= clock.now <= least_s + 0.002 * len(counts)
    assert all(nap <= 0.25 for nap in clock.naps)


def test_what_was_not_used_is_lost_but_for_a_little() -> None:
    clock = Clock()
    bucket = Bucket(100.0, clock=clock, sleep=clock.sleep, burst_s=0.1)
    clock.now = 1000.0
    bucket.take(10)
    bucket.take(1)
    assert clock.naps == []
    bucket.take(1)
    assert clock.now == pytest.approx(1000.01)


def test_a_new_rate_holds_for_who_is_waiting() -> None:
    clock = Clock()
    bucket = Bucket(1.0, clock=clock, sleep=lambda seconds: (clock.sleep(seconds), bucket.set_rate(1e6)))
    bucket.take(1000)
    bucket.take(1)
    assert clock.now < 1


def test_whether_it_was_the_rate_that_held_the_sender_back() -> None:
    clock = Clock()
    bucket = Bucket(100.0, clock=clock, sleep=clock.sleep)
    for _ in range(10):
        bucket.take(10)
    assert bucket.limited
    bucket.set_rate(200.0)
    for _ in range(10):
        clock.now += 1
        bucket.take(10)
    assert not bucket.limited


def test_a_sleep_that_raises_breaks_off() -> None:
    def refuse(seconds: float) -> None:
        raise RuntimeError("closing")

    bucket = Bucket(1.0, clock=Clock(), sleep=refuse)
    bucket.take(5)
    with pytest.raises(RuntimeError):
        bucket.take(5)
