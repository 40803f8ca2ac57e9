"""What all ranks agree on in each step: one small all-reduce, begun at the end of the step before; nothing waits for it."""

from dataclasses import dataclass
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor

from elastictrain.train.step import StepFlags


@dataclass(frozen=True, slots=True)
class StepAgreement:
    """The flags of one step of all ranks, on their way."""

    sums: Tensor
    work: dist.Work

    @classmethod
    def ask(cls, flags: StepFlags, *, group: dist.ProcessGroup) -> Self:
        """Begin to sum the `flags` of all ranks. Collective: yes."""
        sums = torch.tensor(flags.encode(), dtype=torch.float64)
        work = dist.all_reduce(sums, group=group, async_op=True)
        assert work is not None  # noqa: S101
        return cls(sums, work)

    def flags(self) -> StepFlags:
        self.work.wait()
        return StepFlags.decode(self.sums.tolist())
