"""What must hold between the parts of a manifest, so that readers may index and allocate without looking. Free of torch."""

import math
from collections.abc import Sequence

from elastictrain.checkpoint.counters import counters_of
from elastictrain.checkpoint.dtypes import BY_NAME
from elastictrain.checkpoint.manifest import ChunkRecord, FileRecord, Manifest, TensorRecord
from elastictrain.checkpoint.safetensors_format import LENGTH_BYTES, MAX_HEADER_BYTES

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes."""

MOST_ENTANGLED = 8192
"""Boxes that no cut along a dimension separates and that are compared pair by pair; cuts separate the shards of any mesh."""


def tiling_problem(shape: Sequence[int], boxes: Sequence[Box]) -> str | None:
    """Why the boxes do not fill a tensor of that shape; None if they do. Completes a sentence that begins with "its chunks"."""
    for offsets, sizes in boxes:
        if not len(offsets) == len(sizes) == len(shape):
            return "have another number of dimensions than the tensor"
        if any(first + size > extent for first, size, extent in zip(offsets, sizes, shape, strict=True)):
            return "reach beyond the tensor"
    filled = [box for box in boxes if math.prod(box[1])]
    volume = sum(math.prod(sizes) for _, sizes in filled)
    if volume != math.prod(shape):
        return f"do not fill it: they have {volume} elements together, and the tensor has {math.prod(shape)}"
    return _overlap_problem(filled, num_dims=len(shape))


def _overlap_problem(boxes: list[Box], *, num_dims: int) -> str | None:
    """Boxes are cut apart along one dimension after the other, until each is alone or no cut separates them."""
    waiting: list[tuple[list[Box], int, int]] = [(boxes, 0, 0)]
    while waiting:
        group, dim, uncut = waiting.pop()
        if len(group) < 2:
            continue
        if uncut == num_dims:
            if (problem := _pairs_problem(group)) is not None:
                return problem
            continue
        parts = _cut(group, dim)
        following = (dim + 1) % num_dims
        waiting += [(part, following, uncut + 1 if len(parts) == 1 else 0) for part in parts]
    return None


def _cut(boxes: list[Box], dim: int) -> list[list[Box]]:
    """Groups of boxes whose extents along `dim` touch those of no other group."""
    parts: list[list[Box]] = []
    end = -1
    for box in sorted(boxes, key=lambda box: box[0][dim]):
        first, size = box[0][dim], box[1][dim]
        if first >= end:
            parts.append([])
        parts[-1].append(box)
        end = max(end, first + size)
    return parts


def _pairs_problem(boxes: list[Box]) -> str | None:
    if len(boxes) > MOST_ENTANGLED:
        return f"lie in no grid: {len(boxes)} of them cannot be told apart by a cut, and at most {MOST_ENTANGLED} may be"
    import numpy as np

    begins = np.array([offsets for offsets, _ in boxes], dtype=np.uint64)
    ends = begins + np.array([sizes for _, sizes in boxes], dtype=np.uint64)
    for index in range(len(boxes) - 1):
        apart = (begins[index + 1 :] >= ends[index]) | (ends[index + 1 :] <= begins[index])
        shared = np.flatnonzero(~apart.any(axis=1))
        if len(shared):
            other = boxes[index + 1 + int(shared[0])]
            return f"overlap: {_text(boxes[index])} and {_text(other)}"
    return None


def _text(box: Box) -> str:
    return "[" + ",".join(f"{first}:{first + size}" for first, size in zip(*box, strict=True)) + "]"


MAX_COUNT = 2**63 - 1
"""Of steps, bytes and elements: torch and every file system count in signed 64 bits."""

MAX_DIMS = 64
MAX_CREATED = 253_402_300_799.0
"""The last second of the year 9999: no calendar goes further."""


def check_manifest(manifest: Manifest) -> None:
    """Raises: ValueError naming the part that is wrong, what it must be, and what it is."""
    if not 1 <= manifest.world_size <= MAX_COUNT:
        raise ValueError(f"`world_size` must be from 1 to {MAX_COUNT}, but is {manifest.world_size}")
    if not 0 <= manifest.step <= MAX_COUNT:
        raise ValueError(f"`step` must be from 0 to {MAX_COUNT}, but is {manifest.step}")
    if not 0 <= manifest.created <= MAX_CREATED:
        raise ValueError(f"`created` must be a time in seconds before the year 10000, but is {manifest.created}")
    files = {file.name: file for file in manifest.files}
    if len(files) != len(manifest.files):
        raise ValueError("two files have the same name")
    for file in manifest.files:
        _check_file(file)
    for name, tensor in manifest.tensors.items():
        _check_extent(name, tensor)
        for chunk in tensor.chunks:
            _check_place(name, tensor, chunk, files.get(chunk.file))
        problem = tiling_problem(tensor.shape, [(chunk.offsets, chunk.sizes) for chunk in tensor.chunks])
        if problem is not None:
            raise ValueError(f"tensor {name!r}: its chunks {problem}")
    counters_of(manifest.state, step=manifest.step)


def _check_file(file: FileRecord) -> None:
    if file.size_bytes > MAX_COUNT:
        raise ValueError(f"{file.name} must have at most {MAX_COUNT} bytes, but has {file.size_bytes}")
    most = min(file.size_bytes, LENGTH_BYTES + MAX_HEADER_BYTES)
    if not LENGTH_BYTES <= file.header_bytes <= most:
        raise ValueError(f"{file.name} must have a header of {LENGTH_BYTES} to {most} bytes, but it has {file.header_bytes}")


def _check_extent(name: str, tensor: TensorRecord) -> None:
    element = BY_NAME.get(tensor.dtype)
    if element is None:
        raise ValueError(f"tensor {name!r} has the unknown element type {tensor.dtype!r}")
    if len(tensor.shape) > MAX_DIMS:
        raise ValueError(f"tensor {name!r} must have at most {MAX_DIMS} dimensions, but has {len(tensor.shape)}")
    # A dimension of 0 would hide the others, which torch multiplies all the same.
    if math.prod(max(1, size) for size in tensor.shape) * element.size_bytes > MAX_COUNT:
        raise ValueError(f"tensor {name!r} must have at most {MAX_COUNT} bytes, but has the shape {list(tensor.shape)}")


def _check_place(name: str, tensor: TensorRecord, chunk: ChunkRecord, file: FileRecord | None) -> None:
    # Before any product: thousands of dimensions have one that takes hours.
    if not len(chunk.offsets) == len(chunk.sizes) == len(tensor.shape):
        raise ValueError(f"a chunk of tensor {name!r} has another number of dimensions than the tensor")
    if chunk.size_bytes != math.prod(chunk.sizes) * BY_NAME[tensor.dtype].size_bytes:
        raise ValueError(f"a chunk of tensor {name!r} has another number of bytes than its sizes say")
    if file is None or not file.header_bytes <= chunk.start <= chunk.start + chunk.size_bytes <= file.size_bytes:
        raise ValueError(f"a chunk of tensor {name!r} lies outside of the files")
