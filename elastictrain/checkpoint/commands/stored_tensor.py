"""Reads a tensor of a checkpoint, or a box of it, whatever it was sharded over."""

import torch
from torch import Tensor

from elastictrain.checkpoint.manifest import ChunkRecord, TensorRecord
from elastictrain.checkpoint.tensor_bytes import dtype_named, tensor_over
from elastictrain.checkpoint.verified_read import READ_THREADS, Folder, read_chunks

Bounds = tuple[int, ...]


def read_tensor(folder: Folder, record: TensorRecord) -> Tensor:
    """The whole tensor, on the CPU. Raises: DamagedFileError, StorageError."""
    return read_box(folder, record, offsets=(0,) * len(record.shape), sizes=record.shape, threads=READ_THREADS)


def read_box(folder: Folder, record: TensorRecord, *, offsets: Bounds, sizes: Bounds, threads: int) -> Tensor:
    """The part of a tensor that begins at `offsets`; every byte is verified.

    Raises: DamagedFileError, StorageError.
    """
    target = torch.empty(sizes, dtype=dtype_named(record.dtype))
    wanted = [chunk for chunk in record.chunks if chunk.size_bytes and overlap(chunk, offsets=offsets, sizes=sizes) is not None]

    def take(chunk: ChunkRecord, data: memoryview) -> None:
        common = overlap(chunk, offsets=offsets, sizes=sizes)
        if common is not None:
            source = tensor_over(data, dtype=record.dtype, sizes=chunk.sizes)
            target[_within(common, offsets)] = source[_within(common, chunk.offsets)]

    read_chunks(folder, wanted, take=take, threads=threads)
    return target


def overlap(chunk: ChunkRecord, *, offsets: Bounds, sizes: Bounds) -> tuple[tuple[int, int], ...] | None:
    """What a chunk and a box have in common, [begin, end) by dimension, or None. Pure."""
    common = tuple(
        (max(first, other), min(first + size, other + extent))
        for first, size, other, extent in zip(chunk.offsets, chunk.sizes, offsets, sizes, strict=True)
    )
    return common if all(begin < end for begin, end in common) else None


def _within(common: tuple[tuple[int, int], ...], offsets: Bounds) -> tuple[slice, ...]:
    return tuple(slice(begin - first, end - first) for (begin, end), first in zip(common, offsets, strict=True))
