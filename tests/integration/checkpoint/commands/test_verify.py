"""`verify` through the command line, and what it makes of transfers that garble."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import Event

import pytest
from msgspec import structs

from elastictrain.checkpoint.__main__ import main
from elastictrain.checkpoint.commands.survey import locate, survey
from elastictrain.checkpoint.commands.verify import check_file, read_and_judge
from elastictrain.checkpoint.folders import key_of, list_checkpoints
from elastictrain.checkpoint.layout import chunks_by_file
from elastictrain.errors import EXIT_OK, EXIT_STORAGE, EXIT_USAGE
from elastictrain.storage.store import ObjectInfo
from tests.integration.checkpoint.commands.made import flip, manifest_of, part_file, quarantine, save, shard, truncate
from tests.unit.checkpoint.fakes import FakeStore

FILE = "000001-aa-r00001-000.safetensors"
PART = "000001-aa-r00001-part.json"


@pytest.fixture(params=[0, 1], ids=["whole", "parts"])
def run(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """Two checkpoints of two ranks, and one that is being written."""
    for step in (10, 20):
        save(tmp_path, step, world_size=2, chunk_bytes=32, ranks_per_part=request.param)
    save(tmp_path, 30, uncommitted=True)
    return tmp_path


def newest(run: Path) -> Path:
    return run / "checkpoints" / "step-000000020"


def at_header(folder: Path) -> None:
    flip(shard(folder, 1), 12)


def at_tensor(folder: Path) -> None:
    manifest = manifest_of(folder)
    chunk = next(chunk for chunk in manifest.tensors["model.weight"].chunks if chunk.file == FILE)
    flip(shard(folder, 1), chunk.start + 5)


def verified(run: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, str]]:
    """The exit code, and the state of each checkpoint."""
    code = main(["verify", str(run), "--json", *arguments])
    return code, {one["name"]: one["state"] for one in json.loads(capsys.readouterr().out)["checkpoints"]}


def test_all_is_well(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verified(run, capsys) == (EXIT_OK, {"step-000000020": "valid"})
    assert verified(run, capsys, "--all", "--threads", "1") == (
        EXIT_OK,
        {"step-000000020": "valid", "step-000000010": "valid"},
    )
    assert main(["verify", str(run)]) == EXIT_OK
    (line,) = capsys.readouterr().out.splitlines()[1:]
    assert line.split()[:2] == ["step-000000020", "valid"]
    assert "2 files" in line
    assert "5 tensors" in line


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (at_header, "header"),
        (at_tensor, "model.weight"),
        (lambda folder: truncate(shard(folder, 1)), "bytes"),
        (lambda folder: shard(folder, 1).write_bytes(shard(folder, 1).read_bytes() + b"x"), "bytes"),
        (lambda folder: shard(folder, 1).unlink(), "gone"),
    ],
)
def test_the_bad_file_is_named_and_what_is_wrong_with_it(
    damage: Callable[[Path], None], problem: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(newest(run))
    before = sorted(run.rglob("*"))
    assert main(["verify", str(run), "--json"]) == EXIT_STORAGE
    (found,) = json.loads(capsys.readouterr().out)["checkpoints"]
    assert (found["name"], found["state"]) == ("step-000000020", "damaged")
    (bad,) = found["bad_files"]
    assert bad["name"] == FILE
    (only,) = bad["problems"]
    assert problem in only
    assert main(["verify", str(run)]) == EXIT_STORAGE
    assert f"\n    {FILE}: {only}\n" in capsys.readouterr().out
    assert main(["verify", str(run), "--step", "10"]) == EXIT_OK
    assert main(["verify", str(run), "--all"]) == EXIT_STORAGE
    assert sorted(run.rglob("*")) == before, "nothing is written"


def swap(folder: Path) -> None:
    """The parts of two ranks, which may have as many bytes."""
    first, second = part_file(folder).read_bytes(), part_file(folder, 1).read_bytes()
    part_file(folder).write_bytes(second)
    part_file(folder, 1).write_bytes(first)


@pytest.mark.parametrize(
    ("damage", "files"),
    [
        (lambda folder: flip(part_file(folder, 1), 100), (PART,)),
        (lambda folder: truncate(part_file(folder, 1)), (PART,)),
        (lambda folder: part_file(folder, 1).write_bytes(b""), (PART,)),
        (lambda folder: part_file(folder, 1).unlink(), (PART,)),
        (swap, (PART.replace("r00001", "r00000"), PART)),
    ],
    ids=["flipped", "cut", "empty", "gone", "swapped"],
)
def test_a_bad_part_is_named(
    damage: Callable[[Path], None], files: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (10, 20):
        save(tmp_path, step, world_size=2, ranks_per_part=1)
    damage(newest(tmp_path))
    assert main(["verify", str(tmp_path), "--json"]) == EXIT_STORAGE
    (found,) = json.loads(capsys.readouterr().out)["checkpoints"]
    assert (found["state"], tuple(sorted(bad["name"] for bad in found["bad_files"]))) == ("damaged", files)
    assert all(str(tmp_path) not in problem for bad in found["bad_files"] for problem in bad["problems"])
    # What works on a checkpoint takes the one before.
    assert main(["export", str(tmp_path), str(tmp_path / "out"), "--to", "safetensors"]) == EXIT_OK
    assert "step-000000010" in capsys.readouterr().err
    assert main(["prune", str(tmp_path), "--keep-last", "1", "--yes"]) == EXIT_STORAGE
    assert newest(tmp_path).is_dir()


def test_only_verify_reads_parts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path, 20, world_size=2, ranks_per_part=1)
    flip(part_file(newest(tmp_path)), 100)
    assert main(["ls", str(tmp_path), "--json"]) == EXIT_OK
    assert [row["state"] for row in json.loads(capsys.readouterr().out)["checkpoints"]] == ["valid"]


def test_several_problems_of_several_files(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    at_header(newest(run))
    at_tensor(newest(run))
    flip(shard(newest(run), 0))
    assert main(["verify", str(newest(run)), "--json"]) == EXIT_STORAGE
    (found,) = json.loads(capsys.readouterr().out)["checkpoints"]
    assert {bad["name"]: len(bad["problems"]) for bad in found["bad_files"]} == {
        "000001-aa-r00000-000.safetensors": 1,
        FILE: 2,
    }


def test_a_garbled_manifest(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip(newest(run) / "manifest.json", 300)
    assert main(["verify", str(run), "--json"]) == EXIT_STORAGE
    (found,) = json.loads(capsys.readouterr().out)["checkpoints"]
    assert (found["name"], found["state"], found["bad_files"]) == ("step-000000020", "damaged", [])
    assert found["reason"].startswith("manifest.json")


def test_a_quarantined_one_is_not_the_newest_but_counts_among_all(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quarantine(newest(run), "it was bad")
    assert verified(run, capsys) == (EXIT_OK, {"step-000000010": "valid"})
    quarantined = {"step-000000020": "quarantined"}
    assert verified(run, capsys, "--step", "20") == (EXIT_STORAGE, quarantined)
    assert verified(run, capsys, "--all") == (EXIT_STORAGE, {**quarantined, "step-000000010": "valid"})
    # Its files were read all the same, and are whole.
    assert main(["verify", str(run), "--step", "20"]) == EXIT_STORAGE
    assert "2 files" in capsys.readouterr().out


@pytest.mark.parametrize("below", ["", "/checkpoints/step-000000030"])
def test_nothing_to_verify(below: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path, 30, uncommitted=True)
    assert main(["verify", f"{tmp_path}{below}"]) == EXIT_STORAGE
    output = capsys.readouterr()
    assert not output.out
    assert f"{tmp_path}/checkpoints" in output.err


def test_one_checkpoint_has_no_others(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--all"], ["--step", "20"]):
        assert main(["verify", str(newest(run)), *arguments]) == EXIT_USAGE
        assert not capsys.readouterr().out


def test_a_checkpoint_that_the_run_deletes_meanwhile_is_not_damaged(run: Path) -> None:
    location = locate(str(run))
    chosen = survey(location, list_checkpoints(location.run).folders)
    shutil.rmtree(newest(run))
    verdicts = read_and_judge(chosen, threads=2, advance=lambda _: None)
    assert {verdict.name: verdict.gone for verdict in verdicts} == {
        "step-000000030": False,
        "step-000000020": True,
        "step-000000010": False,
    }


class Cutting(FakeStore):
    """Says that all is there, and then gives less."""

    def stat(self, key: str) -> ObjectInfo:
        found = super().stat(key)
        return ObjectInfo(key, found.size_bytes + 1, found.modified)


def test_a_file_that_ends_while_it_is_read(run: Path) -> None:
    manifest = manifest_of(newest(run))
    file, placed = manifest.files[1], chunks_by_file(manifest)[FILE]
    content = shard(newest(run), 1).read_bytes()
    store = Cutting({"x": content[:-1]})
    found = check_file(store, "x", file=file, placed=placed, advance=lambda _: None, stopped=Event())
    assert len(found) == 1
    assert str(len(content) - 1) in found[0]


class Garbling(FakeStore):
    """Flips a bit of the file when it is read, at each place in turn, and then no more."""

    places: list[int]

    def read_into(self, key: str, buffer: memoryview, *, start: int = 0) -> int:
        count = super().read_into(key, buffer, start=start)
        if self.places and start <= self.places[0] < start + count:
            buffer[self.places.pop(0) - start] ^= 1
        return count


@pytest.mark.parametrize(
    ("places", "problems"),
    [
        ([], 0),
        ([-1], 0),
        ([-1, -1], 1),
        ([-1, 12], 1),
    ],
    ids=["never", "once", "twice at one place", "at two places"],
)
def test_what_reads_wrong_once_is_read_again(places: list[int], problems: int, run: Path) -> None:
    folder = newest(run)
    manifest = manifest_of(folder)
    file = manifest.files[1]
    store = Garbling({key_of("x", FILE): shard(folder, 1).read_bytes()})
    store.places = [place % file.size_bytes for place in places]
    found = check_file(
        store,
        key_of("x", FILE),
        file=file,
        placed=chunks_by_file(manifest)[FILE],
        advance=lambda _: None,
        stopped=Event(),
    )
    assert len(found) == problems
    assert not store.places
    # The one problem of a file that reads wrong in another place each time is of no place.
    assert (len(set(places)) == 2) == any(problem.startswith("reads differently") for problem in found)


def test_a_file_of_which_terabytes_are_claimed_costs_no_memory(run: Path) -> None:
    manifest, huge = manifest_of(newest(run)), 1 << 60
    file = structs.replace(manifest.files[1], size_bytes=huge)
    first, *_ = chunks_by_file(manifest)[FILE]
    placed = [replace(first, chunk=structs.replace(first.chunk, size_bytes=huge - first.chunk.start))]
    store = FakeStore({"x": shard(newest(run), 1).read_bytes()})
    found = check_file(store, "x", file=file, placed=placed, advance=lambda _: None, stopped=Event())
    assert len(found) == 1
    assert str(huge) in found[0]
