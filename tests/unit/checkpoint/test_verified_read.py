"""One wrong answer of a store condemns nothing: manifests, listings, short reads, whole files."""

from collections.abc import Callable, Iterator

import pytest

from elastictrain.checkpoint.folders import key_of
from elastictrain.checkpoint.manifest import ChunkRecord, FileRecord, digest_of
from elastictrain.checkpoint.retention import read_manifest
from elastictrain.checkpoint.verified_read import CheckpointFolder, DamagedFileError, read_chunks, verify_headers
from elastictrain.errors import ObjectNotFoundError
from elastictrain.storage.store import ObjectInfo
from tests.integration.checkpoint.test_checkpointer import key_ending, rejects, restored_step, save
from tests.unit.checkpoint.fakes import Bench, FakeStore

Garble = Callable[[bytes], bytes]


def flip_first(data: bytes) -> bytes:
    return bytes([data[0] ^ 1]) + data[1:]


def cut(data: bytes) -> bytes:
    return data[:-1]


def vanish(data: bytes) -> bytes:
    raise ObjectNotFoundError("404")


GARBLES = [flip_first, cut, vanish]


def garble_reads(store: FakeStore, end: str, *, garble: Garble, times: int) -> None:
    """The first `times` reads of objects whose key ends with `end` go wrong."""
    whole, left = store.read, iter(range(times))

    def read(key: str, *, start: int = 0, end_at: int | None = None, **where: int | None) -> bytes:
        data = whole(key, start=start, end=where.get("end", end_at))
        return garble(data) if key.endswith(end) and next(left, None) is not None else data

    def read_into(key: str, buffer: memoryview, *, start: int = 0) -> int:
        data = read(key, start=start, end=start + len(buffer))
        buffer[: len(data)] = data
        return len(data)

    store.read = read  # type: ignore[method-assign]
    store.read_into = read_into  # type: ignore[method-assign]


@pytest.mark.parametrize("garble", GARBLES)
def test_a_manifest_read_wrong_once_is_no_damage(garble: Garble) -> None:
    bench = Bench()
    save(bench, 1)
    garble_reads(bench.store, "manifest.json", garble=garble, times=1)
    assert restored_step(bench) == 1
    assert rejects(bench) == []


@pytest.mark.parametrize("garble", GARBLES)
def test_a_manifest_read_wrong_twice_is_rejected(garble: Garble) -> None:
    bench = Bench()
    save(bench, 1)
    save(bench, 2)
    garble_reads(bench.store, "000000002/manifest.json", garble=garble, times=2)
    assert restored_step(bench) == 1
    assert [event.file for event in rejects(bench)] == ["manifest.json"]


@pytest.mark.parametrize(("times", "step"), [(1, 2), (2, 1)])
@pytest.mark.parametrize("garble", GARBLES)
def test_a_part_read_wrong_once_is_no_damage(garble: Garble, times: int, step: int) -> None:
    bench = Bench()
    for saved in (1, 2):
        save(bench, saved, manifest_mb=0)
    garble_reads(bench.store, "part.json", garble=garble, times=times)
    assert restored_step(bench) == step
    assert [event.file for event in rejects(bench)] == ["inc1-r00000-part.json"] * (times - 1)


@pytest.mark.parametrize("garble", GARBLES)
def test_retention_reads_a_manifest_twice(garble: Garble) -> None:
    bench = Bench()
    save(bench, 1)
    garble_reads(bench.store, "manifest.json", garble=garble, times=1)
    assert read_manifest(bench.store, "step-000000001") is not None
    garble_reads(bench.store, "manifest.json", garble=garble, times=2)
    assert read_manifest(bench.store, "step-000000001") is None


DATA = bytes(range(200))
FILE = FileRecord("a.safetensors", len(DATA), digest_of(DATA), 50, digest_of(DATA[:50]))


