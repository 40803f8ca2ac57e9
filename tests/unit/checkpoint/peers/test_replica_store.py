"""A replica counts only when all its bytes have their digests, and what is wrong is named."""

from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from elastictrain.checkpoint.layout import Item
from elastictrain.checkpoint.memory.folder import look
from elastictrain.checkpoint.memory.layout import RankDigests, RankLayout
from elastictrain.checkpoint.peers.requests import Put
from elastictrain.checkpoint.peers.server import ReplicaSlots
from elastictrain.errors import InvalidCheckpointError
from tests.unit.checkpoint.peers.hosts import RUN, facts_of, put_of

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


def take(folder: Path, put: Put, data: bytes | bytearray, *, cut: int = 1000) -> list[int]:
    """The steps of the replicas that are whole after one has come in pieces of at most `cut` bytes."""
    slots = ReplicaSlots(str(folder), run=RUN)
    slots.kept = frozenset({put.facts.rank})
    position = 0

    def receive(part: memoryview) -> int:
        nonlocal position
        size = min(cut, len(part))
        part[:size] = data[position : position + size]
        position += size
        return size

    assert slots.take(put, go=lambda: None, receive=receive)
    return [one.facts.step for one in look(str(folder), host=0)]


def test_the_layout_has_padding_and_several_files() -> None:
    assert len(LAYOUT.template) == 2
    assert LAYOUT.starts[1] + LAYOUT.template[1].size_bytes < LAYOUT.size_bytes


@pytest.mark.parametrize("cut", [1, 100, 4096, 1 << 20])
def test_whole_bytes_pass_however_they_are_cut(tmp_path: Path, cut: int) -> None:
    assert take(tmp_path, PUT, DATA, cut=cut) == [1]


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("place", ["header", "middle", "end"])
def test_a_flipped_bit_is_found_and_its_file_named(tmp_path: Path, index: int, place: str) -> None:
    file, base = LAYOUT.template[index], LAYOUT.starts[index]
    data = bytearray(DATA)
    data[base + {"header": 3, "middle": file.size_bytes // 2, "end": file.size_bytes - 1}[place]] ^= 4
    with pytest.raises(InvalidCheckpointError, match=rf"-00{index}.safetensors"):
        take(tmp_path, PUT, data)
    assert look(str(tmp_path), host=0) == []


def test_padding_belongs_to_no_file(tmp_path: Path) -> None:
    data = bytearray(DATA)
    data[-1] ^= 1
    assert take(tmp_path, PUT, data) == [1]


@pytest.mark.parametrize("field", ["files", "headers", "chunks"])
def test_every_digest_counts(tmp_path: Path, field: str) -> None:
    digests = structs.replace(PUT.digests, **{field: ("0" * 32, *getattr(PUT.digests, field)[1:])})
    with pytest.raises(InvalidCheckpointError):
        take(tmp_path, replace(PUT, digests=digests), DATA)
    assert look(str(tmp_path), host=0) == []


def test_a_snapshot_of_nothing(tmp_path: Path) -> None:
    layout = RankLayout((), shard_bytes=1)
    put = Put(facts_of(layout=layout), layout, RankDigests((), (), ()))
    assert take(tmp_path, put, b"") == [1]
