"""How often state goes to storage with `checkpoint.every_steps=auto`: the interval that leaves the most time for training.

Rank 0 alone measures and decides; its clock asks for a save, as with `checkpoint.every_minutes`.
"""

import math
from bisect import bisect_right
from collections import deque
from dataclasses import KW_ONLY, InitVar, dataclass, field, replace
from itertools import pairwise
from statistics import median
from typing import Literal

PRIOR_LOSSES, PRIOR_S = 1.0, 3 * 3600.0
"""What is known of losses before any is seen: as much as one in three hours shows. A few hours of training outweigh it."""

LEAST_S = 1.0
FIRST_SAVE_S = 1.0  # cost of a save before one is measured
KNOWN_AFTER = 3  # steps after which all ranks know that a save is under way
_SAVES = 9  # whose costs count: the median of the newest
_PLAIN_STEPS = 64
_CHANGE = 0.1  # share of the interval that a new one must differ by to be reported


AGES_S = tuple(900.0 * 2**power for power in range(6))  # training since the last loss, where one range of ages ends
AGE_LOSSES = 4.0  # losses that the mean rate counts as in each range of ages


@dataclass(frozen=True, slots=True)
class FailureCounts:
    """Failures of a job, by what was left, and the time of training in which they came."""

    losses: int = 0  # after which the run went on from storage: nothing newer was left in memory
    kept: int = 0  # after which it went on from the memory of hosts: storage had no part in them
    trained_s: float = 0.0
    since_loss_s: float = 0.0  # trained since the last loss, or since the begin of the job
    by_age: tuple[tuple[int, float], ...] = ()  # losses and training in each range of ages; empty: not known

    @property
    def mean_time_to_loss_s(self) -> float:
        """The mean of a loss rate with a gamma prior, inverted. A failure that memory outlives calls for no save."""
        return (PRIOR_S + self.trained_s) / (PRIOR_LOSSES + self.losses)

    @property
    def time_to_loss_s(self) -> float:
        """The same at the present age: losses come in bursts, so the next one is likelier soon after one. The prior of each
        range of ages is the mean. Source of the idea: Tiwari and others, "Lazy Checkpointing" (DSN 2014)."""
        losses, trained_s = self._ages()[bisect_right(AGES_S, self.since_loss_s)]
        return (AGE_LOSSES * self.mean_time_to_loss_s + trained_s) / (AGE_LOSSES + losses)

    def _ages(self) -> list[tuple[int, float]]:
        known = len(self.by_age) == len(AGES_S) + 1
        return list(self.by_age) if known else [(0, 0.0)] * (len(AGES_S) + 1)

    def trained(self, seconds: float) -> "FailureCounts":
        ages, since_s = self._ages(), self.since_loss_s
        for place, (begin_s, end_s) in enumerate(pairwise((0.0, *AGES_S, math.inf))):
            within_s = min(since_s + seconds, end_s) - max(since_s, begin_s)
            ages[place] = (ages[place][0], ages[place][1] + max(0.0, within_s))
        return FailureCounts(self.losses, self.kept, self.trained_s + seconds, since_s + seconds, tuple(ages))

    def failed(self, *, lost: bool) -> "FailureCounts":
        """`lost`: the run goes on from storage."""
        if not lost:
            return replace(self, kept=self.kept + 1)
        ages, place = self._ages(), bisect_right(AGES_S, self.since_loss_s)
        ages[place] = (ages[place][0] + 1, ages[place][1])
        return FailureCounts(self.losses + 1, self.kept, self.trained_s, 0.0, tuple(ages))


@dataclass(frozen=True, slots=True)
class SaveCosts:
    save_s: float = FIRST_SAVE_S  # training time that a save takes
    write_s: float = 0.0  # from the save to its commit: what is lost comes on top of the interval
    recover_s: float = 0.0  # from a failure to the first step


@dataclass(frozen=True, slots=True)
class SaveInterval:
    seconds: float
    limited_by: Literal["", "max_lost_s", "write_s"]  # what keeps it from the best one for availability


def optimal_interval(*, save_s: float, recover_s: float, failure_s: float) -> float:
    """Seconds of training between saves that leave the most time for training. Where failures are rare it is Young's
    sqrt(2 * save_s * failure_s). Source: Saxena and others, arXiv 2410.18124, whose interval includes the save itself."""
    return math.sqrt(2 * (failure_s + recover_s) * save_s + save_s**2)


