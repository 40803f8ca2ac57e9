"""Decides which ranks hold up the others, from how long each rank works on each phase of a step; pure.

All ranks of a synchronous step end it together, so its duration names nobody. What differs is how long a rank works before it
waits for the others.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median_low

import torch
from torch import Tensor

from elastictrain.events import StragglerFound

BETWEEN = "between"  # the phase from the end of an update to the next step: events, snapshots, evaluation
PHASES = ("data", "forward", "backward", "update", BETWEEN)
FIGURES = 1 + len(PHASES)  # per rank: seconds of the step, and of its work in each phase

WINDOW_STEPS = 30  # medians of so many steps are compared: pauses in less than half of them do not count
IN_A_ROW = 3  # windows in which a rank must be slow to be named, or not slow to be cleared
_LEAST_MARGIN = 0.1  # of the phase: less slowness is no straggler, however regular the steps are
_LEAST_SHARE = 0.2  # of the step: a shorter phase counts as this long, because its margin would be a trifle of the step
_LEAST_S = 0.001
_ERRORS = 4.0  # standard errors of a median that a rank must be slower
_SPREADS = 4.5  # median deviations between the ranks; three standard deviations of a normal distribution
_ERROR = math.sqrt(math.pi / 2) * 1.4826  # of the median of normal values, in median deviations, times the root of their number


@dataclass(frozen=True, slots=True)
class Lag:
    """A rank is slower than the others in a phase, by more than the margin. Times are medians, in seconds."""

    phase: str
    own_s: float
    others_s: float
    step_s: float


@dataclass(frozen=True, slots=True)
class Straggler:
    """A rank that holds up the others."""

    rank: int
    lag: Lag
    steps: int  # how many it has done since it was slow for the first time
    over: bool = False  # whether it has just been cleared

    def event(self, *, step: int, host: str) -> StragglerFound:
        """`step`: the one after which it is known; `host`: of the rank."""
        return StragglerFound(
            step=step,
            of_rank=self.rank,
            host=host,
            phase=self.lag.phase,
            own_s=self.lag.own_s,
            others_s=self.lag.others_s,
            step_s=self.lag.step_s,
            steps=self.steps,
            over=self.over,
        )

    def describe(self, *, host: str) -> str:
        who, lag = f"rank {self.rank} on {host}", self.lag
        if self.over:
            return f"{who} does not hold up the others any more"
        times = f"{lag.phase} takes {lag.own_s * 1000:.1f} ms of a step, and {lag.others_s * 1000:.1f} ms on the other ranks"
        return f"{who} has held up the others for {self.steps} steps: {times}"


def to_leave_out(named: Sequence[Straggler], *, after: int) -> Straggler | None:
    """The one whose host should be left out: the straggler of the most steps, `after` at least; None if `after` is 0. Work
    between steps is that of a rank on any host."""
    due = [one for one in named if 0 < after <= one.steps and one.lag.phase != BETWEEN]
    return min(due, key=lambda one: (-one.steps, one.rank), default=None)


def find_lags(times: Tensor) -> dict[int, Lag]:
    """The slow ranks of a window, each with the phase in which it loses most. `times` [steps, ranks, FIGURES] float64, 0 where
    nothing was measured. The margin is learned from the window: from how much a phase varies from step to step, and from rank
    to rank."""
    measured = torch.where(times == 0.0, torch.nan, times)
    typical = measured.nanmedian(dim=0).values
    errors = _ERROR * (measured - typical).abs().nanmedian(dim=0).values / (times != 0.0).sum(dim=0).sqrt()
    step_s = median_low(typical[:, 0].tolist())
    found: dict[int, Lag] = {}
    for index, phase in enumerate(PHASES, start=1):
        own = typical[:, index].tolist()
        if not max(own) - min(own) > _LEAST_S:
            # Also what no step has measured, which is not a number.
            continue
        middle = median_low(own)
        spread = median_low([abs(value - middle) for value in own])
        error = median_low(errors[:, index].tolist())
        for rank, (own_s, others_s) in enumerate(zip(own, medians_of_others(own), strict=True)):
            least = _LEAST_MARGIN * max(others_s, _LEAST_SHARE * step_s)
            excess_s = own_s - others_s
            if excess_s <= max(least, _ERRORS * error, _SPREADS * spread, _LEAST_S):
                continue
            if rank not in found or excess_s > found[rank].own_s - found[rank].others_s:
                found[rank] = Lag(phase, own_s, others_s, step_s)
    return found


def medians_of_others(values: Sequence[float]) -> list[float]:
    """For each of at least two values the median of all the others."""
    order = sorted(range(len(values)), key=values.__getitem__)
    low, high = (len(values) - 2) // 2, (len(values) - 1) // 2
    medians = [0.0] * len(values)
    for place, index in enumerate(order):
        middle = (order[one + (one >= place)] for one in (low, high))
        medians[index] = sum(values[one] for one in middle) / 2
    return medians


@dataclass(slots=True)
class _Record:
    lag: Lag
    windows: int = 0  # since the first one in which the rank was slow
    slow: int = 0  # in a row
    good: int = 0
    named: bool = False


@dataclass(slots=True)
class StragglerFinder:
    """Folds the times of one step after another; the same result on every rank that gets the same times."""

    _window: list[Tensor] = field(default_factory=list, init=False)
    _records: dict[int, _Record] = field(default_factory=dict, init=False)

    @property
    def named(self) -> list[Straggler]:
        """Present stragglers, by rank."""
        return [_straggler(rank, one) for rank, one in sorted(self._records.items()) if one.named]

    def add(self, times: Tensor) -> list[Straggler]:
        """The times [ranks, FIGURES] of the next step. Returns who is newly named, or cleared."""
        self._window.append(times)
        if len(self._window) < WINDOW_STEPS:
            return []
        lags = find_lags(torch.stack(self._window))
        self._window.clear()
        for rank in lags.keys() - self._records.keys():
            self._records[rank] = _Record(lags[rank])
        changes = []
        for rank, record in sorted(self._records.items()):
            lag = lags.get(rank)
            record.lag = lag or record.lag
            record.windows += 1
            record.slow, record.good = (record.slow + 1, 0) if lag is not None else (0, record.good + 1)
            if not record.named and record.slow == IN_A_ROW:
                record.named = True
                changes.append(_straggler(rank, record))
            elif record.named and record.good == IN_A_ROW:
                changes.append(_straggler(rank, record, over=True))
            if not record.slow and (not record.named or record.good == IN_A_ROW):
                del self._records[rank]
        return changes


def _straggler(rank: int, record: _Record, *, over: bool = False) -> Straggler:
    return Straggler(rank, record.lag, record.windows * WINDOW_STEPS, over)
