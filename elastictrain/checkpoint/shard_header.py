"""Whether the header of a shard file and the manifest tell the same of the tensors in it. Pure, and free of torch."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from elastictrain.checkpoint.dtypes import BY_CODE, BY_NAME
from elastictrain.checkpoint.layout import Item
from elastictrain.checkpoint.manifest import ChunkRecord, FileRecord, Manifest, TensorRecord
from elastictrain.checkpoint.safetensors_format import HeaderEntry, decode_header
from elastictrain.errors import InvalidCheckpointError


@dataclass(frozen=True, slots=True)
class PlacedChunk:
    """A chunk with the tensor that it belongs to."""

    name: str
    tensor: TensorRecord
    chunk: ChunkRecord


def chunks_by_file(manifest: Manifest) -> Mapping[str, tuple[PlacedChunk, ...]]:
    """What the manifest places in each file, in the order of the bytes."""
    placed: dict[str, list[PlacedChunk]] = {file.name: [] for file in manifest.files}
    for name, tensor in manifest.tensors.items():
        for chunk in tensor.chunks:
            placed[chunk.file].append(PlacedChunk(name, tensor, chunk))
    return {file: tuple(sorted(chunks, key=_place)) for file, chunks in placed.items()}


def check_shard_header(head: bytes, *, file: FileRecord, chunks: Sequence[PlacedChunk], where: str) -> None:
    """The header is one of safetensors, its tensors fill the file, and each consists of the chunks that the manifest has there.

    `head` is all of the header; `chunks` are those of this file, in the order of their bytes.

    Raises: InvalidCheckpointError naming `where`.
    """
    entries = decode_header(head, where=where)
    position = 0
    for entry in entries:
        size_bytes = BY_CODE[entry.code].size_bytes
        for size in entry.shape:
            size_bytes *= size
        if (entry.begin, entry.end) != (position, position + size_bytes):
            raise InvalidCheckpointError(
                f"{where}: tensor {entry.key!r} must be bytes [{position}, {position + size_bytes}) after the header, "
                f"but the header says [{entry.begin}, {entry.end})"
            )
        position = entry.end
    if file.header_bytes + position != file.size_bytes or len(head) != file.header_bytes:
        raise InvalidCheckpointError(f"{where}: must have {file.header_bytes + position} bytes, but has {file.size_bytes}")
    _check_chunks(entries, file=file, chunks=chunks, where=where)


def _check_chunks(entries: Sequence[HeaderEntry], *, file: FileRecord, chunks: Sequence[PlacedChunk], where: str) -> None:
    """Every entry takes the chunks that begin where it does; none may be left over."""
    filled = [one for one in chunks if one.chunk.size_bytes]
    empty = {_item([one]).key: one for one in chunks if not one.chunk.size_bytes}
    starts = [one.chunk.start - file.header_bytes for one in filled]
    taken = 0
    for entry in entries:
        if entry.begin < entry.end:
            end = bisect_left(starts, entry.end)
            own, taken = filled[taken:end], end
        else:
            own = [empty.pop(entry.key)] if entry.key in empty else []
        problem = _entry_problem(entry, own, header_bytes=file.header_bytes)
        if problem is not None:
            raise InvalidCheckpointError(f"{where}: tensor {entry.key!r} of its header {problem}")
    if taken != len(filled) or empty:
        raise InvalidCheckpointError(f"{where}: the manifest has tensors in it that its header has not")


def _entry_problem(entry: HeaderEntry, own: Sequence[PlacedChunk], *, header_bytes: int) -> str | None:
    if not own:
        return "is not in the manifest"
    position = header_bytes + entry.begin
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
    if (entry.key, entry.shape, entry.code) != (item.key, item.sizes, BY_NAME[item.dtype].code):
        return f"({entry.code} {list(entry.shape)}) must be {item.key!r} ({BY_NAME[item.dtype].code} {list(item.sizes)})"
    return None


def _item(own: Sequence[PlacedChunk]) -> Item:
    """The box that slabs along the first dimension make together."""
    first, tensor = own[0].chunk, own[0].tensor
    sizes = (sum(one.chunk.sizes[0] for one in own), *first.sizes[1:]) if first.sizes else ()
    return Item(own[0].name, tensor.dtype, tensor.shape, first.offsets, sizes)


def _place(one: PlacedChunk) -> tuple[int, int, tuple[int, ...]]:
    return (one.chunk.start, one.chunk.size_bytes, one.chunk.offsets)
