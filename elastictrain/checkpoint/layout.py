"""Where the bytes of each tensor lie in which file, and whether a file's header agrees. Pure, and free of torch.

A rank's items lie without gaps, wide elements first, so that all data stays aligned. One item is one tensor of the safetensors
file. The manifest describes it by chunks of bounded size (slabs along the first dimension), each with its own digest.
"""

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeVar

import msgspec

from elastictrain.checkpoint.manifest import ChunkRecord, Count, FileRecord, Manifest, TensorRecord
from elastictrain.checkpoint.safetensors_format import BY_CODE, BY_NAME, HeaderEntry, decode_header, encode_header
from elastictrain.errors import CheckpointError, InvalidCheckpointError

T = TypeVar("T")

CHUNK_BYTES = 32 * 2**20  # largest chunk, unless one row is larger: the memory that a reading or writing thread needs


class Item(msgspec.Struct, frozen=True, array_like=True):
    """The box of a tensor that one rank writes: the whole tensor of `shape`, or a shard of it."""

    name: str
    dtype: str
    shape: tuple[Count, ...]
    offsets: tuple[Count, ...]
    sizes: tuple[Count, ...]

    @property
    def size_bytes(self) -> int:
        return math.prod(self.sizes) * BY_NAME[self.dtype].size_bytes

    @property
    def key(self) -> str:
        """Name in the shard file: `weight` for a whole tensor, `weight[8:16,0:4]` for a shard."""
        if self.sizes == self.shape:
            return self.name
        return f"{self.name}[{','.join(f'{o}:{o + n}' for o, n in zip(self.offsets, self.sizes, strict=True))}]"


@dataclass(frozen=True, slots=True)
class PlacedItem:
    """An item and the offset of its first byte in the file. Its chunks have no digests yet."""

    item: Item
    start: int
    chunks: tuple[ChunkRecord, ...]


@dataclass(frozen=True, slots=True)
class ShardFile:
    """A file without the tensors' bytes, which follow `header` in the order of `items` without gaps."""

    name: str
    header: bytes
    items: tuple[PlacedItem, ...]
    size_bytes: int


def plan_files(
    items: Sequence[Item], *, incarnation: str, rank: int, shard_bytes: int, chunk_bytes: int = CHUNK_BYTES
) -> tuple[ShardFile, ...]:
    """Files of at most `shard_bytes`, or one larger item. Raises: CheckpointError for unknown element types or equal keys."""
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
    groups = grouped(ordered, [item.size_bytes for item in ordered], max_bytes=shard_bytes)
    files = []
    for index, group in enumerate(groups):
        # The name has the incarnation, so a previous generation that still writes cannot damage these files.
        name = f"{incarnation}-r{rank:05d}-{index:03d}.safetensors"
        header = encode_header([(item.key, item.dtype, item.sizes) for item in group], metadata={"format": "pt"})
        starts = list(accumulate((item.size_bytes for item in group), initial=len(header)))
        placed = tuple(
            PlacedItem(item, start, split_item(item, chunk_bytes=chunk_bytes, file=name, start=start))
            for item, start in zip(group, starts, strict=False)
        )
        files.append(ShardFile(name, header, placed, starts[-1]))
    return tuple(files)


def grouped(items: Iterable[T], sizes: Iterable[int], *, max_bytes: int) -> list[list[T]]:
    """Consecutive items in groups of at most `max_bytes`; a larger item has its own group."""
    groups: list[list[T]] = []
    filled = 0
    for item, size_bytes in zip(items, sizes, strict=True):
        if not groups or (filled and filled + size_bytes > max_bytes):
            groups.append([])
            filled = 0
        groups[-1].append(item)
        filled += size_bytes
    return groups


