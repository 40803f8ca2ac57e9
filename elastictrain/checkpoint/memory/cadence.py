"""How often snapshots are taken with `checkpoint.snapshot_every_steps=auto`: as often as they cost at most 1 % of training.

Rank 0 alone measures and decides. Its interval reaches the other ranks with the flags of a step, so all take the same ones.
"""

import logging
import math
from collections import deque
from collections.abc import Sequence

logger = logging.getLogger(__name__)

SHARE = 0.01  # largest share of training time that snapshots may cost
FIRST = 10  # steps between snapshots before anything is measured
MOST = 10_000
TOUCHED = 2  # steps that a snapshot may slow: it is copied beside one, and completed beside the next
KNOWN_AFTER = 3  # steps until all ranks know that a snapshot is whole: flags are read one step late
LEAST_COSTS, MOST_COSTS = 6, 32  # snapshots per decision
LEAST_PLAIN, MOST_PLAIN = 8, 64  # steps without a snapshot, to compare with
SPAN = 640  # where snapshots are rare, a decision looks at those of so many steps
FRESH_STEPS, STALE_STEPS = 64, 512  # a step without a snapshot is measured at least every 64 steps, and forgotten after 512


def least_interval(slots: int) -> int:
    """The shortest even interval that the slots allow: one is overwritten only while another is known to be whole. With one
    slot there is no other, and while it is overwritten nothing is whole: then snapshots stay rare."""
    return math.ceil(KNOWN_AFTER / (slots - 1)) if slots > 1 else FIRST


def decide_interval(
    interval: int, *, costs_s: Sequence[Sequence[float]], plain_s: Sequence[float], least: int = 1
) -> tuple[int, str]:
    """The next interval in steps, at least `least`, and why. `costs_s`: by snapshot, how much longer than usual each of the
    `TOUCHED` steps was; `plain_s`: durations of steps without a snapshot.

    The interval grows, at most twofold, when the cost is clearly more than `SHARE`; it shrinks when even a pessimistic cost
    allows a clearly shorter one. In between it stays, so that noise does not move it.
    """
    usual_s, usual_error_s = middle(plain_s)
    if len(costs_s) < LEAST_COSTS or len(plain_s) < LEAST_PLAIN or usual_s <= 0:
        return max(interval, least), "too few steps to compare"
    by_place = [middle(seconds) for seconds in zip(*costs_s, strict=True)]
    cost_s = sum(seconds for seconds, _ in by_place)
    # All costs were measured against nearly the same steps: more costs do not make that part of the error smaller.
    error_s = math.hypot(*(error for _, error in by_place), TOUCHED * usual_error_s)

    def needed(seconds: float) -> int:
        return max(least, min(MOST, math.ceil(seconds / (SHARE * usual_s) - 1e-6)))

    found = f"a snapshot costs {1e3 * cost_s:.3g} ms (+- {1e3 * error_s:.2g}), a step takes {1e3 * usual_s:.3g} ms"
    if needed(cost_s - error_s) > interval:
        return min(needed(cost_s), 2 * interval), found
    pessimistic = needed(cost_s + 2 * error_s)
    return (pessimistic if pessimistic <= max(least, 0.8 * interval) else max(interval, least)), found


def middle(values: Sequence[float]) -> tuple[float, float]:
    """The mean without the lowest and highest eighth, which single stalls do not move, and its standard error, from the
    distance between the quartiles. `values` has at least two, or the error is infinite."""
    if len(values) < 2:
        return (values[0] if values else 0.0), math.inf
    ordered = sorted(values)
    cut = math.ceil(len(ordered) / 8)
    kept = ordered[cut:-cut] or ordered
    spread = ordered[3 * (len(ordered) - 1) // 4 + 1 if len(ordered) > 2 else -1] - ordered[(len(ordered) - 1) // 4]
    # The quartiles of a normal distribution lie 1.349 standard deviations apart.
    return sum(kept) / len(kept), spread / 1.349 / math.sqrt(len(ordered))


class Cadence:
    """Learns the interval from the durations of steps."""

    def __init__(self, slots: int, *, first: int = FIRST, pause_s: float = 0.0) -> None:
        """`slots`: snapshots that memory has room for. `first`: the interval before anything is measured. `pause_s`: least time
        between two snapshots."""
        self._least = least_interval(slots)
        self._pause_s = pause_s
        self.learned = min(MOST, max(first, self._least))  # the interval as far as costs decide it
        self._num_steps = 0
        self._plain: deque[tuple[int, float]] = deque(maxlen=MOST_PLAIN)  # numbers and durations of steps
        self._costs: deque[tuple[float, ...]] = deque(maxlen=MOST_COSTS)
        self._touched: list[float] | None = None  # durations of the steps that the newest snapshot touches
        self._dropped = False  # whether the cost of the newest snapshot could not be measured

    @property
    def interval(self) -> int:
        """Steps from the newest snapshot to the next one."""
        if not self._plain or self._num_steps - self._plain[-1][0] >= FRESH_STEPS:
            # Without new steps to compare with, slower steps would pass for dearer snapshots.
            return max(self.learned, TOUCHED + 2)
        # One step later, or an evaluation every so many steps would hit each snapshot, and none could be measured.
        return self.learned + self._dropped

    def step_took(self, seconds: float, *, began: bool, usable: bool = True) -> None:
        """Record a step. `began`: a snapshot has begun since the step before it. `usable`: nothing else took time in it, such
        as an evaluation or a compilation."""
        if began:
            self._touched = []
        self._num_steps += 1
        if self._touched is not None:
            self._touched.append(seconds if usable else math.nan)
            if len(self._touched) == TOUCHED:
                touched, self._touched = self._touched, None
                self._measured(touched)
        elif usable:
            self._plain.append((self._num_steps, seconds))
        while self._plain and self._plain[0][0] <= self._num_steps - STALE_STEPS:
            self._plain.popleft()

    def _measured(self, touched: Sequence[float]) -> None:
        self._dropped = any(map(math.isnan, touched))
        if self._dropped or len(self._plain) < LEAST_PLAIN:
            return
        plain_s = [seconds for _, seconds in self._plain]
        usual_s, _ = middle(plain_s)
        self._costs.append(tuple(seconds - usual_s for seconds in touched))
        newest = max(LEAST_COSTS, SPAN // self.learned)
        least = self._least
        if usual_s > 0:
            least = max(least, min(MOST, math.ceil(self._pause_s / usual_s - 1e-6)))
        before = self.learned
        self.learned, reason = decide_interval(before, costs_s=list(self._costs)[-newest:], plain_s=plain_s, least=least)
        if self.learned != before:
            logger.debug("snapshots are taken every %d steps from now on: %s", self.learned, reason)
