"""Which bytes of which tensor go where in which file. Pure, and free of torch.

A rank's items are laid out densely, wide elements first, so that all data stays aligned. One item is one tensor of the
safetensors file; the manifest describes it by chunks of bounded size (slabs along its first dimension), which are digested and
read one by one.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from elastictrain.checkpoint.dtypes import BY_NAME
from elastictrain.checkpoint.safetensors_format import HeaderEntry, encode_header
from elastictrain.errors import CheckpointError

CHUNK_BYTES = 32 * 2**20
"""Upper bound for one chunk, unless a single row is larger: the memory that one reading or writing thread needs."""


@dataclass(frozen=True, slots=True)
class Item:
    """A box of a tensor that one rank writes: the whole tensor, or a shard of it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    """Of the whole tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of the box."""
        return math.prod(self.sizes) * BY_NAME[self.dtype].size_bytes

    @property
    def key(self) -> str:
        """Name in the shard file: `weight` for a whole tensor, `weight[8:16,0:4]` for a shard of it."""
        if self.sizes == self.shape:
            return self.name
        return f"{self.name}[{','.join(f'{o}:{o + n}' for o, n in zip(self.offsets, self.sizes, strict=True))}]"


@dataclass(frozen=True, slots=True)
class Chunk:
    """A slab of an item: bytes [begin, begin + size_bytes) of the item's bytes."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    begin: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class PlacedItem:
    """An item and the offset of its first byte in the file."""

    item: Item
    start: int
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True)
class ShardFile:
    """One file, complete but for the tensors' bytes, which follow `header` in the order of `items` without gaps."""

    name: str
    header: bytes
    items: tuple[PlacedItem, ...]
    size_bytes: int


def file_name(incarnation: str, *, rank: int, index: int) -> str:
    """Names of different incarnations never meet, so a predecessor that still writes cannot spoil our files."""
    return f"{incarnation}-r{rank:05d}-{index:03d}.safetensors"


def plan_files(
    items: Sequence[Item],
    *,
    incarnation: str,
    rank: int,
    shard_bytes: int,
    chunk_bytes: int = CHUNK_BYTES,
    metadata: Mapping[str, str],
) -> tuple[ShardFile, ...]:
    """The files of one rank; another one begins where `shard_bytes` would be passed.

    Raises: CheckpointError if an element type has no name in the format, or two items have the same key.
    """
    for item in items:
        if item.dtype not in BY_NAME:
            raise CheckpointError(
                f"tensor {item.name!r} has element type {item.dtype}, which the checkpoint format cannot hold"
            )
    ordered = sorted(items, key=lambda item: (-BY_NAME[item.dtype].size_bytes, item.name, item.offsets))
    keys = [item.key for item in ordered]
    if len(set(keys)) != len(keys):
        raise CheckpointError(
            f"two tensors would both be called {next(key for key in keys if keys.count(key) > 1)!r} in a shard"
        )
    groups: list[list[Item]] = []
    filled = 0
    for item in ordered:
        if not groups or (filled and filled + item.size_bytes > shard_bytes):
            groups.append([])
            filled = 0
        groups[-1].append(item)
        filled += item.size_bytes
    return tuple(
        _place(group, name=file_name(incarnation, rank=rank, index=index), chunk_bytes=chunk_bytes, metadata=metadata)
        for index, group in enumerate(groups)
    )


def _place(items: Sequence[Item], *, name: str, chunk_bytes: int, metadata: Mapping[str, str]) -> ShardFile:
    begins = [0]
    for item in items:
        begins.append(begins[-1] + item.size_bytes)
    entries = [
        HeaderEntry(item.key, BY_NAME[item.dtype].code, item.sizes, begin, begin + item.size_bytes)
        for item, begin in zip(items, begins[:-1], strict=True)
    ]
    header = encode_header(entries, metadata=metadata)
    placed = tuple(
        PlacedItem(item, len(header) + begin, split_item(item, chunk_bytes=chunk_bytes))
        for item, begin in zip(items, begins[:-1], strict=True)
    )
    return ShardFile(name, header, placed, len(header) + begins[-1])


def split_item(item: Item, *, chunk_bytes: int) -> tuple[Chunk, ...]:
    """Slabs of at most `chunk_bytes` (one row at least) along the first dimension; contiguous in the item's bytes."""
    size_bytes = item.size_bytes
    if size_bytes <= chunk_bytes or not item.sizes:
        return (Chunk(item.offsets, item.sizes, 0, size_bytes),)
    row_bytes = size_bytes // item.sizes[0]
    rows_per_chunk = max(1, chunk_bytes // row_bytes)
    chunks = []
    for first in range(0, item.sizes[0], rows_per_chunk):
        rows = min(rows_per_chunk, item.sizes[0] - first)
        offsets = (item.offsets[0] + first, *item.offsets[1:])
        chunks.append(Chunk(offsets, (rows, *item.sizes[1:]), first * row_bytes, rows * row_bytes))
    return tuple(chunks)
