import json
import math
from collections.abc import Sequence
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from elastictrain.checkpoint.layout import Item
from elastictrain.checkpoint.manifest import ChunkRecord, Manifest, digest_of
from elastictrain.checkpoint.manifest_format import check_manifest, encode_manifest, parse_manifest, tiling_problem
from elastictrain.checkpoint.manifest_parts import WrittenPart, merged_boxes, parse_part
from elastictrain.checkpoint.memory.layout import RankDigests, RankLayout, RankPart
from elastictrain.checkpoint.saver.commit_protocol import decode_parts, encode_parts
from elastictrain.checkpoint.verified_read import CheckpointFolder, read_parts
from elastictrain.checkpoint.writer import Written, build_manifest, write_part
from elastictrain.errors import CheckpointError
from tests.unit.checkpoint.fakes import FakeStore
from tests.unit.examples import examples

INCARNATION = "000001-aa"
FOLDER = "step-000000001"


def chunk(offsets: Sequence[int], sizes: Sequence[int]) -> ChunkRecord:
    return ChunkRecord(tuple(offsets), tuple(sizes), "f", 0, 0, "")


@settings(max_examples=examples(100))
@given(st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=4), max_size=3), st.data())
def test_merged_boxes_hold_what_the_chunks_hold(cuts: list[list[int]], data: st.DataObject) -> None:
    grid = [[(sum(sides[:number]), side) for number, side in enumerate(sides)] for sides in cuts]
    cells = [chunk([first for first, _ in cell], [side for _, side in cell]) for cell in product(*grid)]
    held = [cell for cell in cells if data.draw(st.booleans())]
    boxes = merged_boxes(held)
    inside = [
        sum(
            all(low <= first and first + size <= low + extent for low, extent, first, size in zip(*box, *one, strict=True))
            for box in boxes
        )
        for one in ((cell.offsets, cell.sizes) for cell in held)
    ]
    assert inside == [1] * len(held)
    assert sum(math.prod(sizes) for _, sizes in boxes) == sum(math.prod(cell.sizes) for cell in held)
    if len(held) == len(cells):
        assert boxes == ((tuple(0 for _ in cuts), tuple(map(sum, cuts))),)


def part_of(rank: int, items: Sequence[Item]) -> RankPart:
    layout, digest = RankLayout(tuple(items), shard_bytes=1 << 30), digest_of(str(rank).encode())
    files = layout.files(incarnation=INCARNATION, rank=rank)
    count = sum(len(placed.chunks) for file in files for placed in file.items)
    return RankPart(rank, layout, RankDigests((digest,) * len(files), (digest,) * len(files), (digest,) * count))


def rows(rank: int, *, of: int, dtype: str = "float32") -> list[Item]:
    return [Item(name, dtype, (of, 4), (rank, 0), (1, 4)) for name in ("a", "b")]


class Saved:
    """A world of four, two ranks to a host, and what its hosts told."""

    def __init__(self, *, manifest_bytes: int = 0, whole: int = 0) -> None:
        """The first `whole` hosts have so little to tell that they write no part."""
        self.store = FakeStore()
        self.parts = [part_of(rank, rows(rank, of=4)) for rank in range(4)]
        self.parts[1] = part_of(1, [*rows(1, of=4), Item("step", "int64", (), (), ())])
        self.told: list[Written] = []
        for first in (0, 2):
            limit = 1 << 20 if first < 2 * whole else manifest_bytes
            where = {"folder": FOLDER, "incarnation": INCARNATION, "world_size": 4}
            written = write_part(self.store, self.parts[first : first + 2], manifest_bytes=limit, **where)  # type: ignore[arg-type]
            self.told += decode_parts(encode_parts(written), where="here")
        self.manifest = build_manifest(self.told, facts=self.facts)

    @property
    def facts(self) -> Manifest:
        return Manifest(1, 4, INCARNATION, 1.0, "c", {}, {})

    def read(self, numbers: Sequence[int] | None = None) -> Manifest:
        manifest = parse_manifest(encode_manifest(self.manifest), where="m")
        return read_parts(CheckpointFolder(self.store, f"checkpoints/{FOLDER}/"), manifest, numbers=numbers)


