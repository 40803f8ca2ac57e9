"""Compares the state of replicas, so that nothing is saved of a state that they do not share."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from elastictrain.distributed.wrapping import MeshShape
from elastictrain.errors import ReplicasDivergedError
from elastictrain.events import ReplicasDiverged
from elastictrain.train.context import TrainContext
from elastictrain.train.parameters import local
from elastictrain.train.state import TrainState


class HostCopy:
    """Begins to copy a small tensor; whoever needs it later waits for it, and for nothing that the device does after it."""

    def __init__(self, tensor: Tensor) -> None:
        self._arrived: torch.cuda.Event | None = None
        if tensor.is_cuda:
            self._content = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._content.copy_(tensor, non_blocking=True)
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record()
        else:
            self._content = tensor

    def wait(self) -> Tensor:
        """The tensor on the host."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._content


_WORD_BYTES = 8
_ROW_WORDS = 4096
_ROW_BYTES = _WORD_BYTES * _ROW_WORDS
# 2^64 divided by the golden ratio, as a signed number: neighbours get weights that have little in common.
_SPREAD = 0x9E3779B97F4A7C15 - (1 << 64)


@torch.no_grad()
def state_digest(tensors: Iterable[Tensor]) -> Tensor:
    """The digest [] int64 of this rank's part of `tensors`, on their device; nothing waits for it.

    It is deterministic, and different after the flip of any single bit: words of eight bytes are added up in rows, and the sums
    of rows are added up with odd weights, all modulo 2^64. A flipped bit changes its word by a power of two, and an odd weight
    takes no power of two to zero. Each byte is read once; the memory that this takes is a few thousandths of the tensors' own.
    """
    sums: list[Tensor] = []
    rests: list[Tensor] = []
    for tensor in tensors:
        flat = local(tensor).detach().contiguous().reshape(-1)
        if flat.storage_offset() * flat.element_size() % _WORD_BYTES:
            # Words can be read at multiples of their size only.
            flat = flat.clone()
        content = flat.view(torch.uint8)
        in_rows = content.numel() - content.numel() % _ROW_BYTES
        if in_rows:
            sums.append(_row_sums(content[:in_rows]))
        if in_rows < content.numel():
            rests.append(content[in_rows:])
    if rests:
        # Small tensors are many: one concatenation, instead of a kernel for each.
        filled = sum(rest.numel() for rest in rests)
        rests.append(torch.zeros(-filled % _ROW_BYTES, dtype=torch.uint8, device=rests[0].device))
        sums.append(_row_sums(torch.cat(rests)))
    if not sums:
        return torch.zeros((), dtype=torch.int64)
    rows = torch.cat(sums)
    weights = (torch.arange(1, 1 + rows.numel(), device=rows.device) * _SPREAD) | 1
    return (rows * weights).sum()


def _row_sums(content: Tensor) -> Tensor:
    return content.view(torch.int64).view(-1, _ROW_WORDS).sum(dim=1)


@dataclass(frozen=True, slots=True)
class Divergence:
    """Replicas do not hold the same state."""

    wrong: tuple[int, ...] = ()  # ranks that differ from the majority of their replicas
    disputed: tuple[int, ...] = ()  # ranks whose replicas have no majority, so that any of them may be the wrong one

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks under suspicion."""
        return tuple(sorted((*self.wrong, *self.disputed)))


def find_divergence(digests: Sequence[int], *, shards: int) -> Divergence | None:
    """Compare the digests of all ranks in order, of which every `shards`-th holds the same part; None: all are alike."""
    wrong: list[int] = []
    disputed: list[int] = []
    for first in range(shards):
        ranks = range(first, len(digests), shards)
        (digest, count), *others = Counter(digests[rank] for rank in ranks).most_common()
        if not others:
            continue
        if 2 * count > len(ranks):
            wrong += [rank for rank in ranks if digests[rank] != digest]
        else:
            disputed += ranks
    return Divergence(tuple(sorted(wrong)), tuple(sorted(disputed))) if wrong or disputed else None


def describe_divergence(divergence: Divergence, *, step: int, hosts: Sequence[str]) -> str:
    """The sentence for a person; `hosts` names the host of each rank."""
    causes = []
    for ranks in filter(None, (divergence.wrong, divergence.disputed)):
        named = ", ".join(f"rank {rank} on {hosts[rank]}" for rank in ranks)
        places = " and ".join(dict.fromkeys(hosts[rank] for rank in ranks))
        if ranks is divergence.wrong:
            verb = "differs" if len(ranks) == 1 else "differ"
            causes.append(f"{named} {verb} from the majority of the replicas: replace {places}")
        else:
            causes.append(
                f"{named} differ from each other, and no majority tells which one is wrong: test the memory and devices of "
                f"{places}, and replace the host that fails"
            )
    return (
        f"after step {step} replicas hold different parameters or optimizer state. {'; '.join(causes)}. "
        "Nothing was saved of this step: the next start resumes from the checkpoint before it"
    )


@dataclass(frozen=True, slots=True)
class ReplicaComparison:
    """Digests of this rank's parameters and optimizer state, gathered from all ranks; without replicas it does nothing.

    Buffers are left out: a forward pass changes them on each rank by itself, and DDP replaces them by those of rank 0.
    """

    context: TrainContext
    state: TrainState
    shape: MeshShape
    _pending: dict[int, HostCopy] = field(default_factory=dict, init=False)
    """The digests of all ranks, by step: the next step is launched before those of one are looked at."""

    def step_launched(self, step: int) -> None:
        """The update of a step is launched. Collective: yes, at every `every_steps`."""
        every_steps = self.context.config.fault.compare_every_steps
        if every_steps and step % every_steps == 0:
            self.begin(step)

    def begin(self, step: int) -> None:
        """Begin to compare the state as it is now, after `step`; more than once has no effect. Collective: yes."""
        if self.shape.replicas == 1 or step in self._pending:
            return
        left_out = self.state.changed_by_forward()
        digest = state_digest(tensor for name, tensor in self.state.tensors().items() if name not in left_out)
        # Ranks add their own to zeros: every backend can do that, and all ranks learn which one differs.
        digests = torch.zeros(self.shape.replicas * self.shape.shards, dtype=torch.int64, device=digest.device)
        digests[self.context.identity.rank] = digest
        dist.all_reduce(digests)
        self._pending[step] = HostCopy(digests)

    def check(self, step: int) -> None:
        """Wait for what was begun after `step`, if anything was. Raises: ReplicasDivergedError, the same on all ranks."""
        pending = self._pending.pop(step, None)
        if pending is None:
            return
        divergence = find_divergence(pending.wait().tolist(), shards=self.shape.shards)
        if divergence is None:
            return
        hosts = self.context.generation.hosts
        if self.context.identity.is_log_rank:
            self.context.journal.record(
                ReplicasDiverged(
                    step=step,
                    ranks=divergence.ranks,
                    hosts=tuple(dict.fromkeys(hosts[rank] for rank in divergence.ranks)),
                    majority=not divergence.disputed,
                )
            )
        raise ReplicasDivergedError(describe_divergence(divergence, step=step, hosts=hosts))
