"""Tensors as bytes: what is written, and what is read from a checkpoint, whatever it was sharded over."""

import torch
from torch import Tensor

from elastictrain.checkpoint.layout import Item
from elastictrain.checkpoint.manifest import ChunkRecord, TensorRecord
from elastictrain.checkpoint.verified_read import READ_THREADS, CheckpointFolder, read_chunks
from elastictrain.checkpoint.writer import ByteReader
from elastictrain.errors import CheckpointError


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for torch.float32."""
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    """torch.float32 for `float32`."""
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def reader_of(tensor: Tensor, item: Item) -> ByteReader:
    """Bytes of a local tensor in row-major order; a device tensor is copied to the host range by range."""
    if tuple(tensor.shape) != item.sizes:
        raise CheckpointError(
            f"tensor {item.name!r} has shape {list(tensor.shape)} here, but was planned as {list(item.sizes)}"
        )
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)

    def read(begin: int, end: int) -> memoryview:
        return flat[begin:end].cpu().numpy().data

    return read


def tensor_over(data: memoryview, *, dtype: str, sizes: tuple[int, ...]) -> Tensor:
    """A tensor that shares the memory of `data`, which must be writable and hold exactly its bytes."""
    if not data.nbytes:
        return torch.empty(sizes, dtype=dtype_named(dtype))
    return torch.frombuffer(data, dtype=torch.uint8).view(dtype_named(dtype)).reshape(sizes)


Bounds = tuple[int, ...]


def read_tensor(folder: CheckpointFolder, record: TensorRecord) -> Tensor:
    """The whole tensor, on the CPU. Raises: DamagedFileError, StorageError."""
    return read_box(folder, record, offsets=(0,) * len(record.shape), sizes=record.shape, threads=READ_THREADS)


def read_box(folder: CheckpointFolder, record: TensorRecord, *, offsets: Bounds, sizes: Bounds, threads: int) -> Tensor:
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