@pytest.mark.parametrize("whole", [0, 1, 2])
def test_with_its_parts_a_manifest_says_what_it_says_without(whole: int) -> None:
    saved = Saved(whole=whole)
    assert len(saved.manifest.parts) == len(saved.store.objects) == 2 - whole
    version = json.loads(encode_manifest(saved.manifest))["version"]
    assert version == (1 if whole == 2 else 2)
    check_manifest(saved.manifest)
    expected = build_manifest(saved.parts, facts=saved.facts)
    found = saved.read()
    assert sorted(found.files, key=lambda file: file.name) == list(expected.files)
    assert found.size_bytes == saved.manifest.size_bytes == expected.size_bytes
    for name, tensor in expected.tensors.items():
        assert set(found.tensors[name].chunks) == set(tensor.chunks)
        assert replace(found.tensors[name], chunks=()) == replace(tensor, chunks=())


def test_tensors_that_are_divided_alike_share_their_boxes() -> None:
    manifest = Saved().manifest
    assert manifest.tensors["a"].boxes == manifest.tensors["b"].boxes != manifest.tensors["step"].boxes
    assert [len(boxes) for boxes in manifest.boxes] == [2, 1]


def test_one_part_is_read_without_the_other() -> None:
    found = Saved().read([1])
    assert [file.name[:17] for file in found.files] == ["000001-aa-r00002-", "000001-aa-r00003-"]
    assert [one.offsets for one in found.tensors["a"].chunks] == [(2, 0), (3, 0)]
    assert not found.tensors["step"].chunks


def test_a_tensor_that_two_hosts_write_is_not_committed() -> None:
    saved = Saved()
    first, second = saved.told
    assert isinstance(second, WrittenPart)
    twice = replace(second, groups=(*second.groups, *(first.groups if isinstance(first, WrittenPart) else ())))
    with pytest.raises(ValueError, match="do not fill"):
        check_manifest(build_manifest([first, twice], facts=saved.facts))


def test_hosts_that_disagree_are_named_with_the_tensor() -> None:
    saved = Saved()
    other = write_part(
        saved.store,
        [part_of(9, rows(2, of=4, dtype="int32"))],
        folder=FOLDER,
        incarnation=INCARNATION,
        world_size=4,
        manifest_bytes=0,
    )
    with pytest.raises(CheckpointError, match="ranks disagree on tensor 'a'"):
        build_manifest([saved.told[0], *other], facts=saved.facts)


def test_a_signed_part_must_have_its_sha256() -> None:
    saved = Saved()
    ((_, raw), _) = saved.store.objects.items()
    signed = replace(saved.manifest.parts[0], sha256="0" * 64)
    manifest = Manifest(1, 4, INCARNATION, 1.0, "c", {}, {}, parts=(signed,), boxes=saved.manifest.boxes)
    with pytest.raises(ValueError, match="digest"):
        parse_part(raw, manifest=manifest, number=0)


def test_boxes_that_do_not_touch() -> None:
    """Of one host; the other has what is between them."""
    parts = [part_of(rank, rows(rank, of=4)) for rank in range(4)]
    store, where = FakeStore(), {"folder": FOLDER, "incarnation": INCARNATION, "world_size": 4, "manifest_bytes": 0}
    told = [one for pair in (parts[::2], parts[1::2]) for one in write_part(store, pair, **where)]  # type: ignore[arg-type]
    manifest = build_manifest(told, facts=Saved().facts)
    check_manifest(manifest)
    assert [len(boxes) for boxes in manifest.boxes] == [4]
    found = read_parts(CheckpointFolder(store, f"checkpoints/{FOLDER}/"), manifest)
    assert tiling_problem((4, 4), found.tensors["a"].chunks) is None
