"""Compares the state of replicas, so that nothing is saved of a state that they do not share."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from elastictrain.distributed.mesh import MeshShape
from elastictrain.errors import ReplicasDivergedError
from elastictrain.events import Event, ReplicasDiverged
from elastictrain.train.divergence import describe_divergence, find_divergence
from elastictrain.train.host_copy import HostCopy
from elastictrain.train.state import TrainState
from elastictrain.train.state_digest import StateDigest


class ReplicaComparison:
    """Digests of this rank's parameters and optimizer state, gathered from all ranks; without replicas it does nothing.

    Buffers are left out: a forward pass changes them on each rank by itself, and DDP replaces them by those of rank 0.
    """

    def __init__(
        self,
        state: TrainState,
        *,
        shape: MeshShape,
        rank: int,
        hosts: Sequence[str],
        every_steps: int,
        record: Callable[[Event], None] | None,
    ) -> None:
        """`hosts`: of each rank. `every_steps`: compared also when nothing is saved; 0: never. `record`: on one rank only."""
        self._state = state
        self._shape = shape
        self._rank = rank
        self._hosts = hosts
        self._every_steps = every_steps
        self._record = record
        self._digest = StateDigest()
        self._pending: dict[int, HostCopy] = {}
        """The digests of all ranks, by step: the next step is launched before those of one are looked at."""

    def step_launched(self, step: int) -> None:
        """The update of a step is launched. Collective: yes, at every `every_steps`."""
        if self._every_steps and step % self._every_steps == 0:
            self.begin(step)

    def begin(self, step: int) -> None:
        """Begin to compare the state as it is now, after `step`; more than once has no effect. Collective: yes."""
        if self._shape.replicas == 1 or step in self._pending:
            return
        left_out = self._state.changed_by_forward()
        digest = self._digest(tensor for name, tensor in self._state.tensors().items() if name not in left_out)
        # Ranks add their own to zeros: every backend can do that, and all ranks learn which one differs.
        digests = torch.zeros(self._shape.replicas * self._shape.shards, dtype=torch.int64, device=digest.device)
        digests[self._rank] = digest
        dist.all_reduce(digests)
        self._pending[step] = HostCopy(digests)

    def check(self, step: int) -> None:
        """Wait for what was begun after `step`, if anything was. Raises: ReplicasDivergedError, the same on all ranks."""
        pending = self._pending.pop(step, None)
        if pending is None:
            return
        divergence = find_divergence(pending.wait().tolist(), shards=self._shape.shards)
        if divergence is None:
            return
        if self._record is not None:
            self._record(
                ReplicasDiverged(
                    step=step,
                    ranks=divergence.ranks,
                    hosts=tuple(dict.fromkeys(self._hosts[rank] for rank in divergence.ranks)),
                    majority=not divergence.disputed,
                )
            )
        raise ReplicasDivergedError(describe_divergence(divergence, step=step, hosts=self._hosts))
