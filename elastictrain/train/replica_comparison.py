"""Compares the state of replicas, so that a state on which they differ is never saved."""

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
from elastictrain.train.state import SavedState


class HostCopy:
    """Copies a small tensor to the host; `wait` waits for the copy alone, not for later work of the device."""

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
    """The digest [] int64 of this rank's part of `tensors`, on their device, without synchronization.

    It is deterministic, and the flip of any single bit changes it: words of eight bytes are added up in rows, and the sums of
    rows are added up with odd weights, all modulo 2^64. A flipped bit changes its word by a power of two, and an odd weight
    takes no power of two to zero. Each byte is read once; the extra memory is a few thousandths of the tensors' own.
    """
    sums: list[Tensor] = []
    rests: list[Tensor] = []
    for tensor in tensors:
        flat = local(tensor).detach().contiguous().reshape(-1)
        if flat.storage_offset() * flat.element_size() % _WORD_BYTES:
            # A view as words must begin at a multiple of their size.
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


def find_divergence(digests: Sequence[int], *, shards: int) -> tuple[list[int], list[int]]:
    """Compare the digests of all ranks in order; every `shards`-th rank holds the same part. Returns the wrong ranks, which
    differ from the majority of their replicas, and the disputed ones, whose replicas have no majority; each of those may be
    wrong."""
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
    return sorted(wrong), sorted(disputed)


def describe_divergence(wrong: Sequence[int], disputed: Sequence[int], *, step: int, hosts: Sequence[str]) -> str:
    """The message for the user; `hosts` names the host of each rank."""
    causes = []
    for ranks in filter(None, (wrong, disputed)):
        named = ", ".join(f"rank {rank} on {hosts[rank]}" for rank in ranks)
        places = " and ".join(dict.fromkeys(hosts[rank] for rank in ranks))
        if ranks is wrong:
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
    """Compares digests of parameters and optimizer state between replicas; without replicas it does nothing. Buffers are left
    out: a forward pass changes them on each rank by itself, and DDP replaces them by those of rank 0."""

    context: TrainContext
    state: SavedState
    shape: MeshShape
    _pending: dict[int, HostCopy] = field(default_factory=dict, init=False)  # by step; read after the next launch

    def step_launched(self, step: int) -> None:
        """Called when the update of a step is launched. Collective: yes, at every `every_steps`."""
        every_steps = self.context.config.fault.compare_every_steps
        if every_steps and step % every_steps == 0:
            self.begin(step)

    def begin(self, step: int) -> None:
        """Begin to compare the state after `step`; a second call has no effect. Collective: yes."""
        if self.shape.replicas == 1 or step in self._pending:
            return
        left_out = self.state.changed_by_forward()
        digest = state_digest(tensor for name, tensor in self.state.tensors().items() if name not in left_out)
        # Each rank adds its digest to zeros: every backend can sum, and all ranks learn which one differs.
        digests = torch.zeros(self.shape.replicas * self.shape.shards, dtype=torch.int64, device=digest.device)
        digests[self.context.identity.rank] = digest
        dist.all_reduce(digests)
        self._pending[step] = HostCopy(digests)

    def check(self, step: int) -> None:
        """Wait for the comparison that `begin` started. Raises: ReplicasDivergedError, the same on all ranks."""
        pending = self._pending.pop(step, None)
        if pending is None:
            return
        digests = pending.wait().tolist()
        # Aborting a group ends its collectives without a result.
        self.context.check_attached()
        wrong, disputed = find_divergence(digests, shards=self.shape.shards)
        if not wrong and not disputed:
            return
        ranks, hosts = tuple(sorted(wrong + disputed)), self.context.generation.hosts
        if self.context.identity.is_log_rank:
            self.context.journal.record(
                ReplicasDiverged(
                    step=step,
                    ranks=ranks,
                    hosts=tuple(dict.fromkeys(hosts[rank] for rank in ranks)),
                    majority=not disputed,
                )
            )
        raise ReplicasDivergedError(describe_divergence(wrong, disputed, step=step, hosts=hosts))
