"""Keeps the running statistics of batch norm the same on all ranks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

_AVERAGED = ("running_mean", "running_var")
_COUNTED = "num_batches_tracked"  # equal on all ranks anyway


@dataclass(frozen=True, slots=True)
class RunningStatistics:
    """Running means and variances of a model. Each rank updates them from its own micro-batches; after a step all take the mean
    of the updates.

    What a layer normalises with in training are the statistics of one micro-batch, as without a group: those of all ranks
    (`nn.SyncBatchNorm`) would make the loss depend on the number of ranks.
    """

    tensors: tuple[Tensor, ...] = ()
    names: frozenset[str] = frozenset()  # of these buffers, and of those that count their updates

    @classmethod
    def of(cls, model: nn.Module) -> Self:
        buffers = {name: (name.rpartition(".")[2], one) for name, one in model.named_buffers()}
        tensors = tuple(one for kind, one in buffers.values() if kind in _AVERAGED)
        return cls(tensors, frozenset(name for name, (kind, _) in buffers.items() if kind in (*_AVERAGED, _COUNTED)))

    def copy(self) -> list[Tensor]:
        """What `average` needs of the time before a step; empty in a world of one."""
        return [one.clone() for one in self.tensors] if dist.get_world_size() > 1 else []

    @torch.no_grad()
    def average(self, before: Sequence[Tensor]) -> None:
        """Add the mean of the ranks' changes to the values `before` the step. Collective: yes, if there are any."""
        if not before:
            return
        # Of the changes, not of the values: what no rank has changed stays the same to the last bit.
        changes = torch.cat([(now - then).flatten() for now, then in zip(self.tensors, before, strict=True)])
        dist.all_reduce(changes)
        parts = torch.split_with_sizes(changes / dist.get_world_size(), [one.numel() for one in before])
        for now, then, change in zip(self.tensors, before, parts, strict=True):
            now.copy_(then + change.view_as(then))
