"""What this rank writes of the state: boxes of tensors, found from their sharding alone, without asking other ranks."""

import heapq
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.distributed.tensor import DTensor, Partial

from elastictrain.checkpoint.layout import Item
from elastictrain.checkpoint.tensor_bytes import dtype_name
from elastictrain.errors import CheckpointError
from elastictrain.torch_private import local_box


@dataclass(frozen=True, slots=True)
class Copy:
    """A piece of state that `replicas` ranks hold alike, of which this rank is number `replica`."""

    name: str
    size_bytes: int
    replicas: int
    replica: int


def choose_own(copies: Sequence[Copy]) -> list[bool]:
    """For each copy whether this rank writes it: exactly one of its replicas does, and their loads are even.

    Ranks that share copies must list the same ones: then no word between them is needed, at any world size.
    """
    groups: dict[tuple[int, int], list[int]] = defaultdict(list)
    for index, copy in enumerate(copies):
        groups[(copy.replicas, copy.replica)].append(index)
    own = [False] * len(copies)
    for (replicas, replica), indices in groups.items():
        loads = [(0, number) for number in range(replicas)]
        for index in sorted(indices, key=lambda i: (-copies[i].size_bytes, copies[i].name)):
            load, number = heapq.heappop(loads)
            own[index] = number == replica
            # A piece without bytes counts, too, or all such pieces would go to one rank.
            heapq.heappush(loads, (load + max(1, copies[index].size_bytes), number))
    return own


@dataclass(frozen=True, slots=True)
class Box:
    """A box that this rank holds, and how many hold it."""

    item: Item
    replicas: int
    replica: int


def own_items(tensors: Mapping[str, object], *, rank: int, world_size: int) -> tuple[Item, ...]:
    """The boxes that this rank writes. Plain tensors must be the same on all ranks. Collective: no.

    Raises: CheckpointError for what is not a tensor, and for a tensor whose value is spread as partial sums.
    """
    boxes = [box_of(name, tensor, rank=rank, world_size=world_size) for name, tensor in tensors.items()]
    held = [box for box in boxes if math.prod(box.item.sizes) or _is_first_of_empty(box)]
    copies = [Copy(box.item.key, box.item.size_bytes, box.replicas, box.replica) for box in held]
    return tuple(box.item for box, own in zip(held, choose_own(copies), strict=True) if own)


def box_of(name: str, tensor: object, *, rank: int, world_size: int) -> Box:
    """Where this rank's part of a tensor lies in the whole."""
    if not isinstance(tensor, Tensor):
        raise CheckpointError(f"{name!r} is not a tensor; only tensors are written, other state goes to the manifest")
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return Box(Item(name, dtype_name(tensor.dtype), shape, (0,) * len(shape), shape), world_size, rank)
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None or any(isinstance(placement, Partial) for placement in tensor.placements):
        raise CheckpointError(f"{name!r} is spread over the ranks in a way that cannot be saved: {tensor.placements}")
    sizes, offsets = local_box(tensor)
    replicas, replica = 1, 0
    for dim, placement in enumerate(tensor.placements):
        if placement.is_replicate():
            replica = replica * mesh.size(dim) + coordinate[dim]
            replicas *= mesh.size(dim)
    return Box(Item(name, dtype_name(tensor.dtype), shape, offsets, sizes), replicas, replica)


def local_part(tensor: Tensor) -> Tensor:
    """The memory of this rank's part."""
    part = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return part.detach()


def _is_first_of_empty(box: Box) -> bool:
    """A tensor without elements is still a tensor of the checkpoint; one of its boxes stands for it."""
    return not math.prod(box.item.shape) and not any(box.item.offsets)
