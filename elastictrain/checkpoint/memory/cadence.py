"""How often snapshots are taken with `checkpoint.snapshot_every_steps=auto`: as often as they cost at most 1 % of training.

Rank 0 alone measures and decides. Its interval reaches the other ranks with the flags of a step, so all take the same ones.
"""

import logging
import math
from collections import deque
from collections.abc import Sequence

logger = logging.getLogger(__name__)

SHARE = 0.01  # largest share of training time that snapshots may cost
FIRST = 2  # steps between snapshots before anything is measured: as few as three slots allow, as failures do not wait
RARE = 10  # steps between snapshots where there is one slot
MOST = 10_000
TOUCHED = 2  # steps that a snapshot may slow: it is copied beside one, and completed beside the next
NEAR = 8  # steps before and after these: those without a snapshot among them show what a step takes otherwise
KNOWN_AFTER = 3  # steps until all ranks know that a snapshot is whole: flags are read one step late
LEAST_COSTS, MOST_COSTS = 6, 32  # snapshots per decision
SPAN = 640  # where snapshots are rare, a decision looks at those of so many steps
PLAIN = 16  # steps without a snapshot whose mean is the usual duration
FRESH_STEPS = 64  # a step without a snapshot is measured at least this often


def least_interval(slots: int) -> int:
    """The shortest even interval that the slots allow: one is overwritten only while another is known to be whole. With one
    slot there is no other, and while it is overwritten nothing is whole: then snapshots stay rare."""
    return math.ceil(KNOWN_AFTER / (slots - 1)) if slots > 1 else RARE


def spread_interval(age: int) -> int:
    """The least interval while one slot alone can be overwritten, and the newest snapshot in the others is `age` steps old. A
    failure repeats half an interval k, or those `age` steps if it comes during a copy, which takes `TOUCHED` of k steps: on
    average k / 2 + `TOUCHED` * `age` / k, which is least for k = sqrt(2 * `TOUCHED` * `age`)."""
    return math.isqrt(2 * TOUCHED * age)


def decide_interval(interval: int, *, costs_s: Sequence[Sequence[float]], usual_s: float, least: int = 1) -> tuple[int, str]:
    """The next interval in steps, at least `least`, and why. `costs_s`: by snapshot, how much longer than usual each of the
    `TOUCHED` steps was; `usual_s`: duration of a step without a snapshot.

    The interval grows, at most twofold, when the cost is clearly more than `SHARE`; it shrinks when even a pessimistic cost
    allows a clearly shorter one. In between it stays, so that noise does not move it.
    """
    if len(costs_s) < LEAST_COSTS or usual_s <= 0:
        return max(interval, least), "too few steps to compare"
    by_place = [middle(seconds) for seconds in zip(*costs_s, strict=True)]
    cost_s = sum(seconds for seconds, _ in by_place)
    # Snapshots share the steps that they are compared with: their costs differ less than they are wrong.
    error_s = 1.5 * math.hypot(*(error for _, error in by_place))

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
        # Durations of the last steps, NaN where something else took time, and whether a snapshot began before: 0 for the step
        # after that, then 1, and so on.
        self._recent: deque[tuple[float, int]] = deque(maxlen=NEAR + TOUCHED + NEAR)
        self._place = TOUCHED
        self._plain: deque[float] = deque(maxlen=PLAIN)
        self._num_since_plain = 0
        self._costs: deque[tuple[float, ...]] = deque(maxlen=MOST_COSTS)
        self._dropped = False  # whether the newest snapshot could not be measured

    @property
    def interval(self) -> int:
        """Steps from the newest snapshot to the next one."""
        if self._num_since_plain >= FRESH_STEPS:
            # Without steps to compare with nothing is measured.
            return max(self.learned, TOUCHED + 2)
        # One step later, or an evaluation every so many steps would hit each snapshot, and none could be measured.
        return self.learned + self._dropped

    def step_took(self, seconds: float, *, began: bool, usable: bool = True) -> bool:
        """Record a step; returns whether `learned` has changed. `began`: a snapshot has begun since the step before it.
        `usable`: nothing else took time in it, such as an evaluation or a compilation."""
        before = self.learned
        self._place = 0 if began else self._place + 1
        self._recent.append((seconds if usable else math.nan, self._place))
        self._num_since_plain += 1
        if usable and self._place >= TOUCHED:
            self._plain.append(seconds)
            self._num_since_plain = 0
        if len(self._recent) == self._recent.maxlen:
            touched = [self._recent[NEAR + place] for place in range(TOUCHED)]
            if [place for _, place in touched] == list(range(TOUCHED)):
                self._measured([took for took, _ in touched])
        return self.learned != before

    def _measured(self, touched: Sequence[float]) -> None:
        """A snapshot lies in the middle of the recent steps. What slows all of them for a while is no cost of it."""
        near = [seconds for seconds, place in self._recent if place >= TOUCHED and not math.isnan(seconds)]
        self._dropped = any(map(math.isnan, touched))
        if self._dropped or len(near) < 2:
            return
        near_s, _ = middle(near)
        self._costs.append(tuple(seconds - near_s for seconds in touched))
        usual_s, _ = middle(self._plain)
        least = self._least
        if usual_s > 0:
            least = max(least, min(MOST, math.ceil(self._pause_s / usual_s - 1e-6)))
        before = self.learned
        newest = max(LEAST_COSTS, SPAN // before)
        self.learned, reason = decide_interval(before, costs_s=list(self._costs)[-newest:], usual_s=usual_s, least=least)
        if self.learned != before:
            logger.debug("snapshots are taken every %d steps from now on: %s", self.learned, reason)
