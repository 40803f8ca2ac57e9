"""Whether boxes fill a tensor exactly: they lie in it, no two overlap, and together they cover it. Pure, and free of torch."""

import math
from collections.abc import Sequence

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