def decide_save_interval(costs: SaveCosts, failures: FailureCounts, *, max_lost_s: float) -> SaveInterval:
    """`max_lost_s`: training that a loss may cost at most; that a save must end before the next one begins comes first."""
    failure_s = failures.time_to_loss_s
    best_s = max(LEAST_S, optimal_interval(save_s=costs.save_s, recover_s=costs.recover_s, failure_s=failure_s))
    bounded_s = min(best_s, max_lost_s - costs.write_s)
    least_s = max(LEAST_S, costs.write_s)
    if bounded_s < least_s:
        return SaveInterval(least_s, "write_s")
    return SaveInterval(bounded_s, "max_lost_s" if bounded_s < best_s else "")


@dataclass(slots=True)
class SaveTuner:
    """Learns what a save costs from the durations of steps, and adapts the interval. Times are by the caller's clock."""

    failures: InitVar[FailureCounts]  # those before this generation
    _: KW_ONLY
    max_lost_s: float
    recover_s: float = 0.0
    interval: SaveInterval = field(init=False)
    _plain: deque[float] = field(default_factory=lambda: deque(maxlen=_PLAIN_STEPS), init=False)  # steps without a save
    _slow: list[float] = field(default_factory=list, init=False)  # steps during the present save
    _costs: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=_SAVES), init=False)
    _began: tuple[float, float] | None = field(default=None, init=False)  # when the present save began, and its stall
    _writing: bool = field(default=False, init=False)
    _steps_since: int = field(default=0, init=False)
    _reported_s: float = field(default=0.0, init=False)
    _counts: FailureCounts = field(init=False)
    trained_s: float = field(default=0.0, init=False)  # in this generation

    def __post_init__(self, failures: FailureCounts) -> None:
        self._counts = failures
        self.interval = decide_save_interval(self.costs, self.counts, max_lost_s=self.max_lost_s)

    @property
    def costs(self) -> SaveCosts:
        if not self._costs:
            return SaveCosts(recover_s=self.recover_s)
        save_s, write_s = (median(one) for one in zip(*self._costs, strict=True))
        return SaveCosts(save_s, write_s, self.recover_s)

    @property
    def counts(self) -> FailureCounts:
        return self._counts.trained(self.trained_s)

    def is_due(self, since_save_s: float) -> bool:
        """Whether a save is asked for, the last one having begun so long ago. It waits for that one to be written."""
        return since_save_s >= self.interval.seconds and not self._writing

    def save_began(self, now_s: float, *, stall_s: float) -> None:
        """A save was begun, and training has waited for `stall_s` until `now_s`."""
        if self._began is not None:
            # The one before is not written yet: what it has cost so far is known, and is no less than that.
            self._learn(*self._began, now_s=now_s - stall_s)
        self._began, self._slow, self._steps_since = (now_s - stall_s, stall_s), [], 0

    def step_took(self, seconds: float, *, now_s: float, saving: bool, failing: bool = False) -> None:
        """`saving`: a save was under way, or the last one has failed (`failing`), which counts as under way until another one
        is written. Single stalls, such as evaluations, do not count: medians are compared."""
        self.trained_s += seconds
        self._writing = saving and not failing
        if saving:
            self._slow.append(seconds)
            return
        self._steps_since += 1
        if self._began is not None and (self._slow or self._steps_since > KNOWN_AFTER):
            self._learn(*self._began, now_s=now_s)
        self._plain.append(seconds)

    def _learn(self, begun_s: float, stall_s: float, *, now_s: float) -> None:
        slower_s = median(self._slow) - median(self._plain) if self._slow and self._plain else 0.0
        cost_s = stall_s + max(0.0, slower_s) * len(self._slow)
        # A save that was written before any step ended has made training wait for all of it.
        self._costs.append((cost_s, now_s - begun_s if self._slow else stall_s))
        self._began = None
        self.interval = decide_save_interval(self.costs, self.counts, max_lost_s=self.max_lost_s)

    def take_change(self) -> SaveInterval | None:
        """The interval, if it is clearly another one than at the last report."""
        if abs(self.interval.seconds - self._reported_s) <= _CHANGE * self._reported_s:
            return None
        self._reported_s = self.interval.seconds
        return self.interval
