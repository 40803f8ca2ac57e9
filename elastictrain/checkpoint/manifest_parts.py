"""Parts of a manifest: what a host wrote, in an object of its own, and how the manifest refers to it. Pure, and free of torch.

The manifest has the digest of each part, and for each tensor the boxes that the chunks in a part fill. So a reader knows which
parts it needs; the manifest can be checked without them, and each of them without the others.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

import msgspec

from elastictrain.bounded_json import DOCUMENT, encode_record, excess, parse_record
from elastictrain.checkpoint.manifest import (
    ChunkRecord,
    Count,
    FileRecord,
    Manifest,
    PartBox,
    PartRecord,
    TensorRecord,
    digest_of,
    has_digest,
    sha256_of,
)
from elastictrain.checkpoint.manifest_format import check_sha256, check_tensors, without_sha256
from elastictrain.errors import CheckpointError

PART_SUFFIX = "-part.json"

Bounds = tuple[Count, ...]
Boxes = tuple[tuple[Bounds, Bounds], ...]  # offsets and sizes


class ManifestPart(msgspec.Struct, frozen=True, tag_field="format", tag="elastictrain-checkpoint-part"):
    """Content of a part: files, and the chunks in them by tensor."""

    files: tuple[FileRecord, ...]
    tensors: dict[str, TensorRecord]


class TensorGroup(msgspec.Struct, frozen=True):
    """Tensors of which a part has the same boxes."""

    dtype: str
    shape: Bounds
    boxes: Boxes
    names: tuple[str, ...]


class WrittenPart(msgspec.Struct, frozen=True):
    """What the committer learns of a part: all that the manifest says of it."""

    ranks: tuple[Count, ...]
    record: PartRecord
    groups: tuple[TensorGroup, ...]


def encode_part(part: ManifestPart, *, name: str, ranks: Sequence[int], signed: bool) -> tuple[bytes, WrittenPart]:
    """Its bytes, and what the committer learns. Raises: CheckpointError if no reader would accept a part of that size."""
    raw = encode_record(part)
    if (problem := excess(raw, limits=DOCUMENT)) is not None:
        raise CheckpointError(f"{name} {problem}; set a larger checkpoint.shard_mb")
    names = defaultdict(list)
    for tensor, about in _described(part).items():
        names[about].append(tensor)
    groups = tuple(TensorGroup(*about, tuple(alike)) for about, alike in names.items())
    record = PartRecord(name, len(raw), digest_of(raw), _sizes(part), sha256_of(raw) if signed else "")
    return raw, WrittenPart(tuple(ranks), record, groups)


def _described(part: ManifestPart) -> dict[str, tuple[str, Bounds, Boxes]]:
    return {name: (tensor.dtype, tensor.shape, merged_boxes(tensor.chunks)) for name, tensor in part.tensors.items()}


def _sizes(part: ManifestPart) -> dict[str, int]:
    return {file.name: file.size_bytes for file in part.files}


def merged_boxes(chunks: Iterable[ChunkRecord]) -> Boxes:
    """Boxes that the chunks fill without overlap: neighbours are joined, along one dimension after the other."""
    boxes = [(chunk.offsets, chunk.sizes) for chunk in chunks]
    for dim in range(len(boxes[0][0]) if boxes else 0):

        def place(box: tuple[Bounds, Bounds], dim: int = dim) -> tuple[Bounds, Bounds, int]:
            offsets, sizes = box
            return (*offsets[:dim], *offsets[dim + 1 :]), (*sizes[:dim], *sizes[dim + 1 :]), offsets[dim]

        joined: list[tuple[Bounds, Bounds]] = []
        for box in sorted(boxes, key=place):
            if joined and place(joined[-1])[:2] == place(box)[:2]:
                first, extent = joined[-1]
                if first[dim] + extent[dim] == box[0][dim]:
                    joined[-1] = (first, (*extent[:dim], extent[dim] + box[1][dim], *extent[dim + 1 :]))
                    continue
            joined.append(box)
        boxes = joined
    return tuple(sorted(boxes))


def with_written(manifest: Manifest, written: Sequence[WrittenPart]) -> Manifest:
    """Add parts to a manifest. Raises: ValueError if they disagree on a tensor's shape or element type."""
    together: dict[tuple[str, Bounds, tuple[str, ...]], list[PartBox]] = {}
    for number, part in enumerate(written):
        for group in part.groups:
            boxes = together.setdefault((group.dtype, group.shape, group.names), [])
            boxes.extend(PartBox(number, offsets, sizes) for offsets, sizes in group.boxes)
    kinds = {name: (tensor.dtype, tensor.shape) for name, tensor in manifest.tensors.items()}
    of_name: dict[str, list[list[PartBox]]] = defaultdict(list)
    for (dtype, shape, names), boxes in together.items():
        for name in names:
            if kinds.setdefault(name, (dtype, shape)) != (dtype, shape):
                raise ValueError(f"ranks disagree on tensor {name!r}: {kinds[name]} and {(dtype, shape)}")
            of_name[name].append(boxes)
    # Tensors that are divided alike share their boxes, unless the manifest itself has chunks of one.
    places: dict[tuple[object, ...], int] = {}
    table: list[tuple[PartBox, ...]] = []
    tensors: dict[str, TensorRecord] = {}
    for name, (dtype, shape) in sorted(kinds.items()):
        chunks = manifest.tensors[name].chunks if name in manifest.tensors else ()
        place: int | None = None
        if name in of_name:
            place = places.setdefault((name if chunks else "", *map(id, of_name[name])), len(table))
            if place == len(table):
                table.append(tuple(box for boxes in of_name[name] for box in boxes))
        tensors[name] = TensorRecord(dtype, shape, chunks, place)
    return replace(manifest, tensors=tensors, parts=tuple(part.record for part in written), boxes=tuple(table))


