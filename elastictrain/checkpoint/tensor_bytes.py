"""Tensors as boxes of bytes. Their sharding alone decides which boxes a rank writes; ranks do not ask each other."""

import heapq
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial

from elastictrain.checkpoint.layout import Item
from elastictrain.checkpoint.manifest import ChunkRecord, PartBox, TensorRecord
from elastictrain.checkpoint.verified_read import READ_THREADS, CheckpointFolder, read_chunks
from elastictrain.checkpoint.writer import ByteReader
from elastictrain.errors import CheckpointError
from elastictrain.torch_private import local_box

COUNTER_BYTES = 64  # of a counter or flag, as optimizers have one for each parameter
SEGMENT_BYTES = 32 << 20  # host memory that is page-locked at a time: the driver serves no other call meanwhile, about 10 ms


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def reader_of(tensor: Tensor, item: Item) -> ByteReader:
    """Reader of a local tensor's bytes in row-major order; it copies a device tensor to the host range by range."""
    if tuple(tensor.shape) != item.sizes:
        raise CheckpointError(
            f"tensor {item.name!r} has shape {list(tensor.shape)} here, but was planned as {list(item.sizes)}"
        )
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)

    def read(begin: int, end: int) -> memoryview:
        return flat[begin:end].cpu().numpy().data

    return read


@dataclass(frozen=True, slots=True)
class Box:
    """A box that `replicas` ranks hold alike; this rank has copy number `replica`."""

    item: Item
    replicas: int
    replica: int


def own_items(
    tensors: Mapping[str, object], *, rank: int, world_size: int, of_first: frozenset[str] = frozenset()
) -> tuple[Item, ...]:
    """The boxes that this rank writes. Plain tensors must be the same on all ranks, but for those `of_first`: there the first
    rank's count. Collective: no. Raises: CheckpointError."""
    boxes = [box_of(name, tensor, rank=rank, world_size=world_size) for name, tensor in tensors.items()]
    # An empty tensor belongs to the checkpoint, too: one of its boxes represents it.
    return choose_own(
        [box for box in boxes if math.prod(box.item.sizes) or not (math.prod(box.item.shape) or any(box.item.offsets))],
        of_first=of_first,
    )


def choose_own(boxes: Sequence[Box], *, of_first: frozenset[str] = frozenset()) -> tuple[Item, ...]:
    """The boxes that this rank writes: exactly one rank writes each, the first those of tensors `of_first` and the smallest,
    and the loads of the others are even. Pure.

    Ranks that share boxes must list the same ones: then they agree without messages, at any world size.
    """
    groups: dict[tuple[int, int], list[Item]] = defaultdict(list)
    for box in boxes:
        groups[(box.replicas, box.replica)].append(box.item)
    own: set[Item] = set()
    for (replicas, replica), items in groups.items():
        # Ranks that need a box read its file and a part of the manifest: step counters spread over all hosts would cost each
        # rank hundreds of requests.
        firsts = {item for item in items if item.name in of_first or item.size_bytes <= COUNTER_BYTES}
        own |= firsts if replica == 0 else set()
        loads = sorted([(sum(item.size_bytes for item in firsts), 0), *((0, number) for number in range(1, replicas))])
        dealt = (item for item in items if item not in firsts)
        for item in sorted(dealt, key=lambda item: (-item.size_bytes, item.key)):
            load, number = heapq.heappop(loads)
            if number == replica:
                own.add(item)
            # An empty box counts as one byte; otherwise all of them would go to one rank.
            heapq.heappush(loads, (load + max(1, item.size_bytes), number))
    return tuple(box.item for box in boxes if box.item in own)


def box_of(name: str, tensor: object, *, rank: int, world_size: int) -> Box:
    """Where this rank's part lies in the whole tensor. Raises: CheckpointError."""
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
    part = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return part.detach()


def cut(start: int, size_bytes: int, *, segment_bytes: int) -> list[tuple[int, int]]:
    """Pieces (start, end) that cross no multiple of `segment_bytes`."""
    end = start + size_bytes
    borders = range((start // segment_bytes + 1) * segment_bytes, end, segment_bytes)
    return list(pairwise([start, *borders, end]))


def copy_bytes(target: Tensor, source: Tensor, *, non_blocking: bool = False) -> None:
    """Copy between a device and host memory that may be page-locked: such segments end at addresses that are multiples of
    `SEGMENT_BYTES`, and the driver refuses a copy that spans two of them. Both are uint8, contiguous, of one dimension."""
    first = (source if target.is_cuda else target).data_ptr()
    for begin, end in cut(first, source.numel(), segment_bytes=SEGMENT_BYTES):
        target[begin - first : end - first].copy_(source[begin - first : end - first], non_blocking=non_blocking)


def tensor_over(data: memoryview, *, dtype: str, sizes: tuple[int, ...]) -> Tensor:
    """A tensor over the memory of `data`, which must be writable and hold exactly its bytes."""
    if not data.nbytes:
        return torch.empty(sizes, dtype=dtype_named(dtype))
    return torch.frombuffer(data, dtype=torch.uint8).view(dtype_named(dtype)).reshape(sizes)


Bounds = tuple[int, ...]


def read_tensor(folder: CheckpointFolder, record: TensorRecord) -> Tensor:
    """The whole tensor, on the CPU. Raises: DamagedFileError, StorageError."""
    return read_box(folder, record, offsets=(0,) * len(record.shape), sizes=record.shape, threads=READ_THREADS)


def read_box(folder: CheckpointFolder, record: TensorRecord, *, offsets: Bounds, sizes: Bounds, threads: int) -> Tensor:
    """The part of a tensor that begins at `offsets`; every byte is verified. Raises: DamagedFileError, StorageError."""
    target = torch.empty(sizes, dtype=dtype_named(record.dtype))
    wanted = [chunk for chunk in record.chunks if chunk.size_bytes and overlap(chunk, offsets=offsets, sizes=sizes) is not None]

    def take(chunk: ChunkRecord, data: memoryview) -> None:
        common = overlap(chunk, offsets=offsets, sizes=sizes)
        if common is not None:
            source = tensor_over(data, dtype=record.dtype, sizes=chunk.sizes)
            target[_within(common, offsets)] = source[_within(common, chunk.offsets)]

    read_chunks(folder, wanted, take=take, threads=threads)
    return target


def overlap(chunk: ChunkRecord | PartBox, *, offsets: Bounds, sizes: Bounds) -> tuple[tuple[int, int], ...] | None:
    """The intersection of a chunk and a box, [begin, end) by dimension; None if empty. Pure."""
    common = tuple(
        (max(first, other), min(first + size, other + extent))
        for first, size, other, extent in zip(chunk.offsets, chunk.sizes, offsets, sizes, strict=True)
    )
    return common if all(begin < end for begin, end in common) else None


def _within(common: tuple[tuple[int, int], ...], offsets: Bounds) -> tuple[slice, ...]:
    return tuple(slice(begin - first, end - first) for (begin, end), first in zip(common, offsets, strict=True))
