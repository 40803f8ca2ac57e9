"""Parts of a manifest: what a host wrote, in an object of its own, and how the manifest refers to it. Pure, and free of torch.

The manifest has the digest of each part, and for each tensor the boxes that the chunks in a part fill. So a reader knows which
parts it needs; the manifest can be checked without them, and each of them without the others.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import msgspec

from elastictrain.bounded_json import DOCUMENT, encode_record, excess, parse_record
from elastictrain.checkpoint.manifest import (
    ChunkRecord,
    Count,
    FileRecord,
    Manifest,
    PartBox,
    PartRecord,
    StoredFile,
    TensorRecord,
    digest_of,
    has_digest,
    sha256_of,
)
from elastictrain.checkpoint.manifest_format import check_sha256, check_tensors, tiling_problem, without_sha256
from elastictrain.errors import CheckpointError, InvalidCheckpointError

PART_SUFFIX = "-part.json"
MOST_BOXES = 1024  # of one tensor in one part: shards of the ranks of a host that do not touch

Bounds = tuple[Count, ...]


class ManifestPart(msgspec.Struct, frozen=True, tag_field="format", tag="elastictrain-checkpoint-part"):
    """Content of a part: files, and the chunks in them by tensor."""

    files: tuple[FileRecord, ...]
    tensors: dict[str, TensorRecord]


class TensorGroup(msgspec.Struct, frozen=True):
    """Tensors of which a part has the same boxes."""

    dtype: str
    shape: Bounds
    boxes: tuple[tuple[Bounds, Bounds], ...]  # offsets and sizes
    names: tuple[str, ...]


class WrittenPart(msgspec.Struct, frozen=True):
    """What the committer learns of a part: all that the manifest says of it."""

    ranks: tuple[Count, ...]
    record: PartRecord
    groups: tuple[TensorGroup, ...]


def encode_part(part: ManifestPart, *, name: str, signed: bool) -> tuple[bytes, PartRecord]:
    """Its bytes, and what the manifest says of them. Raises: CheckpointError if no reader would accept a part of that size."""
    raw = encode_record(part)
    if (problem := excess(raw, limits=DOCUMENT)) is not None:
        raise CheckpointError(f"{name} {problem}; set a larger checkpoint.shard_mb")
    files = tuple(StoredFile(file.name, file.size_bytes) for file in part.files)
    return raw, PartRecord(name, len(raw), digest_of(raw), files, sha256_of(raw) if signed else "")


def groups_of(part: ManifestPart) -> tuple[TensorGroup, ...]:
    names = defaultdict(list)
    for name, tensor in part.tensors.items():
        names[tensor.dtype, tensor.shape, merged_boxes(tensor.chunks)].append(name)
    return tuple(TensorGroup(dtype, shape, boxes, tuple(alike)) for (dtype, shape, boxes), alike in names.items())


def merged_boxes(chunks: Iterable[ChunkRecord]) -> tuple[tuple[Bounds, Bounds], ...]:
    """Boxes that the chunks fill, neighbours joined; each chunk is in one of them."""
    boxes = [(chunk.offsets, chunk.sizes) for chunk in chunks]
    for dim in range(len(boxes[0][0]) if boxes else 0):

        def place(box: tuple[Bounds, Bounds], dim: int = dim) -> tuple[Bounds, Bounds, int]:
            offsets, sizes = box
            return (*offsets[:dim], *offsets[dim + 1 :]), (*sizes[:dim], *sizes[dim + 1 :]), offsets[dim]

        joined: list[tuple[Bounds, Bounds]] = []
        for offsets, sizes in sorted(boxes, key=place):
            if joined and place(joined[-1])[:2] == place((offsets, sizes))[:2]:
                first, extent = joined[-1]
                if first[dim] + extent[dim] == offsets[dim]:
                    joined[-1] = (first, (*extent[:dim], extent[dim] + sizes[dim], *extent[dim + 1 :]))
                    continue
            joined.append((offsets, sizes))
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


class PartChecker:
    """Parses the parts of one manifest, and checks them against it."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest

    @cached_property
    def _boxes(self) -> Mapping[int, Mapping[int, Sequence[PartBox]]]:
        """By part, then by place in `Manifest.boxes`."""
        found: dict[int, dict[int, list[PartBox]]] = defaultdict(lambda: defaultdict(list))
        for number, boxes in enumerate(self._manifest.boxes):
            for box in boxes:
                found[box.part][number].append(box)
        return found

    @cached_property
    def _names(self) -> Mapping[int | None, Sequence[str]]:
        """By place in `Manifest.boxes`."""
        found: dict[int | None, list[str]] = defaultdict(list)
        for name, tensor in self._manifest.tensors.items():
            found[tensor.boxes].append(name)
        return found

    def parse(self, raw: bytes | memoryview, number: int) -> ManifestPart:
        """Raises: InvalidCheckpointError with the end of a sentence that begins with the part's name."""
        record = self._manifest.parts[number]
        if len(raw) != record.size_bytes or not has_digest(raw, record.digest, sha256=record.sha256):
            raise InvalidCheckpointError("does not have its digest")
        try:
            part = parse_record(raw, ManifestPart, limits=DOCUMENT)
            if record.sha256:
                check_sha256(part.files, part.tensors)
            elif b'sha256":' in bytes(raw):
                part = ManifestPart(*without_sha256(part.files, part.tensors))
            self._check(part, number)
        except ValueError as error:
            raise InvalidCheckpointError(str(error)) from error
        return part

    def _check(self, part: ManifestPart, number: int) -> None:
        if tuple(StoredFile(file.name, file.size_bytes) for file in part.files) != self._manifest.parts[number].files:
            raise ValueError("must have the files that the manifest has for it, but has others")
        check_tensors(part.files, part.tensors)
        boxes = self._boxes.get(number, {})
        expected = {name: boxes[place] for place in boxes for name in self._names.get(place, ())}
        if part.tensors.keys() != expected.keys():
            raise ValueError("must have chunks of the tensors that the manifest has in it, but has those of others")
        for name, tensor in part.tensors.items():
            whole = self._manifest.tensors[name]
            if (tensor.dtype, tensor.shape) != (whole.dtype, whole.shape):
                raise ValueError(f"tensor {name!r} has another shape or element type in it than in the manifest")
            if problem := _filling_problem(expected[name], tensor.chunks):
                raise ValueError(f"tensor {name!r}: its chunks {problem}")


def _filling_problem(boxes: Sequence[PartBox], chunks: Sequence[ChunkRecord]) -> str | None:
    """Why the chunks do not fill the boxes, as the end of a sentence on "its chunks"; None if they do."""
    if len(boxes) > MOST_BOXES:
        return f"must fill at most {MOST_BOXES} boxes of one part, but there are {len(boxes)}"
    inside: list[list[ChunkRecord]] = [[] for _ in boxes]
    for chunk in chunks:
        around = (number for number, box in enumerate(boxes) if _contains(box, chunk))
        number = 0 if len(boxes) == 1 else next(around, -1)
        if number < 0:
            return "reach beyond the boxes that the manifest has in this part"
        inside[number].append(chunk)
    problems = (tiling_problem(box.sizes, own, origin=box.offsets) for box, own in zip(boxes, inside, strict=True))
    return next(filter(None, problems), None)


def _contains(box: PartBox, chunk: ChunkRecord) -> bool:
    sides = zip(box.offsets, box.sizes, chunk.offsets, chunk.sizes, strict=True)
    return all(low <= first and first + size <= low + extent for low, extent, first, size in sides)


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
