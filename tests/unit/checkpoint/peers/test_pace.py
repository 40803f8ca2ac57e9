"""The rate follows what steps tell, within bounds, and says why; the bucket keeps to it."""

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastictrain.checkpoint.peers import pace
from elastictrain.checkpoint.peers.pace import Pacer, decide_pace

SECONDS = st.lists(st.floats(0, 1e6), max_size=8)


@pytest.fixture(autouse=True, scope="module")
def small_figures() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(pace, "LEAST_RATE", 10.0)
        patched.setattr(pace, "MOST_RATE", 1000.0)
        patched.setattr(pace, "WINDOW", 3)
        patched.setattr(pace, "BASELINE", 2)
        patched.setattr(pace, "FRESH_STEPS", 20)
        yield


def decide(slowdown: float, *, rate: float = 100.0, limited: bool = True) -> tuple[float, str]:
    return decide_pace(rate, sending=[1 + slowdown] * 3, quiet=[1.0, 1.0], limited=limited)


@given(st.floats(10, 1000), SECONDS, SECONDS, st.booleans())
def test_the_rate_stays_within_its_bounds(rate: float, sending: list[float], quiet: list[float], limited: bool) -> None:
    following, reason = decide_pace(rate, sending=sending, quiet=quiet, limited=limited)
    assert 10 <= following <= 1000
    assert reason


@pytest.mark.parametrize(("slowdown", "rate"), [(0.021, 71.4), (0.03, 50.0), (0.5, 25.0), (0.015, 100.0), (0.005, 125.0)])
def test_rates(slowdown: float, rate: float) -> None:
    assert decide(slowdown)[0] == pytest.approx(rate, rel=0.01)


def test_the_reason_has_the_slowdown_and_the_limit() -> None:
    reason = decide(0.5)[1]
    assert "+50.0" in reason
    assert "2 %" in reason


def test_a_sender_that_something_else_holds_back_gets_no_higher_rate() -> None:
    assert decide(0.0, limited=False)[0] == 100
    assert decide(0.5, limited=False)[0] == 25


@pytest.mark.parametrize(("sending", "quiet"), [([9.0] * 2, [1.0] * 2), ([9.0] * 3, [1.0])])
def test_too_few_steps_decide_nothing(sending: list[float], quiet: list[float]) -> None:
    assert decide_pace(100.0, sending=sending, quiet=quiet, limited=True)[0] == 100


def test_the_median_overlooks_a_single_slow_step() -> None:
    assert decide_pace(100.0, sending=[1, 1, 50.0], quiet=[1, 1], limited=True)[0] == 125


@given(st.floats(20, 900))
def test_a_link_that_slows_steps_in_proportion_is_shared_within_the_limit(bearable: float) -> None:
    """Steps slow down by 2 % at `bearable`: the rate comes to rest at or below it, and not far below."""
    rate = 100.0
    for _ in range(60):
        slow = 1 + 0.02 * rate / bearable
        rate, _ = decide_pace(rate, sending=[slow] * 3, quiet=[1.0] * 2, limited=True)
    assert 0.45 * bearable <= rate <= bearable


class Clock:
    def __init__(self) -> None:
        self.now = 0.0
        self.naps: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.naps.append(seconds)
        self.now += seconds


def pacer(rate: float = 100.0, clock: Clock | None = None) -> Pacer:
    return Pacer(rate, clock=clock or Clock())


def test_steps_are_told_apart() -> None:
    """Those that are half of each count for neither."""
    found = pacer()
    for sending, seconds in ((False, 1.0), (False, 1.0), (True, 99.0), (True, 2.0), (False, 99.0), (True, 99.0), (True, 2.0)):
        found.switch(sending=sending)
        found.step_took(seconds)
    # Sending has ended and begun within one step.
    found.switch(sending=False)
    found.switch(sending=True)
    found.step_took(99.0)
    assert found.rate == 100
    assert found.step_took(2.0)
    assert found.rate == 25


def test_a_baseline_is_wanted_once_steps_are_told_of_and_again_when_it_is_old() -> None:
    found = pacer()
    assert not found.needs_quiet
    found.step_took(1.0)
    assert found.needs_quiet
    found.step_took(1.0)
    assert not found.needs_quiet
    found.switch(sending=True)
    for _ in range(19):
        found.step_took(1.0)
        assert not found.needs_quiet
    found.step_took(1.0)
    assert found.needs_quiet


def test_another_group_is_compared_with_its_own_steps() -> None:
    found = pacer()
    take_steps(found, sending_s=1.5)
    assert found.rate == 25
    found.forget_steps()
    assert not found.needs_quiet
    found.step_took(1.5)
    assert found.needs_quiet
    take_steps(found, sending_s=1.5, quiet_s=1.5)
    assert found.rate == 25


@given(st.lists(st.integers(1, 1000), min_size=5, max_size=50), st.floats(10, 1e5))
def test_bytes_keep_to_the_rate(counts: list[int], rate: float) -> None:
    clock = Clock()
    sender = pacer(rate, clock)
    for count in counts:
        sender.take(count, sleep=clock.sleep)
    # The last is let through before it is paid for, and naps have a least length.
    least_s = sum(counts[:-1]) / rate
    assert least_s * (1 - 1e-6) <= clock.now <= least_s + 0.002 * len(counts)
    assert all(nap <= 0.25 for nap in clock.naps)


def test_what_was_not_used_is_lost_but_for_a_little(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(pace, "BURST_S", 0.1)
    sender = pacer(100.0, clock)
    clock.now = 1000.0
    sender.take(10, sleep=clock.sleep)
    sender.take(1, sleep=clock.sleep)
    assert clock.naps == []
    sender.take(1, sleep=clock.sleep)
    assert clock.now == pytest.approx(1000.01)


def take_steps(sender: Pacer, *, sending_s: float, quiet_s: float = 1.0) -> None:
    """Enough of both kinds to decide a rate."""
    for sending, seconds in ((False, quiet_s), (True, sending_s)):
        sender.switch(sending=sending)
        for _ in range(4):
            sender.step_took(seconds)
    sender.switch(sending=False)
    sender.step_took(quiet_s)


def test_a_new_rate_holds_for_who_is_waiting() -> None:
    clock = Clock()

    def sleep(seconds: float) -> None:
        clock.sleep(seconds)
        sender.rate = 1e6

    sender = pacer(1.0, clock)
    sender.take(1000, sleep=sleep)
    sender.take(1, sleep=sleep)
    assert clock.now < 1


def test_the_rate_rises_only_while_it_is_what_holds_the_sender_back() -> None:
    clock = Clock()
    sender = pacer(100.0, clock)
    for _ in range(10):
        sender.take(10, sleep=clock.sleep)
    take_steps(sender, sending_s=1.0)
    assert sender.rate == 125
    for _ in range(10):
        clock.now += 1
        sender.take(10, sleep=clock.sleep)
    take_steps(sender, sending_s=1.0)
    assert sender.rate == 125


def test_a_sleep_that_raises_breaks_off() -> None:
    def refuse(seconds: float) -> None:
        raise RuntimeError("closing")

    sender = pacer(1.0)
    sender.take(5, sleep=refuse)
    with pytest.raises(RuntimeError):
        sender.take(5, sleep=refuse)
