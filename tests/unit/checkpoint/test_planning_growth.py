"""What a save says of itself grows with the ranks as their boxes do, and no faster: counted, not timed."""

import math

import pytest
import torch

from elastictrain.checkpoint import writer
from elastictrain.checkpoint.layout import Item
from elastictrain.checkpoint.manifest import ChunkRecord, Manifest, TensorRecord, digest_of
from elastictrain.checkpoint.manifest_format import check_manifest, encode_manifest
from elastictrain.checkpoint.memory.layout import RankDigests, RankLayout, RankPart
from elastictrain.checkpoint.reader import parts_of
from elastictrain.checkpoint.saver.commit_protocol import decode_parts, encode_parts
from elastictrain.checkpoint.tensor_bytes import Box, choose_own, overlap
from elastictrain.checkpoint.verified_read import CheckpointFolder, read_parts
from elastictrain.checkpoint.writer import build_manifest, write_part
from tests.unit.checkpoint.fakes import FakeStore

INCARNATION = "i00001-aa"
TENSORS = {f"layers.{number}.weight": (4096, 8) for number in range(6)}
RANKS_PER_HOST = 8


def items_of(rank: int, *, shards: int, world_size: int) -> tuple[Item, ...]:
    """Rows shared out over `shards` ranks, and that as often as the world has room for."""
    rows, copies = 4096 // shards, world_size // shards
    held = [Item(name, "float32", shape, (rows * (rank % shards), 0), (rows, shape[1])) for name, shape in TENSORS.items()]
    return choose_own([Box(item, copies, rank // shards) for item in held])


def say(*, shards: int, world_size: int, store: FakeStore | None = None) -> list[bytes]:
    """What the savers of all hosts say of one save; with a `store` they write parts."""
    told = []
    for first in range(0, world_size, RANKS_PER_HOST):
        parts = []
        for rank in range(first, first + RANKS_PER_HOST):
            layout = RankLayout(items_of(rank, shards=shards, world_size=world_size), shard_bytes=1 << 30)
            digest = digest_of(str(rank).encode())
            count = len(layout.template)
            parts.append(
                RankPart(rank, layout, RankDigests((digest,) * count, (digest,) * count, (digest,) * len(layout.items)))
            )
        where = {"folder": "f", "incarnation": INCARNATION, "world_size": world_size, "manifest_bytes": 0}
        told.append(encode_parts(parts if store is None else write_part(store, parts, **where)))
    return told


def put_together(told: list[bytes], *, world_size: int) -> Manifest:
    parts = [part for text in told for part in decode_parts(text, where="w")]
    return build_manifest(parts, facts=Manifest(1, world_size, INCARNATION, 1.0, "c", {}, {}))


@pytest.mark.parametrize("shards", [8, 64, 512])
def test_every_rank_adds_as_much(shards: int) -> None:
    told = say(shards=shards, world_size=shards)
    manifest = put_together(told, world_size=shards)
    boxes = shards * len(TENSORS)
    assert sum(len(tensor.chunks) for tensor in manifest.tensors.values()) == boxes
    assert sum(map(len, told)) < 160 * boxes + 200 * shards
    assert len(encode_manifest(manifest)) < 180 * boxes + 220 * shards


def test_copies_of_the_same_shards_add_nothing() -> None:
    for world_size in (8, 64, 512):
        manifest = put_together(say(shards=8, world_size=world_size), world_size=world_size)
        assert sum(len(tensor.chunks) for tensor in manifest.tensors.values()) == 8 * len(TENSORS)
        covered = {name: sum(math.prod(chunk.sizes) for chunk in manifest.tensors[name].chunks) for name in TENSORS}
        assert covered == {name: math.prod(shape) for name, shape in TENSORS.items()}


def test_a_leader_copies_each_chunk_once(monkeypatch: pytest.MonkeyPatch) -> None:
    copied = []

    def counting(dtype: str, shape: tuple[int, ...], chunks: tuple[ChunkRecord, ...]) -> TensorRecord:
        copied.append(len(chunks))
        return TensorRecord(dtype, shape, chunks)

    told = say(shards=64, world_size=64)
    monkeypatch.setattr(writer, "TensorRecord", counting)
    put_together(told, world_size=64)
    assert sum(copied) == 64 * len(TENSORS)


def test_with_parts_the_manifest_has_a_box_of_each_host() -> None:
    """Per host and kind of tensor, and not per rank and tensor."""
    store, hosts = FakeStore(), 32
    told = say(shards=8 * hosts, world_size=8 * hosts, store=store)
    manifest = put_together(told, world_size=8 * hosts)
    check_manifest(manifest)
    assert len(manifest.parts) == len(store.objects) == hosts
    assert max(map(len, told)) < 2000
    assert [len(boxes) for boxes in manifest.boxes] == [hosts]
    assert len(encode_manifest(manifest)) < hosts * (140 * RANKS_PER_HOST + 300)


def test_a_rank_reads_the_parts_with_its_boxes() -> None:
    store = FakeStore()
    manifest = put_together(say(shards=64, world_size=64, store=store), world_size=64)
    folder = CheckpointFolder(store, "checkpoints/f/")
    rows = {name: torch.empty(4096, 8)[:1] for name in TENSORS}
    for first, parts in ((0, {0}), (40 * 64, {5}), (39 * 64 + 1, {4, 5})):
        boxes = manifest.boxes[manifest.tensors["layers.0.weight"].boxes or 0]
        assert {box.part for box in boxes if overlap(box, offsets=(first, 0), sizes=(64, 8))} == parts
    assert parts_of(manifest, rows) == set(), "of another shape"
    assert parts_of(manifest, {name: torch.empty(4096, 8) for name in TENSORS}) == set(range(8))
    whole = read_parts(folder, manifest)
    assert sum(len(tensor.chunks) for tensor in whole.tensors.values()) == 64 * len(TENSORS)
