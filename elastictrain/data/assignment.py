"""Which samples a rank reads at a step: a function of the step, the world size and the rank alone.

Step s (from 0) consumes positions [s * B, (s + 1) * B). They are cut into chunks of consecutive positions, and chunk c goes
to rank c % world size. Dealt in turn, rather than in one stretch per rank, chunks leave a rank idle in its last pass at most:
every rank has work of its own whenever there are as many chunks as ranks.

A seeded permutation per epoch maps positions to samples. It is pure integer arithmetic: the order is the same on every machine,
Python and library version, and any position can be computed alone.

Source of the construction: Black and Rogaway, "Ciphers with Arbitrary Finite Domains" (2002): a Feistel network over
[0, a) x [0, b) with a * b just above the number of samples, and cycle walking for the few values outside.
Source of the mixing function: Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators" (2014), SplitMix64.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from math import isqrt
from typing import Protocol

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_ROUNDS = 8


@dataclass(frozen=True, slots=True)
class Portion:
    """Positions [first, end) that one rank reads in one pass; its loss has weight zero unless it `counts`."""

    first: int
    end: int
    counts: bool


@dataclass(frozen=True, slots=True)
class Pass:
    """One forward pass of a rank: its step (from 0), its positions, and the samples at these positions."""

    step: int
    portion: Portion
    sample_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Share:
    global_batch: int
    micro_batch: int
    world_size: int
    rank: int

    @property
    def chunk_size(self) -> int:
        """Samples per chunk: `micro_batch`, or fewer if some ranks would otherwise be idle.

        With global_batch >= micro_batch * world_size the contents of micro-batches do not depend on the world size.
        """
        return min(self.micro_batch, -(-self.global_batch // self.world_size))

    @property
    def passes_per_step(self) -> int:
        """Forward passes of every rank per step; equal on all ranks, so that their collectives pair up."""
        return -(-self.global_batch // (self.chunk_size * self.world_size))

    def portions(self, step: int) -> tuple[Portion, ...]:
        """The rank's portions of `step` (from 0), in order.

        Over all ranks, the portions that count are disjoint and cover [step * global_batch, (step + 1) * global_batch). A rank
        with too few chunks repeats one of the same step, which does not count.
        """
        num_chunks = -(-self.global_batch // self.chunk_size)
        start = step * self.global_batch
        portions = []
        for number in range(self.rank, self.passes_per_step * self.world_size, self.world_size):
            counts = number < num_chunks
            first = (number if counts else self.rank % num_chunks) * self.chunk_size
            portions.append(Portion(start + first, start + min(first + self.chunk_size, self.global_batch), counts))
        return tuple(portions)


class MixedOrder(Protocol):
    """An order of the samples of several sources."""

    def sample_at(self, position: int, *, seed: int, shuffle: bool) -> int:
        """The sample at `position` of the run."""


def passes(
    first_step: int,
    *,
    last_step: int,
    share: Share,
    num_samples: int,
    seed: int,
    shuffle: bool,
    mixture: MixedOrder | None = None,
) -> Iterator[Pass]:
    """All passes of a rank in steps [first_step, last_step), in order."""
    at = partial(sample_at, num_samples=num_samples) if mixture is None else mixture.sample_at
    for step in range(first_step, last_step):
        for portion in share.portions(step):
            positions = range(portion.first, portion.end)
            yield Pass(step, portion, tuple(at(one, seed=seed, shuffle=shuffle) for one in positions))


def sample_at(position: int, *, num_samples: int, seed: int, shuffle: bool) -> int:
    """The sample at `position` of the run; each epoch of `num_samples` positions visits every sample once."""
    epoch, offset = divmod(position, num_samples)
    if not shuffle:
        return offset
    key = _mix((_mix((seed + _GOLDEN) & _MASK) + epoch * _GOLDEN) & _MASK)
    return _permute(offset, size=num_samples, key=key)


def _permute(value: int, *, size: int, key: int) -> int:
    """The image of `value` under the permutation of [0, size) of the 64-bit `key`."""
    width = isqrt(size - 1) + 1
    height = -(-size // width)
    while True:
        high, low = divmod(value, width)
        round_key = key
        for _ in range(_ROUNDS // 2):
            round_key = (round_key + _GOLDEN) & _MASK
            low = (low + _mix(high ^ round_key)) % width
            round_key = (round_key + _GOLDEN) & _MASK
            high = (high + _mix(low ^ round_key)) % height
        value = high * width + low
        # The network permutes [0, width * height); following a value until it is back below `size` permutes [0, size).
        if value < size:
            return value


def _mix(value: int) -> int:
    """A bijection of 64-bit integers in which every input bit affects every output bit."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