def parse_part(raw: bytes, *, manifest: Manifest, number: int) -> ManifestPart:
    """The part, if it is exactly what the manifest says. Raises: ValueError, the end of a sentence on the part."""
    record = manifest.parts[number]
    if not has_digest(raw, record.digest, sha256=record.sha256):
        raise ValueError("does not have its digest")
    part = parse_record(raw, ManifestPart, limits=DOCUMENT)
    if record.sha256:
        check_sha256(part.files, part.tensors)
    elif b'sha256":' in raw:
        part = ManifestPart(*without_sha256(part.files, part.tensors))
    check_tensors(part.files, part.tensors)
    here = [tuple(sorted((box.offsets, box.sizes) for box in boxes if box.part == number)) for boxes in manifest.boxes]
    expected = {
        name: (tensor.dtype, tensor.shape, here[tensor.boxes])
        for name, tensor in manifest.tensors.items()
        if tensor.boxes is not None and here[tensor.boxes]
    }
    # Boxes that result from joining neighbours are filled, and those of the manifest do not overlap.
    if _described(part) != expected or _sizes(part) != record.files:
        raise ValueError("must have the files, tensors and boxes that the manifest has for it, but has others")
    return part


def with_contents(manifest: Manifest, parts: Iterable[ManifestPart]) -> Manifest:
    """The manifest with files and chunks of `parts` in their places, as if it had never had any."""
    parts = list(parts)
    chunks = {name: [*tensor.chunks] for name, tensor in manifest.tensors.items()}
    for part in parts:
        for name, tensor in part.tensors.items():
            chunks[name].extend(tensor.chunks)
    return replace(
        manifest,
        files=(*manifest.files, *(file for part in parts for file in part.files)),
        tensors={
            name: TensorRecord(tensor.dtype, tensor.shape, tuple(chunks[name])) for name, tensor in manifest.tensors.items()
        },
        parts=(),
        boxes=(),
    )
