"""Tar files that webdataset itself has written, read by index, compared with what webdataset reads."""

import io
import pickle
import shutil
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem

from elastictrain.data.__main__ import main
from elastictrain.data.samples import SampleReader
from elastictrain.data.sources import discover
from elastictrain.data.tar_index import INDEX_FILE, SAMPLES_FILE, make_index
from elastictrain.data.tar_shards import TarShards
from elastictrain.errors import DataError
from elastictrain.storage.opening import open_store

webdataset = pytest.importorskip("webdataset")

SAMPLES: list[dict[str, Any]] = [
    {"__key__": f"part.a/{number}", "bin": bytes([number]) * (300 * number), "txt": str(number), "Seg.PNG": b"p"}
    for number in range(7)
] + [{"__key__": f"{'long' * 40}/{number}", "bin": b"", "meta.json": {"number": number}} for number in range(7, 10)]


def write(path: Path, samples: list[dict[str, Any]]) -> None:
    with webdataset.TarWriter(str(path)) as writer:
        for sample in samples:
            writer.write(sample)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three tar files, and their index beside them."""
    shards = tmp_path / "shards"
    shards.mkdir()
    for number, (first, end) in enumerate([(0, 4), (4, 5), (5, 10)]):
        write(shards / f"web-{number}.tar", SAMPLES[first:end])
    assert main(["index", str(shards), "--out", str(shards), "--workers", "0"]) == 0
    return shards


def as_webdataset_reads(folder: Path) -> Iterator[dict[str, Any]]:
    for path in sorted(folder.glob("*.tar")):
        with path.open("rb") as stream:
            members = webdataset.tariterators.tar_file_expander([{"url": str(path), "stream": stream}])
            for sample in webdataset.tariterators.group_by_keys(members):
                yield {name: one for name, one in sample.items() if name not in ("__url__", "__local_path__")}


def test_each_sample_is_what_webdataset_reads(folder: Path) -> None:
    shards = TarShards(str(folder))
    expected = list(as_webdataset_reads(folder))
    assert len(shards) == len(expected) == 10
    for index in (9, 0, 4, *range(10)):
        assert shards[index] == expected[index]
    with pytest.raises(IndexError):
        shards[10]


def test_data_workers_and_another_place_read_the_same(folder: Path) -> None:
    shards = TarShards(str(folder))
    before = shards[3]
    sent = pickle.loads(pickle.dumps(shards))
    assert [sent[index] for index in range(10)] == [shards[index] for index in range(10)]
    moved = folder.rename(folder.with_name("moved"))
    assert TarShards(str(moved))[3] == before


def test_from_any_store(folder: Path) -> None:
    memory = fsspec.filesystem("memory")
    for path in folder.glob("*.tar"):
        memory.pipe_file(f"/tar-shards/{path.name}", path.read_bytes())
    sources = discover(["memory://tar-shards/*.tar"])
    # Elsewhere than the files: they are named in full.
    make_index(sources, open_store(str(folder.parent / "index")), workers=0)
    found = TarShards(str(folder.parent / "index"), transform=lambda sample: sample["__key__"])
    assert [found[index] for index in range(10)] == [one["__key__"] for one in SAMPLES]


class Meeting(LocalFileSystem):  # type: ignore[misc]
    """Not local to us. Reads of samples end when four of them are under way."""

    protocol = "meeting"
    barrier = threading.Barrier(4, timeout=10)

    def cat_file(self, path: str, *arguments: Any, **options: Any) -> Any:
        if path.endswith(".tar") and options:
            Meeting.barrier.wait()
        return super().cat_file(path, *arguments, **options)


def test_remote_samples_of_a_micro_batch_are_fetched_at_once(folder: Path) -> None:
    fsspec.register_implementation("meeting", Meeting, clobber=True)
    reader = SampleReader(TarShards(f"meeting://{folder}", transform=lambda sample: sample["__key__"]), seed=0)
    assert reader.read([5, 2, 9, 2, 3], first=0) == [SAMPLES[index]["__key__"] for index in (5, 2, 9, 2, 3)]


def test_members_that_are_no_part_of_a_sample(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.PAX_FORMAT, pax_headers={"comment": "of all"}) as tar:
        for name in ("README", "x", "x/1.txt", "x/LICENSE", "x/1.cls", ".hidden", "x/2.txt", "\N{SNOWMAN}.txt"):
            member = tarfile.TarInfo(name)
            member.type = tarfile.DIRTYPE if name == "x" else tarfile.REGTYPE
            member.size = 0 if name == "x" else 1
            tar.addfile(member, io.BytesIO(b"1"))
    main(["index", str(tmp_path / "a.tar"), "--out", str(tmp_path)])
    shards = TarShards(str(tmp_path))
    assert [shards[index] for index in range(len(shards))] == [
        {"__key__": "x/1", "txt": b"1", "cls": b"1"},
        {"__key__": "x/2", "txt": b"1"},
        {"__key__": "\N{SNOWMAN}", "txt": b"1"},
    ]


def compressed(path: Path) -> None:
    with tarfile.open(path, "w:gz") as tar:
        tar.add(__file__, "1.txt")


def twice(path: Path) -> None:
    with tarfile.open(path, "w") as tar:
        tar.add(__file__, "1.txt")
        tar.add(__file__, "1.TXT")


def without_samples(path: Path) -> None:
    with tarfile.open(path, "w") as tar:
        tar.add(__file__, "README")


def cut(path: Path) -> None:
    write(path, SAMPLES[:4])
    path.write_bytes(path.read_bytes()[:-12_000])


@pytest.mark.parametrize("make", [compressed, twice, without_samples, cut, lambda path: path.write_text("text")])
def test_what_is_no_shard_is_refused(make: Any, tmp_path: Path) -> None:
    path = tmp_path / "bad.tar"
    make(path)
    with pytest.raises(DataError, match=r"bad\.tar"):
        make_index(discover([str(path)]), open_store(str(tmp_path)), workers=0)
    assert not (tmp_path / INDEX_FILE).exists()


def replaced(path: Path) -> None:
    write(path, SAMPLES[6:0:-1])


def other_order(path: Path) -> None:
    """As many bytes; other samples begin elsewhere."""
    write(path, [SAMPLES[index] for index in (3, 2, 1, 0)])


def other_keys(path: Path) -> None:
    """As many bytes; in the place of one sample there are three."""
    three = [{"__key__": f"other/{number}", "txt": "1"} for number in range(3)]
    write(path, [SAMPLES[0], *three, *SAMPLES[2:4]])


def longer(path: Path) -> None:
    path.write_bytes(path.read_bytes() + bytes(10_240))


def garbled(path: Path) -> None:
    path.write_bytes(b"x" * path.stat().st_size)


def emptied(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


@pytest.mark.parametrize("change", [replaced, other_order, other_keys, Path.unlink, longer, garbled, emptied])
def test_a_shard_that_has_changed_is_refused(change: Any, folder: Path) -> None:
    change(folder / "web-0.tar")
    shards = TarShards(str(folder))
    with pytest.raises(DataError, match=r"web-0\.tar"):
        shards[1]
    assert shards[5]["__key__"] == SAMPLES[5]["__key__"]


@pytest.mark.parametrize("file", [INDEX_FILE, SAMPLES_FILE])
def test_a_damaged_index_is_refused(file: str, folder: Path) -> None:
    path = folder / file
    content = path.read_bytes()
    for damaged in (content[:-9], content[:40] + b"7" + content[41:], b"{}", b""):
        path.write_bytes(damaged)
        with pytest.raises(DataError):
            TarShards(str(folder))
    shutil.rmtree(folder)
    with pytest.raises(DataError):
        TarShards(str(folder))
