"""Links and FIFOs in the folder of checkpoints: nothing is read, written or deleted through them."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from elastictrain.checkpoint.__main__ import main
from elastictrain.checkpoint.folders import clear_target, list_checkpoints
from elastictrain.errors import EXIT_OK, EXIT_STORAGE, PermanentStorageError
from elastictrain.storage.opening import open_store
from tests.integration.checkpoint.commands.made import save


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step in (10, 20, 30):
        save(tmp_path / "run", step)
    return tmp_path / "run"


@pytest.fixture
def precious(tmp_path: Path) -> Path:
    """A folder of somebody else, with what looks like a checkpoint in it."""
    folder = save(tmp_path / "other", 5)
    (folder / "notes.txt").write_text("precious")
    return folder


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def step_5(run: Path) -> Path:
    return run / "checkpoints/step-000000005"


def linked_folder(run: Path, precious: Path) -> None:
    step_5(run).symlink_to(os.path.relpath(precious, run / "checkpoints"))


def linked_remnant(run: Path, precious: Path) -> None:
    linked_folder(run, precious)
    (precious / "manifest.json").unlink()


def linked_manifest(run: Path, precious: Path) -> None:
    step_5(run).mkdir()
    (step_5(run) / "manifest.json").symlink_to(precious / "manifest.json")


def fifo_as_manifest(run: Path, precious: Path) -> None:
    step_5(run).mkdir()
    (step_5(run) / "000001-aa-r00000-000.safetensors").write_bytes(b"x")
    os.mkfifo(step_5(run) / "manifest.json")


def file_as_folder(run: Path, precious: Path) -> None:
    step_5(run).write_bytes(b"x")


PLANTED = (linked_folder, linked_remnant, linked_manifest, fifo_as_manifest, file_as_folder)


@pytest.mark.parametrize("plant", PLANTED)
def test_prune_leaves_it_alone(plant: Callable[[Path, Path], None], run: Path, precious: Path) -> None:
    plant(run, precious)
    before = content(precious)
    assert main(["prune", str(run), "--keep-last", "1", "--yes"]) == EXIT_OK
    assert content(precious) == before
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step-000000005", "step-000000030"]


@pytest.mark.parametrize("plant", PLANTED)
def test_a_save_takes_another_folder(plant: Callable[[Path, Path], None], run: Path, precious: Path) -> None:
    plant(run, precious)
    before = content(precious)
    store = open_store(str(run))
    assert clear_target(store, list_checkpoints(store), step=5) == "step-000000005-2"
    assert content(precious) == before


@pytest.mark.parametrize("kind", ["file", "link", "fifo"])
def test_a_save_fails_where_no_folder_can_be_used(kind: str, run: Path, precious: Path) -> None:
    (run / "checkpoints").rename(run.parent / "moved")
    listing = list_checkpoints(open_store(str(run)))
    if kind == "file":
        (run / "checkpoints").write_bytes(b"")
    elif kind == "link":
        (run / "checkpoints").symlink_to(precious)
    else:
        os.mkfifo(run / "checkpoints")
    with pytest.raises(PermanentStorageError):
        clear_target(open_store(str(run)), listing, step=5)


@pytest.mark.parametrize("name", ["manifest.json", "000001-aa-r00000-000.safetensors", "quarantine.json"])
@pytest.mark.parametrize("kind", ["fifo", "link"])
def test_commands_pass_it_over(name: str, kind: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = run / "checkpoints/step-000000030" / name
    there = file.exists()
    if there:
        file.rename(tmp_path / "moved")
    if kind == "fifo":
        os.mkfifo(file)
    else:
        file.symlink_to(tmp_path / "moved")
    assert main(["ls", str(run)]) == EXIT_OK
    (taken,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith(">  "))
    assert ("step-000000020" in taken) is there
    assert main(["verify", str(run), "--step", "30"]) == (EXIT_STORAGE if there else EXIT_OK)
    assert main(["verify", str(run), "--all"]) == (EXIT_STORAGE if "safetensors" in name else EXIT_OK)


def test_a_folder_of_checkpoints_that_is_a_link_is_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "checkpoints").rename(run.parent / "moved")
    (run / "checkpoints").symlink_to("../moved")
    for command in ("ls", "verify"):
        assert main([command, str(run)]) == EXIT_STORAGE
        assert f"{run}/checkpoints" in capsys.readouterr().err


def test_a_subfolder_of_a_checkpoint_is_not_ours(run: Path) -> None:
    kept = run / "checkpoints/step-000000010/mine/notes.txt"
    kept.parent.mkdir()
    kept.write_text("precious")
    assert main(["prune", str(run), "--keep-last", "1", "--yes"]) == EXIT_OK
    assert [path.name for path in (run / "checkpoints/step-000000010").iterdir()] == ["mine"]
    assert kept.read_text() == "precious"
    assert main(["ls", str(run)]) == EXIT_OK
