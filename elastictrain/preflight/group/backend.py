"""The collectives of the backend that will train, with as little around them as possible."""

from typing import Protocol

import torch.distributed as dist
from torch import Tensor

# torch 2.13 gave two of them new names, and warns of the old ones.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Collectives(Protocol):
    """What ranks do together, on flat tensors of the group's device. Collective: yes, all of them."""

    def all_reduce(self, buffer: Tensor) -> None:
        """The sum over all ranks, in place."""

    def all_gather(self, output: Tensor, own: Tensor) -> None:
        """`output`: what all ranks have, by rank."""

    def reduce_scatter(self, output: Tensor, buffer: Tensor) -> None:
        """`output`: this rank's part of the sum."""

    def broadcast(self, buffer: Tensor, *, root: int) -> None:
        """In place."""

    def all_to_all(self, output: Tensor, buffer: Tensor) -> None:
        """`buffer`: a part for each rank; `output`: a part from each."""

    def send_recv(self, output: Tensor | None, buffer: Tensor | None, *, source: int, target: int) -> None:
        """At once, where both are given."""


class BackendCollectives:
    """Those of the default group."""

    def all_reduce(self, buffer: Tensor) -> None:
        dist.all_reduce(buffer)

    def all_gather(self, output: Tensor, own: Tensor) -> None:
        _gather(output, own)

    def reduce_scatter(self, output: Tensor, buffer: Tensor) -> None:
        _scatter(output, buffer)

    def broadcast(self, buffer: Tensor, *, root: int) -> None:
        dist.broadcast(buffer, root)

    def all_to_all(self, output: Tensor, buffer: Tensor) -> None:
        dist.all_to_all_single(output, buffer)

    def send_recv(self, output: Tensor | None, buffer: Tensor | None, *, source: int, target: int) -> None:
        # Batched: NCCL would make a communicator of its own for each pair otherwise, and two ranks that both send first hang.
        wanted = [] if buffer is None else [dist.P2POp(dist.isend, buffer, target)]
        wanted += [] if output is None else [dist.P2POp(dist.irecv, output, source)]
        for work in dist.batch_isend_irecv(wanted) if wanted else ():
            work.wait()
