"""The raw bytes of tensors, and tensors over raw bytes."""

import torch
from torch import Tensor

from elastictrain.checkpoint.layout import Item
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
