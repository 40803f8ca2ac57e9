"""Several sources in one order of samples: a function of the position alone, like the order of one source.

Position p maps to a source, and to the number n of positions before it that map to the same one. Draw n of a source is the
sample at position n of that source's own order, so each source is visited once per epoch of its own. While weights stay the
same, sources follow a pattern that repeats: at any point of it each source has had its share to within one sample.

Source of the pattern: Baruah, Cohen, Plaxton and Varvel, "Proportionate Progress" (1996): draw i of a source with share w falls
between floor(i / w) and ceil((i + 1) / w), and the earliest deadline first keeps all of them on one processor.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from heapq import heappop, heappush
from itertools import accumulate

from elastictrain.config.composed import SourceGroup
from elastictrain.data.assignment import sample_at
from elastictrain.data.dataset import Batch, Dataset
from elastictrain.errors import ConfigError, Problem

_LONGEST_PATTERN = 2**16
_MASK = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Stage:
    """Positions from `first` on, in which the weights stay the same."""

    first: int
    drawn: tuple[int, ...]  # draws of each source before `first`
    per_period: tuple[int, ...]  # draws of each source in one period
    pattern: tuple[tuple[int, int], ...]  # the source at each position of a period, and its draws in the period before it

    def locate(self, position: int) -> tuple[int, int]:
        period, offset = divmod(position - self.first, len(self.pattern))
        source, before = self.pattern[offset]
        return source, self.drawn[source] + period * self.per_period[source] + before

    def draws_until(self, position: int) -> tuple[int, ...]:
        """Draws of each source before `position`."""
        period, offset = divmod(position - self.first, len(self.pattern))
        before = [0] * len(self.drawn)
        for source, _ in self.pattern[:offset]:
            before[source] += 1
        return tuple(map(sum, zip(self.drawn, (period * one for one in self.per_period), before, strict=True)))


@dataclass(frozen=True, slots=True)
class Mixture:
    sizes: tuple[int, ...]  # samples of each source
    stages: tuple[Stage, ...]  # by their first position; the first one begins at 0

    def locate(self, position: int) -> tuple[int, int]:
        """The source at `position`, and how often it was drawn before."""
        return self.stages[bisect_right(self.stages, position, key=lambda stage: stage.first) - 1].locate(position)

    def sample_at(self, position: int, *, seed: int, shuffle: bool) -> int:
        """The sample at `position`, counted through all sources in a row."""
        source, draw = self.locate(position)
        # Sources of one size must not have one order.
        own_seed = (seed + source * 0xD1B54A32D192ED03) & _MASK
        return sum(self.sizes[:source]) + sample_at(draw, num_samples=self.sizes[source], seed=own_seed, shuffle=shuffle)


def make_mixture(sources: Sequence[SourceGroup], *, sizes: Sequence[int], global_batch: int) -> Mixture:
    """The mixture of sources with `sizes` samples. Raises: ConfigError that names the weight."""
    weights = [((0, one.weight),) if isinstance(one.weight, float) else one.weight for one in sources]
    problems = []
    for number, pairs in enumerate(weights):
        steps = [step for step, _ in pairs]
        if not steps or steps[0] != 0 or steps != sorted(set(steps)):
            message = f"must begin with step 0 and go on with later and later steps, but has the steps {steps}"
            problems.append(Problem(f"data.sources[{number}].weight", message))
    if problems:
        raise ConfigError(problems)
    stages: list[Stage] = []
    for step in sorted({step for pairs in weights for step, _ in pairs}):
        first = step * global_batch
        drawn = stages[-1].draws_until(first) if stages else (0,) * len(weights)
        # The last pair that has begun counts.
        now = [[weight for begin, weight in pairs if begin <= step][-1] for pairs in weights]
        counts = proportions(now, step=step)
        stages.append(Stage(first, drawn, counts, pattern_of(counts)))
    return Mixture(tuple(sizes), tuple(stages))


def proportions(weights: Sequence[float], *, step: int) -> tuple[int, ...]:
    """Draws of each source in a period: exact, where the period is not too long. Raises: ConfigError."""
    # As the number is written: 0.1 is a tenth.
    parts = [Fraction(str(weight)) for weight in weights]
    total = sum(parts)
    if not total:
        raise ConfigError([Problem("data.sources", f"must have a weight above 0 from step {step} on, but all weights are 0")])
    shares = [part / total for part in parts]
    period = math.lcm(*(share.denominator for share in shares))
    if period <= _LONGEST_PATTERN:
        return tuple(int(share * period) for share in shares)
    counts = [math.floor(share * _LONGEST_PATTERN) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda one: counts[one] - shares[one] * _LONGEST_PATTERN)
    for number in by_remainder[: _LONGEST_PATTERN - sum(counts)]:
        counts[number] += 1
    for number, (count, share) in enumerate(zip(counts, shares, strict=True)):
        if share and not count:
            message = f"must be 0, or at least 1/{_LONGEST_PATTERN} of all weights together, but is {weights[number]:g}"
            raise ConfigError([Problem(f"data.sources[{number}].weight", message)])
    return tuple(counts)


def pattern_of(counts: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """The source at each of sum(counts) positions, and its draws before. Source `k` gets counts[k] of them, evenly."""
    period = sum(counts)
    waiting, ready = [(0, source, 0) for source, count in enumerate(counts) if count], list[tuple[int, int, int]]()
    pattern = []
    for position in range(period):
        while waiting and waiting[0][0] <= position:
            _, source, draw = heappop(waiting)
            heappush(ready, (-(-(draw + 1) * period // counts[source]), source, draw))
        _, source, draw = heappop(ready)
        pattern.append((source, draw))
        heappush(waiting, ((draw + 1) * period // counts[source], source, draw + 1))
    return tuple(pattern)


@dataclass(frozen=True, slots=True, eq=False)
class MixedDataset:
    """The samples of all sources: in a row, or in turn if each has as many."""

    sources: Sequence[Dataset]
    in_turn: bool = False

    def __len__(self) -> int:
        return sum(map(len, self.sources))

    def __getitem__(self, index: int, /) -> Batch:
        if self.in_turn:
            index, number = divmod(index, len(self.sources))
        else:
            ends = list(accumulate(map(len, self.sources)))
            number = bisect_right(ends, index)
            index -= ends[number - 1] if number else 0
        sample: Batch = self.sources[number][index]
        return sample
