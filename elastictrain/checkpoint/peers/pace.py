"""How fast replicas may be sent without slowing training down: the decision, which is pure, and a pacer that obeys it."""

import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

_SHORTEST_NAP_S = 0.001
_LONGEST_NAP_S = 0.25


SLOWDOWN = 0.02  # largest accepted increase of the step time while replicas are sent
# Rates are in bytes/s. The first one, before any measurement, is a tenth of what the slowest links of a cluster carry.
FIRST_RATE, LEAST_RATE, MOST_RATE = 100e6, 4e6, 20e9
WINDOW = 10  # steps while sending per decision
BASELINE = 5  # steps without sending for comparison
BURST_S = 0.05  # what was not used in this time may be sent later
FRESH_STEPS = 200  # a baseline older than so many steps is measured again


def decide_pace(rate: float, *, sending: Sequence[float], quiet: Sequence[float], limited: bool) -> tuple[float, str]:
    """Return the next rate in bytes/s and why, from step durations while sending at `rate` and without sending.

    The rate decreases in proportion to the excess, to between a quarter and nine tenths; it increases by a quarter if the
    slowdown is clearly below the limit and the rate is what `limited` the sender.
    """
    if len(sending) < WINDOW or len(quiet) < BASELINE:
        return rate, f"too few steps to compare: {len(sending)} while sending, {len(quiet)} without"
    usual = statistics.median(quiet)
    if usual <= 0:
        return rate, "steps without sending take no time"
    slowdown = statistics.median(sending) / usual - 1
    found = f"steps take {100 * slowdown:+.1f} % while sending at {rate / 1e6:.0f} MB/s"
    if slowdown > SLOWDOWN:
        factor = min(0.9, max(0.25, 0.75 * SLOWDOWN / slowdown))
        return max(LEAST_RATE, rate * factor), f"{found}: more than {100 * SLOWDOWN:g} %"
    if slowdown > SLOWDOWN / 2:
        return rate, f"{found}: about as much as is allowed"
    if not limited:
        return rate, f"{found}, and something else than the rate holds the sender back"
    return min(MOST_RATE, 1.25 * rate), f"{found}: clearly less than {100 * SLOWDOWN:g} %"


class Pacer:
    """A token bucket whose rate follows step durations. One thread sends, another one reports steps.
    Steps count as sending or quiet; steps with both count as neither."""

    def __init__(self, first_rate: float = FIRST_RATE, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.rate = first_rate  # bytes/s
        self._clock = clock
        self._lock = threading.Lock()
        self._tokens = 0.0
        self._filled_at = clock()
        self._takes = self._waits = 0
        self._sending_now = self._changed = False
        self._num_steps = 0
        self._sending: list[float] = []  # durations of steps since the last decision
        self._quiet: deque[tuple[int, float]] = deque(maxlen=4 * BASELINE)  # numbers and durations of steps

    def forget_steps(self) -> None:
        """Another group trains from now on: its step times differ."""
        with self._lock:
            self._num_steps = 0
            self._sending.clear()
            self._quiet.clear()

    def switch(self, *, sending: bool) -> None:
        with self._lock:
            self._changed |= sending != self._sending_now
            self._sending_now = sending

    def step_took(self, seconds: float) -> str:
        """Record a step's duration. Returns why the rate has changed; empty if it has not."""
        with self._lock:
            self._num_steps += 1
            if self._changed:
                self._changed = False
            elif not self._sending_now:
                self._quiet.append((self._num_steps, seconds))
            else:
                self._sending.append(seconds)
            if len(self._sending) < WINDOW:
                return ""
            limited = 2 * self._waits > self._takes
            quiet = [took for _, took in self._quiet]
            rate, reason = decide_pace(self.rate, sending=self._sending, quiet=quiet, limited=limited)
            self._sending.clear()
            if rate == self.rate:
                return ""
            self._fill()
            self.rate = rate
            self._takes = self._waits = 0
            return reason

    @property
    def needs_quiet(self) -> bool:
        """Whether steps without sending are needed before more is sent; False while no steps are reported."""
        with self._lock:
            oldest = self._num_steps - FRESH_STEPS
            fresh = len(self._quiet) >= BASELINE and self._quiet[-BASELINE][0] >= oldest
            return self._num_steps > 0 and not fresh

    def take(self, count: int, *, sleep: Callable[[float], object] = time.sleep) -> None:
        """Wait until `count` bytes may be sent. Raises: the errors of `sleep`, which is called often enough to break off."""
        waited = False
        while True:
            with self._lock:
                self._fill()
                if self._tokens >= 0:
                    # May exceed the bucket; the debt is paid off before the next send.
                    self._tokens -= count
                    self._takes += 1
                    self._waits += waited
                    return
                wait_s = -self._tokens / self.rate
            waited = True
            sleep(min(_LONGEST_NAP_S, max(_SHORTEST_NAP_S, wait_s)))

    def _fill(self) -> None:
        now = self._clock()
        self._tokens = min(BURST_S * self.rate, self._tokens + (now - self._filled_at) * self.rate)
        self._filled_at = now