def split_item(item: Item, *, chunk_bytes: int, file: str = "", start: int = 0) -> tuple[ChunkRecord, ...]:
    """Slabs of at most `chunk_bytes` (one row at least) along the first dimension, contiguous in the item."""
    size_bytes = item.size_bytes
    if size_bytes <= chunk_bytes or not item.sizes:
        return (ChunkRecord(item.offsets, item.sizes, file, start, size_bytes, ""),)
    row_bytes = size_bytes // item.sizes[0]
    rows_per_chunk = max(1, chunk_bytes // row_bytes)
    chunks = []
    for first in range(0, item.sizes[0], rows_per_chunk):
        rows = min(rows_per_chunk, item.sizes[0] - first)
        offsets, sizes = (item.offsets[0] + first, *item.offsets[1:]), (rows, *item.sizes[1:])
        chunks.append(ChunkRecord(offsets, sizes, file, start + first * row_bytes, rows * row_bytes, ""))
    return tuple(chunks)


@dataclass(frozen=True, slots=True)
class PlacedChunk:
    name: str
    tensor: TensorRecord
    chunk: ChunkRecord


def chunks_by_file(manifest: Manifest) -> Mapping[str, Sequence[PlacedChunk]]:
    """The chunks in each file, in the order of their bytes."""
    placed: dict[str, list[PlacedChunk]] = {file.name: [] for file in manifest.files}
    for name, tensor in manifest.tensors.items():
        for chunk in tensor.chunks:
            placed[chunk.file].append(PlacedChunk(name, tensor, chunk))
    for chunks in placed.values():
        chunks.sort(key=lambda one: (one.chunk.start, one.chunk.size_bytes, one.chunk.offsets))
    return placed


def check_shard_header(head: bytes, *, file: FileRecord, chunks: Sequence[PlacedChunk], where: str) -> None:
    """Raises: InvalidCheckpointError naming `where`, unless the header is valid, its tensors fill the file, and each is exactly
    the manifest's `chunks` there, which are in the order of their bytes. `head` is the whole header."""
    filled = [one for one in chunks if one.chunk.size_bytes]
    empty = {_item([one]).key: one for one in chunks if not one.chunk.size_bytes}
    starts = [one.chunk.start - file.header_bytes for one in filled]
    position = taken = 0
    for key, entry in decode_header(head, where=where).items():
        size_bytes = math.prod(entry.shape) * BY_CODE[entry.code].size_bytes
        if entry.span != (position, position + size_bytes):
            raise InvalidCheckpointError(
                f"{where}: tensor {key!r} must be bytes [{position}, {position + size_bytes}) after the header, "
                f"but the header says [{entry.span[0]}, {entry.span[1]})"
            )
        position += size_bytes
        # A tensor takes the chunks that begin in its bytes.
        if size_bytes:
            end = bisect_left(starts, position)
            own, taken = filled[taken:end], end
        else:
            own = [empty.pop(key)] if key in empty else []
        problem = _entry_problem(key, entry, own, header_bytes=file.header_bytes)
        if problem is not None:
            raise InvalidCheckpointError(f"{where}: tensor {key!r} of its header {problem}")
    if file.header_bytes + position != file.size_bytes or len(head) != file.header_bytes:
        raise InvalidCheckpointError(f"{where}: must have {file.header_bytes + position} bytes, but has {file.size_bytes}")
    if taken != len(filled) or empty:
        raise InvalidCheckpointError(f"{where}: the manifest has tensors in it that its header has not")


def _entry_problem(key: str, entry: HeaderEntry, own: Sequence[PlacedChunk], *, header_bytes: int) -> str | None:
    if not own:
        return "is not in the manifest"
    position = header_bytes + entry.span[0]
    following: int | None = None
    for one in own:
        chunk, first = one.chunk, own[0].chunk
        if chunk.start != position:
            return f"must have a chunk at byte {position}, but the manifest has the next one at {chunk.start}"
        slab = following is None or (
            (chunk.offsets[:1], chunk.offsets[1:], chunk.sizes[1:]) == ((following,), first.offsets[1:], first.sizes[1:])
        )
        if one.name != own[0].name or not slab:
            return f"is not what its chunks in the manifest are put together to, which are of {one.name!r}"
        position += chunk.size_bytes
        following = chunk.offsets[0] + chunk.sizes[0] if chunk.offsets else -1
    item = _item(own)
    if (key, entry.shape, entry.code) != (item.key, item.sizes, BY_NAME[item.dtype].code):
        return f"({entry.code} {list(entry.shape)}) must be {item.key!r} ({BY_NAME[item.dtype].code} {list(item.sizes)})"
    return None


def _item(own: Sequence[PlacedChunk]) -> Item:
    """The box that these slabs along the first dimension form."""
    first, tensor = own[0].chunk, own[0].tensor
    sizes = (sum(one.chunk.sizes[0] for one in own), *first.sizes[1:]) if first.sizes else ()
    return Item(own[0].name, tensor.dtype, tensor.shape, first.offsets, sizes)
