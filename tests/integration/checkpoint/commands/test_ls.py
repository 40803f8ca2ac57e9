"""`ls` through the command line."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from elastictrain.checkpoint.__main__ import main
from elastictrain.checkpoint.commands.survey import locate, show_checkpoints, survey
from elastictrain.checkpoint.folders import list_checkpoints
from elastictrain.checkpoint.memory.folder import SlotName, make_private, run_folder, run_name
from elastictrain.checkpoint.memory.slot import VERSION, Slot, SnapshotFacts
from elastictrain.errors import EXIT_OK, EXIT_STORAGE, EXIT_USAGE
from tests.integration.checkpoint.commands.made import CREATED, as_version_3, flip, quarantine, save, shard, truncate


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """One checkpoint in each state."""
    save(tmp_path, 80, uncommitted=True)
    quarantine(save(tmp_path, 70), f"{tmp_path}/checkpoints/step-000000070/x.safetensors: bytes [3, 4) are wrong")
    shard(save(tmp_path, 60)).unlink()
    truncate(shard(save(tmp_path, 50)))
    flip(save(tmp_path, 40) / "manifest.json")
    save(tmp_path, 30, world_size=3)
    as_version_3(save(tmp_path, 20))
    save(tmp_path, 10)
    return tmp_path


def listed(url: Path, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    assert main(["ls", str(url), "--json"]) == EXIT_OK
    document = json.loads(capsys.readouterr().out)
    assert document["url"].endswith("/checkpoints")
    found: list[dict[str, Any]] = document["checkpoints"]
    return found


def test_states_of_all(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = listed(run, capsys)
    # A reason begins with what it is about: the file, without the URL of the folder.
    file = "000001-aa-r00000-000.safetensors"
    assert {one["step"]: (one["state"], one["reason"].split(" ")[0]) for one in found} == {
        80: ("uncommitted", "being"),
        70: ("quarantined", "x.safetensors:"),
        60: ("damaged", file),
        50: ("damaged", file),
        40: ("damaged", "manifest.json:"),
        30: ("valid", ""),
        20: ("unknown format", "manifest.json:"),
        10: ("valid", ""),
    }
    assert [one["step"] for one in found] == [80, 70, 60, 50, 40, 30, 20, 10], "newest first"
    assert [one["step"] for one in found if one["resume"]] == [30]


def test_a_folder_that_was_moved(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "checkpoints" / "step-000000030").rename(run / "checkpoints" / "step-000000031")
    (found,) = listed(run / "checkpoints" / "step-000000031", capsys)
    assert (found["state"], found["reason"].split(" ")[0]) == ("damaged", "manifest.json")
    assert "30" in found["reason"]


def test_folders_that_the_run_deletes_meanwhile_are_left_out(run: Path) -> None:
    location = locate(str(run))
    folders = list_checkpoints(location.run).folders
    shutil.rmtree(run / "checkpoints" / "step-000000030")
    assert [one.facts.step for one in survey(location, folders)] == [80, 70, 60, 50, 40, 20, 10]


def test_facts_of_one(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run / "checkpoints" / "step-000000030"
    (found,) = listed(folder, capsys)
    files = list(folder.iterdir())
    assert found["modified"] == max(file.stat().st_mtime for file in files)
    del found["modified"]
    assert found == {
        "name": "step-000000030",
        "step": 30,
        "tier": "storage",
        "state": "valid",
        "reason": "",
        "created": CREATED + 30,
        "bytes": sum(file.stat().st_size for file in files),
        "world_size": 3,
        "files": 3,
        "signed": False,
        "resume": True,
    }


def test_the_table(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    now = CREATED + 30 + 7200
    assert show_checkpoints(str(run), as_json=False, memory_dir="/nowhere", clock=lambda: now) == EXIT_OK
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{run}/checkpoints"
    assert lines[1].split() == ["name", "step", "age", "size", "world", "files", "tier", "state"]
    (marked,) = [line for line in lines[2:-1] if line.startswith(">")]
    assert marked.split() == [">", "step-000000030", "30", "2", "h", "4.2", "kB", "3", "3", "storage", "valid"]
    assert len({line.index("storage") for line in lines[2:-1]}) == 1, "columns are aligned"
    assert lines[-1].startswith("> a start resumes from this one")


def test_nothing_to_resume_from_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path, 10, uncommitted=True)
    assert [one["resume"] for one in listed(tmp_path, capsys)] == [False]
    assert main(["ls", str(tmp_path)]) == EXIT_OK
    # The URL, the header, the row, and that.
    assert len(capsys.readouterr().out.splitlines()) == 4


def test_snapshots_of_this_machine_are_rows_too(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    memory = tmp_path / "memory"
    memory.mkdir()
    for index, (step, ranks) in enumerate(((77, (0, 1)), (78, (1,)), (70, (0, 1)))):
        for rank in ranks:
            take_snapshot(memory, run, step=step, rank=rank, world_size=2, index=index)
    assert main(["ls", str(run / "checkpoints"), "--memory-dir", str(memory), "--json"]) == EXIT_OK
    listed = json.loads(capsys.readouterr().out)["checkpoints"]
    assert [(one["step"], one["tier"]) for one in listed][:5] == [
        (80, "storage"),
        (78, "memory"),
        (77, "memory"),
        (70, "memory"),
        (70, "storage"),
    ]
    assert main(["ls", str(run / "checkpoints"), "--memory-dir", str(memory)]) == EXIT_OK
    lines = capsys.readouterr().out.splitlines()
    found = [line for line in lines if "memory" in line.split()]
    assert [line.startswith(">") for line in found] == [False, True, False]
    assert "partial:" in found[0].split()
    assert found[1].split()[-2:] == ["memory", "valid"]


def take_snapshot(memory: Path, run: Path, *, step: int, rank: int, world_size: int, index: int) -> None:
    folder = run_folder(str(memory), str(run))
    make_private(folder)
    slot = Slot.make(f"{folder}/{SlotName('own', rank, index)}", size_bytes=4096)
    slot.begin()
    slot.complete(
        SnapshotFacts(
            VERSION,
            run_name(str(run)),
            "000001-aa",
            step,
            world_size,
            rank,
            "layout",
            "config",
            float(step),
            "",
            {"step": step},
        )
    )
    slot.close()


def test_a_run_without_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.yaml").touch()
    assert main(["ls", str(tmp_path)]) == EXIT_OK
    assert capsys.readouterr().out.splitlines()[0] == f"{tmp_path}/checkpoints"
    assert listed(tmp_path, capsys) == []


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["ls", "{}/nowhere"], EXIT_STORAGE, "{}/nowhere must be the folder of a run"),
        (["ls", "{}/checkpoints/step-000000099"], EXIT_STORAGE, "{}/checkpoints must hold step-000000099, but does not"),
        (["ls", "{}/config.yaml"], EXIT_STORAGE, "Not a directory"),
        (
            ["verify", "{}", "--step", "11"],
            EXIT_STORAGE,
            "must hold a checkpoint of step 11, but does not; there is step 10, 20",
        ),
        (["diff", "{}", "{}/nowhere"], EXIT_STORAGE, "{}/nowhere must be the folder of a run"),
    ],
)
def test_one_line_says_what_is_wrong(
    arguments: list[str], code: int, says: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "config.yaml").touch()
    assert main([argument.format(run) for argument in arguments]) == code
    error = capsys.readouterr().err
    assert error.startswith("elastictrain: ")
    assert says.format(run) in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["ls"],
        ["prune", "x"],
        ["prune", "x", "--keep-last", "0"],
        ["verify", "x", "--all", "--step", "1"],
        ["export", "x", "y", "--to", "z"],
    ],
)
def test_wrong_command_lines(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == EXIT_USAGE
    assert capsys.readouterr().err.startswith("usage: ")
