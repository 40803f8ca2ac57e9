"""What the workers of a simulated generation train.

A state is one number that each step's samples change, so that each loss depends on all samples before it. Tensors are made of
it; a mix of two steps is seen.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import islice
from math import nan

import torch
from torch import Tensor

from elastictrain.checkpoint.tensor_bytes import COUNTER_BYTES
from elastictrain.data import assignment
from elastictrain.data.ledger import Row

GLOBAL_BATCH, MICRO_BATCH, SAMPLES = 6, 2, 50
_TENSORS, _ELEMENTS = 8, COUNTER_BYTES // 8 + 1  # of 8 bytes; the first rank alone writes tensors that are smaller
_MASK, _FACTOR = 2**63 - 1, 6364136223846793005


def incarnation_of(generation: int) -> str:
    return f"{generation:06d}-simulated"


def machine_of(host: str) -> int:
    """Hosts are named `h00001.2`: the second launcher on machine 1."""
    return int(host[1:6])


def tensors_of(value: int) -> dict[str, Tensor]:
    return {
        f"model.{name}": torch.tensor([(value ^ (name * _FACTOR + place)) & _MASK for place in range(_ELEMENTS)])
        for name in range(_TENSORS)
    }


def set_tensors(tensors: Mapping[str, Tensor], value: int) -> None:
    for name, right in tensors_of(value).items():
        tensors[name].copy_(right)


def value_of(tensors: Mapping[str, Tensor]) -> int | None:
    """None if the tensors are of several states."""
    value = int(tensors["model.0"][0])
    right = tensors_of(value)
    return value if all(torch.equal(tensors[name], right[name]) for name in right) else None


def trained(value: int, samples: Sequence[int]) -> int:
    """The state after a step; the order of samples within it does not matter."""
    return (value * _FACTOR + sum((sample + 1) * (sample + 7) * _FACTOR & _MASK for sample in samples) + 1) & _MASK


class TrainedGroup:
    """What the workers of one generation do: each rank reads its samples, and all have the same state."""

    def __init__(self, generation: int, *, world_size: int, first_step: int, value: int, seed: int) -> None:
        self.incarnation, self.world_size = incarnation_of(generation), world_size
        self.first_step = self.step = first_step
        self.values = {first_step: value}  # state by step
        shares = [assignment.Share(GLOBAL_BATCH, MICRO_BATCH, world_size, rank) for rank in range(world_size)]
        read = partial(assignment.passes, first_step, last_step=1 << 40, num_samples=SAMPLES, seed=seed, shuffle=True)
        self._passes = [read(share=share) for share in shares]
        self._per_step = shares[0].passes_per_step

    def train_to(self, step: int, *, losses: dict[int, float], ledger: list[Row]) -> None:
        """Adds the steps up to `step` to `ledger`, and to `losses`: NaN for one that another group trained to another loss."""
        while self.step < step:
            samples: list[int] = []
            for rank, passes in enumerate(self._passes):
                counting = [one for one in islice(passes, self._per_step) if one.portion.counts]
                positions = tuple((one.portion.first, one.portion.end) for one in counting)
                ids = tuple(sample for one in counting for sample in one.sample_ids)
                samples += ids
                ledger.append(Row(self.incarnation, rank, self.step + 1, positions, ids))
            value = trained(self.values[self.step], samples)
            self.step += 1
            self.values[self.step] = value
            loss = value / _MASK
            if losses.setdefault(self.step, loss) != loss:
                # Whichever is right, both trained.
                losses[self.step] = nan
