import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastictrain.checkpoint.layout import Item, plan_files, split_item
from elastictrain.checkpoint.safetensors_format import BY_NAME, decode_header
from elastictrain.errors import CheckpointError

SHAPES = st.lists(st.integers(0, 9), max_size=3).map(tuple)
ITEMS = st.dictionaries(
    st.text("abc.", min_size=1, max_size=4), st.tuples(st.sampled_from(sorted(BY_NAME)), SHAPES), max_size=6
).map(lambda found: [Item(name, dtype, shape, (0,) * len(shape), shape) for name, (dtype, shape) in found.items()])


@given(ITEMS, st.integers(1, 300), st.integers(1, 100))
def test_files_hold_every_byte_once(items: list[Item], shard_bytes: int, chunk_bytes: int) -> None:
    files = plan_files(items, incarnation="i", rank=3, shard_bytes=shard_bytes, chunk_bytes=chunk_bytes)
    assert sorted(placed.item.name for file in files for placed in file.items) == sorted(item.name for item in items)
    assert [file.name for file in files] == [f"i-r00003-{n:03d}.safetensors" for n in range(len(files))]
    for file in files:
        data_bytes = sum(placed.item.size_bytes for placed in file.items)
        assert file.size_bytes == len(file.header) + data_bytes
        assert data_bytes <= shard_bytes or sum(placed.item.size_bytes > 0 for placed in file.items) == 1
        position = len(file.header)
        for placed, entry in zip(file.items, decode_header(file.header, where="f").values(), strict=True) if data_bytes else ():
            assert placed.start == position == len(file.header) + entry.span[0]
            position += placed.item.size_bytes


@given(SHAPES, st.integers(1, 100), st.integers(0, 50))
def test_chunks_fill_the_item_in_order(shape: tuple[int, ...], chunk_bytes: int, offset: int) -> None:
    item = Item("w", "int16", tuple(n + offset for n in shape), (offset,) * len(shape), shape)
    chunks = split_item(item, chunk_bytes=chunk_bytes, file="f", start=100)
    position = 0
    for chunk in chunks:
        assert (chunk.file, chunk.start) == ("f", 100 + position)
        assert chunk.size_bytes == math.prod(chunk.sizes) * 2
        position += chunk.size_bytes
        assert chunk.size_bytes <= chunk_bytes or not chunk.sizes or chunk.sizes[0] == 1
    assert position == item.size_bytes
    if shape:
        assert sum(chunk.sizes[0] for chunk in chunks) == shape[0]
        assert [chunk.offsets[0] for chunk in chunks] == [
            offset + sum(c.sizes[0] for c in chunks[:n]) for n in range(len(chunks))
        ]


def test_wide_elements_come_first_so_that_data_is_aligned() -> None:
    items = [Item("a", "bool", (3,), (0,), (3,)), Item("b", "float32", (2,), (0,), (2,)), Item("c", "int64", (), (), ())]
    (file,) = plan_files(items, incarnation="i", rank=0, shard_bytes=10**6)
    assert [placed.item.name for placed in file.items] == ["c", "b", "a"]


def test_keys_of_shards() -> None:
    assert Item("w", "int8", (8, 4), (0, 0), (8, 4)).key == "w"
    assert Item("w", "int8", (8, 4), (2, 0), (3, 4)).key == "w[2:5,0:4]"


def test_what_cannot_be_written_is_named() -> None:
    with pytest.raises(CheckpointError, match=r"'z'.*complex128"):
        plan_files([Item("z", "complex128", (), (), ())], incarnation="i", rank=0, shard_bytes=1)
    twins = [Item("w", "int8", (8,), (0,), (4,)), Item("w[0:4]", "int8", (8,), (0,), (8,))]
    with pytest.raises(CheckpointError, match=r"w\[0:4\]"):
        plan_files(twins, incarnation="i", rank=0, shard_bytes=1)