@pytest.mark.parametrize("garble", GARBLES)
def test_a_header_is_read_twice(garble: Garble) -> None:
    bench = Bench()
    save(bench, 1)
    manifest = read_manifest(bench.store, "step-000000001")
    assert manifest is not None
    folder = CheckpointFolder(bench.store, "checkpoints/step-000000001/")
    garble_reads(bench.store, "000.safetensors", garble=garble, times=1)
    verify_headers(folder, manifest, files=manifest.files)
    garble_reads(bench.store, "000.safetensors", garble=garble, times=2)
    with pytest.raises(DamagedFileError, match=r"000\.safetensors"):
        verify_headers(folder, manifest, files=manifest.files)


@pytest.mark.parametrize(("times", "step"), [(1, 2), (1000, 1)])
def test_a_short_read_is_repeated_once(times: int, step: int) -> None:
    bench = Bench()
    save(bench, 1)
    save(bench, 2)
    whole, left = bench.store.read_into, iter(range(times))

    def read_into(key: str, buffer: memoryview, *, start: int = 0) -> int:
        count = whole(key, buffer, start=start)
        return count - 1 if "000000002" in key and next(left, None) is not None else count

    bench.store.read_into = read_into  # type: ignore[method-assign]
    assert restored_step(bench) == step
    assert len(rejects(bench)) == (step == 1)


def hide(bench: Bench, hidden: str) -> None:
    """Listings lack one object."""
    whole = bench.store.list

    def lagging(prefix: str = "") -> Iterator[ObjectInfo]:
        return (info for info in whole(prefix) if info.key != hidden)

    bench.store.list = lagging  # type: ignore[method-assign]


def test_a_listing_that_lags_condemns_nothing() -> None:
    bench = Bench()
    for step in (1, 2):
        save(bench, step)
    hide(bench, key_ending(bench, 2, "001.safetensors"))
    assert restored_step(bench) == 2
    assert rejects(bench) == []


def test_a_listing_that_lags_costs_no_checkpoint_that_must_be_kept() -> None:
    bench = Bench()
    for step in (4, 5, 6):
        save(bench, step, keep_last=1, keep_every=4)
    hide(bench, key_ending(bench, 4, "001.safetensors"))
    kept = {key for key in bench.store.objects if "step-000000004" in key}
    save(bench, 7, keep_last=1, keep_every=4)
    assert kept <= set(bench.store.objects)
    assert bench.folders() == {"step-000000004", "step-000000007"}


def test_a_file_that_is_gone_indeed_is_rejected() -> None:
    bench = Bench()
    save(bench, 1)
    save(bench, 2)
    name = key_ending(bench, 2, "001.safetensors").rpartition("/")[2]
    del bench.store.objects[key_of("step-000000002", name)]
    assert restored_step(bench) == 1
    assert [event.file for event in rejects(bench)] == [name]


class HalfMapped(FakeStore):
    """The file `here` lies in memory of this process."""

    def mapped(self, key: str, start: int, end: int) -> memoryview | None:
        return memoryview(self.read(key))[start:end] if key == "here" else None


@pytest.mark.parametrize("apart", [True, False])
def test_bytes_that_stay_are_taken_apart_from_those_that_do_not(apart: bool) -> None:
    contents = {"here": b"0123456789", "there": b"abcdef"}
    folder = CheckpointFolder(HalfMapped(contents), "")
    chunks = [
        ChunkRecord((0,), (end - start,), file, start, end - start, digest_of(data[start:end]))
        for file, data in contents.items()
        for start, end in ((0, 4), (4, len(data)))
    ]
    taken, mapped = list[bytes](), list[bytes]()

    def begin(_: ChunkRecord, data: memoryview) -> None:
        mapped.append(bytes(data))

    count = read_chunks(
        folder, chunks, take=lambda _, data: taken.append(bytes(data)), take_mapped=begin if apart else None, threads=1
    )
    assert count == 16
    here, there = [b"0123", b"456789"], [b"abcd", b"ef"]
    assert (taken, mapped) == ((there, here) if apart else (here + there, []))
