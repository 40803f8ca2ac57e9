"""Bytes are checked as they come, however they are cut, and what is wrong is named."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastictrain.checkpoint.layout import Item
from elastictrain.checkpoint.memory.layout import RankDigests, RankLayout
from elastictrain.checkpoint.peers.replica_store import Verifier
from elastictrain.errors import InvalidCheckpointError
from tests.unit.checkpoint.peers.hosts import facts_of, put_of

LAYOUT = RankLayout(
    (
        Item("a", "float32", (30, 10), (0, 0), (30, 10)),
        Item("b", "int8", (0, 3), (0, 0), (0, 3)),
        Item("c", "int8", (5000,), (0,), (5000,)),
    ),
    shard_bytes=2000,
    chunk_bytes=256,
)
PUT, DATA = put_of(facts_of(layout=LAYOUT), layout=LAYOUT)


def verify(data: bytes | bytearray, sizes: list[int], digests: RankDigests = PUT.digests) -> None:
    verifier = Verifier(LAYOUT, digests, incarnation="i", rank=3)
    position = 0
    for size in [*sizes, len(data)]:
        verifier.feed(memoryview(data)[position : position + size])
        position += size
    verifier.finish()


def covered(offset: int) -> bool:
    return any(base <= offset < base + file.size_bytes for file, base in zip(LAYOUT.template, LAYOUT.starts, strict=True))


def test_the_layout_has_padding_and_several_files() -> None:
    assert len(LAYOUT.template) == 2
    assert not covered(LAYOUT.size_bytes - 1)


@settings(deadline=None)
@given(st.lists(st.integers(0, 3000), max_size=20))
def test_whole_bytes_pass_however_they_are_cut(sizes: list[int]) -> None:
    verify(DATA, sizes)


@settings(deadline=None)
@given(st.lists(st.integers(0, 3000), max_size=20), st.integers(0, LAYOUT.size_bytes - 1), st.integers(0, 7))
def test_a_flipped_bit_is_found_and_named(sizes: list[int], offset: int, bit: int) -> None:
    data = bytearray(DATA)
    data[offset] ^= 1 << bit
    if not covered(offset):
        verify(data, sizes)
        return
    index = 0 if offset < LAYOUT.starts[1] else 1
    with pytest.raises(InvalidCheckpointError, match=rf"^i-r00003-00{index}.safetensors: bytes \[") as caught:
        verify(data, sizes)
    begin, end = str(caught.value).partition("[")[2].partition(")")[0].split(", ")
    assert int(begin) <= offset - LAYOUT.starts[index] < int(end)


@settings(deadline=None)
@given(st.integers(0, LAYOUT.size_bytes - 1))
def test_missing_bytes_are_found(count: int) -> None:
    with pytest.raises(InvalidCheckpointError, match=f"must have {LAYOUT.size_bytes} bytes, but {count} came"):
        verify(DATA[:count], [])


def test_the_digest_of_a_whole_file_is_checked_too() -> None:
    digests = RankDigests(("0" * 32, *PUT.digests.files[1:]), PUT.digests.headers, PUT.digests.chunks)
    with pytest.raises(InvalidCheckpointError, match=r"^i-r00003-000.safetensors does not have its digest"):
        verify(DATA, [], digests)


def test_a_snapshot_of_nothing() -> None:
    layout = RankLayout((), shard_bytes=1)
    verifier = Verifier(layout, RankDigests((), (), ()), incarnation="i", rank=0)
    verifier.finish()
