import json
from pathlib import Path

import pytest

from elastictrain.checkpoint.memory.layout import RankDigests, RankPart, layout_from_bytes
from elastictrain.checkpoint.memory.records import (
    compute_digests,
    load_digests,
    load_layout,
    read_file,
    store_digests,
    store_layout,
)
from elastictrain.checkpoint.memory.slot import Slot
from elastictrain.errors import InvalidCheckpointError
from tests.unit.checkpoint.memory.madeslots import facts_of, flip, layout_of, put

LAYOUT = layout_of()
DIGESTS = RankDigests(("a", "b"), ("c", "d"), ("e",))


def test_digests_do_not_depend_on_the_number_of_threads_and_show_every_change(tmp_path: Path) -> None:
    name = put(tmp_path, facts_of(4))
    slot = Slot.open(f"{tmp_path}/{name}")
    first = compute_digests(slot, LAYOUT, threads=1)
    assert compute_digests(slot, LAYOUT, threads=4) == first
    assert load_digests(slot.path, facts_of(4)) == first
    flip(tmp_path, name)
    changed = compute_digests(slot, LAYOUT, threads=2)
    assert changed.files != first.files
    assert sum(a != b for a, b in zip(changed.chunks, first.chunks, strict=True)) == 1
    slot.close()


@pytest.mark.parametrize("threads", [1, 4])
def test_digests_of_chunks_alone_are_the_same(threads: int, tmp_path: Path) -> None:
    slot = Slot.open(f"{tmp_path}/{put(tmp_path, facts_of(4))}")
    whole = compute_digests(slot, LAYOUT, threads=1)
    found = compute_digests(slot, LAYOUT, threads=threads, whole_files=False)
    assert (found.headers, found.chunks) == (whole.headers, whole.chunks)
    assert found.files == ("",) * len(whole.files)
    slot.close()


def test_digests_are_of_one_snapshot_only(tmp_path: Path) -> None:
    path = f"{tmp_path}/own-r00000-s0"
    store_digests(path, facts_of(4), DIGESTS)
    assert load_digests(path, facts_of(4)) == DIGESTS
    assert load_digests(path, facts_of(5)) is None
    assert load_digests(path, facts_of(4, incarnation="000002-bb")) is None
    assert load_digests(path, facts_of(4, world_size=2)) is None
    assert load_digests(f"{path}x", facts_of(4)) is None


def test_garbled_digests_are_none(tmp_path: Path) -> None:
    path = f"{tmp_path}/own-r00000-s0"
    store_digests(path, facts_of(4), DIGESTS)
    file = Path(f"{path}.digests")
    data = file.read_bytes()
    for place in range(len(data)):
        file.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        assert load_digests(path, facts_of(4)) is None, place
    for length in range(len(data)):
        file.write_bytes(data[:length])
        assert load_digests(path, facts_of(4)) is None, length


def test_a_layout_is_found_by_its_digest(tmp_path: Path) -> None:
    store_layout(str(tmp_path), LAYOUT)
    assert load_layout(str(tmp_path), LAYOUT.digest) == LAYOUT
    other = layout_of(1, world_size=2)
    with pytest.raises(InvalidCheckpointError, match=other.digest):
        load_layout(str(tmp_path), other.digest)
    (tmp_path / f"layout-{other.digest}.json").write_bytes(LAYOUT.to_bytes())
    with pytest.raises(InvalidCheckpointError, match=other.digest):
        load_layout(str(tmp_path), other.digest)


@pytest.mark.parametrize(
    "change",
    [
        {"items": [["w", "float99", [1], [0], [1]]]},
        {"items": [["w", "float32", [1], [0], [-1]]]},
        {"items": [["w", "float32", [1, 1], [0], [1]]]},
        {"items": [["w", "float32", [True], [0], [1]]]},
        {"items": [[7, "float32", [1], [0], [1]]]},
        {"items": 7},
        {"items": [["w", "float32", [2**70], [0], [2**70]]]},
        {"shard_bytes": 0},
        {"chunk_bytes": "x"},
        {"more": 1},
    ],
)
def test_no_layout(change: dict[str, object]) -> None:
    document = json.loads(LAYOUT.to_bytes()) | change
    with pytest.raises(InvalidCheckpointError, match="here: "):
        layout_from_bytes(json.dumps(document, separators=(",", ":")).encode(), where="here")
    with pytest.raises(InvalidCheckpointError, match="here: "):
        layout_from_bytes(LAYOUT.to_bytes()[:-1], where="here")


def test_digests_of_another_layout_make_no_manifest() -> None:
    with pytest.raises(InvalidCheckpointError, match="rank 3"):
        RankPart(3, LAYOUT, DIGESTS).written("i")


def test_files_lie_on_pages_and_do_not_overlap() -> None:
    ends = [start + file.size_bytes for start, file in zip(LAYOUT.starts, LAYOUT.template, strict=True)]
    assert len(LAYOUT.template) > 1
    assert all(start % 4096 == 0 for start in LAYOUT.starts)
    assert all(end <= start for end, start in zip(ends, [*LAYOUT.starts[1:], LAYOUT.size_bytes], strict=True))


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"old")
    with pytest.raises(OSError, match="too large"):
        read_file(f"{tmp_path}/file", max_bytes=2)
