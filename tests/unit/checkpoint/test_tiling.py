import itertools
import math
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastictrain.checkpoint.manifest import ChunkRecord
from elastictrain.checkpoint.manifest_format import MOST_ENTANGLED, tiling_problem
from tests.unit.examples import examples

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes."""


def problem_of(shape: tuple[int, ...], boxes: list[Box]) -> str | None:
    """Of chunks with these boxes."""
    return tiling_problem(shape, [ChunkRecord(offsets, sizes, "", 0, 0, "") for offsets, sizes in boxes])


def grid(shape: tuple[int, ...], parts: tuple[int, ...]) -> list[Box]:
    """A tensor cut evenly along each dimension."""
    cuts = [
        [(size * one // count, size * (one + 1) // count) for one in range(count)]
        for size, count in zip(shape, parts, strict=True)
    ]
    return [
        (tuple(first for first, _ in extents), tuple(end - first for first, end in extents))
        for extents in itertools.product(*cuts)
    ]


def fills(shape: tuple[int, ...], boxes: list[Box]) -> bool:
    """By counting every element."""
    counts = dict.fromkeys(itertools.product(*map(range, shape)), 0)
    for offsets, sizes in boxes:
        for place in itertools.product(*(range(o, o + n) for o, n in zip(offsets, sizes, strict=True))):
            if place not in counts:
                return False
            counts[place] += 1
    return all(count == 1 for count in counts.values())


@settings(max_examples=examples(300))
@given(st.data())
def test_it_agrees_with_counting(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(0, 4), min_size=0, max_size=3)))
    boxes = grid(shape, tuple(data.draw(st.integers(1, 3)) for _ in shape))
    for _ in range(data.draw(st.integers(0, 2))):
        at = data.draw(st.integers(0, len(boxes) - 1))
        offsets = tuple(data.draw(st.integers(0, size)) for size in shape)
        sizes = tuple(data.draw(st.integers(0, size)) for size in shape)
        boxes[at] = data.draw(st.sampled_from([(offsets, sizes), (offsets, boxes[at][1]), boxes[0]]))
    expected = fills(shape, boxes)
    outside = any(o + n > s for one in boxes for o, n, s in zip(*one, shape, strict=True))
    assert (problem_of(shape, boxes) is None) == (expected and not outside)


def test_boxes_that_no_cut_separates() -> None:
    """Four around one, as bricks of a spiral lie."""
    spiral: list[Box] = [((0, 0), (1, 2)), ((0, 2), (2, 1)), ((2, 1), (1, 2)), ((1, 0), (2, 1)), ((1, 1), (1, 1))]
    assert problem_of((3, 3), spiral) is None
    moved = [*spiral[:4], ((0, 0), (1, 1))]
    assert "overlap" in str(problem_of((3, 3), moved))


def test_the_same_box_twice() -> None:
    assert "overlap" in str(problem_of((4,), [((0,), (2,)), ((0,), (2,))]))


@pytest.mark.parametrize("parts", [(40_000, 1), (1, 40_000), (200, 200)])
def test_thousands_of_chunks_take_no_time(parts: tuple[int, int]) -> None:
    shape = (40_000, 40_000)
    boxes = grid(shape, parts)
    began = time.monotonic()
    assert problem_of(shape, boxes) is None
    (offsets, sizes) = boxes[-1]
    boxes[-1] = (tuple(max(0, one - 1) for one in offsets), sizes)
    assert "overlap" in str(problem_of(shape, boxes))
    assert time.monotonic() - began < 10.0


def test_a_maze_of_chunks_is_refused_and_not_puzzled_over() -> None:
    """Long bars, each of which overlaps the next: no cut separates them."""
    count = MOST_ENTANGLED + 1
    bars: list[Box] = [((one, 0), (2, 1)) for one in range(count)]
    shape = (2 * count, 1)
    assert math.prod(shape) == 2 * count
    began = time.monotonic()
    assert problem_of(shape, bars) is not None
    assert time.monotonic() - began < 10.0
