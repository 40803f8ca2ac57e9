"""`prune`: what goes, what stays, and when nothing is touched."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from elastictrain.checkpoint.__main__ import main
from elastictrain.checkpoint.commands import prune as prune_module
from elastictrain.checkpoint.commands.prune import prune_checkpoints
from elastictrain.checkpoint.lineage import Lineage, ResumeOrigin
from elastictrain.checkpoint.retention import Deletion, delete_folder
from elastictrain.errors import EXIT_OK, EXIT_STORAGE, EXIT_USAGE, InvalidCheckpointError
from elastictrain.storage.opening import open_store
from tests.integration.checkpoint.commands.made import as_version_3, flip, folders, quarantine, save, shard, truncate

STEPS = (10, 20, 30, 40, 50)


def name(step: int) -> str:
    return f"step-{step:09d}"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Five checkpoints, the remnant of a save between them, and a save that is going on."""
    for step in STEPS:
        save(tmp_path, step, world_size=2)
    save(tmp_path, 25, uncommitted=True)
    save(tmp_path, 60, uncommitted=True)
    return tmp_path


def prune(run: Path, *arguments: str) -> int:
    return main(["prune", str(run), *arguments])


def test_what_goes_and_what_stays(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert prune(run, "--keep-last", "2", "--keep-every", "20", "--yes") == EXIT_OK
    assert folders(run) == [name(step) for step in (20, 40, 50, 60)]
    out = capsys.readouterr().out
    assert "3 folders" in out.splitlines()[-1]
    rows = {line.split()[0]: line.split()[3] for line in out.splitlines() if line.startswith("  step-")}
    assert rows == {name(10): "checkpoint", name(25): "remnant", name(30): "checkpoint"}


def test_a_dry_run_deletes_nothing_and_tells_the_bytes(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(run.rglob("*"))
    size_bytes = sum(file.stat().st_size for step in (10, 20, 25) for file in (run / "checkpoints" / name(step)).iterdir())
    assert prune(run, "--keep-last", "3", "--dry-run") == EXIT_OK
    assert sorted(run.rglob("*")) == before
    out = capsys.readouterr().out
    assert [line.split()[0] for line in out.splitlines()[2:5]] == [name(step) for step in (10, 20, 25)]
    for figure in ("3 folders", f"{size_bytes / 1000:.1f} kB", "4 folders", name(50)):
        assert figure in out.splitlines()[-1]


def test_nothing_to_do(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert prune(run, "--keep-last", "2", "--yes") == EXIT_OK
    capsys.readouterr()
    assert prune(run, "--keep-last", "2", "--yes") == EXIT_OK
    assert capsys.readouterr().out.endswith("nothing to delete\n")


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda folder: flip(shard(folder, 1)), "r00001-000.safetensors: model.bias in bytes"),
        (lambda folder: flip(shard(folder), 12), "r00000-000.safetensors: its header does not have its digest"),
        (lambda folder: truncate(shard(folder)), "r00000-000.safetensors must have"),
        (lambda folder: shard(folder).unlink(), "r00000-000.safetensors is gone"),
        (lambda folder: flip(folder / "manifest.json", 200), "manifest.json: "),
    ],
)
def test_nothing_goes_if_the_newest_is_damaged(
    damage: Callable[[Path], object], says: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(run / "checkpoints" / name(50))
    before = sorted(run.rglob("*"))
    assert prune(run, "--keep-last", "1", "--yes") == EXIT_STORAGE
    assert sorted(run.rglob("*")) == before
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(f"elastictrain: {run}/checkpoints/{name(50)} is the newest checkpoint and must be whole")
    assert says in error
    assert error.endswith("nothing was deleted")


def test_damaged_and_quarantined_ones_stay_until_they_are_oldest(run: Path) -> None:
    quarantine(run / "checkpoints" / name(50))
    truncate(shard(run / "checkpoints" / name(30)))
    assert prune(run, "--keep-last", "2", "--yes") == EXIT_OK
    assert folders(run) == [name(step) for step in (20, 30, 40, 50, 60)]
    assert prune(run, "--keep-last", "1", "--yes") == EXIT_OK
    assert folders(run) == [name(step) for step in (40, 50, 60)]


def test_no_valid_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path, 10, uncommitted=True)
    quarantine(save(tmp_path, 5))
    assert prune(tmp_path, "--keep-last", "1", "--yes") == EXIT_STORAGE
    assert not capsys.readouterr().out
    assert folders(tmp_path) == [name(5), name(10)]


def test_it_does_not_delete_unasked(run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(run.rglob("*"))
    assert prune(run, "--keep-last", "1") == EXIT_USAGE
    assert "--yes" in capsys.readouterr().err
    monkeypatch.setattr(prune_module, "can_ask", lambda: True)
    for answer in ("n\n", "\n", ""):
        reading, writing = os.pipe()
        os.write(writing, answer.encode())
        os.close(writing)
        with os.fdopen(reading) as typed:
            monkeypatch.setattr("sys.stdin", typed)
            assert prune(run, "--keep-last", "1") == EXIT_OK
        assert "[y/N]" in capsys.readouterr().err
    assert sorted(run.rglob("*")) == before


def test_one_checkpoint_is_no_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert prune(run / "checkpoints" / name(10), "--keep-last", "1", "--yes") == EXIT_USAGE
    assert len(folders(run)) == 7


def answer_with(monkeypatch: pytest.MonkeyPatch, ask: Callable[[str], bool]) -> None:
    monkeypatch.setattr(prune_module, "can_ask", lambda: True)
    monkeypatch.setattr(prune_module, "ask", ask)


def test_only_what_was_shown_goes(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run saves while the person thinks."""

    def ask(question: str) -> bool:
        save(run, 60, attempt=2)
        save(run, 70)
        return True

    answer_with(monkeypatch, ask)
    prune_checkpoints(str(run), keep_last=2, keep_every=0)
    assert folders(run) == [*(name(step) for step in (40, 50)), name(60), f"{name(60)}-2", name(70)]


def test_a_remnant_that_is_committed_meanwhile_stays(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = run / "checkpoints" / name(25)
    (file,) = folder.iterdir()
    remnant = Deletion(folder.name, (file.name,), committed=False)
    manifest = folder / "manifest.json"
    manifest.write_text("of a predecessor that was thought dead")
    assert not delete_folder(open_store(str(run)), remnant)
    assert file.exists()
    assert folder.name in caplog.text
    manifest.unlink()
    assert delete_folder(open_store(str(run)), remnant)
    assert not folder.exists()


def test_what_this_release_cannot_read_stays(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    as_version_3(run / "checkpoints" / name(20))
    assert prune(run, "--keep-last", "1", "--yes") == EXIT_OK
    assert folders(run) == [name(step) for step in (20, 50, 60)]
    as_version_3(run / "checkpoints" / name(50))
    assert prune(run, "--keep-last", "1", "--yes") == EXIT_STORAGE
    assert name(50) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda folder: truncate(shard(folder)), "000001-aa-r00000-000.safetensors"),
        (lambda folder: (folder / "manifest.json").unlink(), "meanwhile"),
        (shutil.rmtree, "deleted"),
    ],
)
def test_the_newest_is_damaged_meanwhile(
    damage: Callable[[Path], object], says: str, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(question: str) -> bool:
        damage(run / "checkpoints" / name(50))
        return True

    answer_with(monkeypatch, ask)
    with pytest.raises(InvalidCheckpointError, match=f"{name(50)} .* {says}"):
        prune_checkpoints(str(run), keep_last=1, keep_every=0)
    assert set(folders(run)) >= {name(step) for step in (10, 20, 25, 30, 40, 60)}


@pytest.fixture
def overlapping(tmp_path: Path) -> Path:
    """Others went on from step 30, and committed the newest on the line; what was given up committed 40 and 50 later."""
    for step in STEPS:
        save(tmp_path, step)
    save(tmp_path, 36, incarnation="000002-bb")
    lineage = Lineage(open_store(str(tmp_path)))
    lineage.write(ResumeOrigin(1, "000001-aa", 0, ""))
    lineage.write(ResumeOrigin(2, "000002-bb", 30, "000001-aa"))
    return tmp_path


def test_what_nobody_went_on_from_is_not_kept_in_the_place_of_others(overlapping: Path) -> None:
    assert prune(overlapping, "--keep-last", "2", "--yes") == EXIT_OK
    assert folders(overlapping) == [name(step) for step in (30, 36, 40, 50)]
    # What is newer than the newest on the line stays, whole or not.
    flip(shard(overlapping / "checkpoints" / name(50)))
    (overlapping / "checkpoints" / name(40) / "manifest.json").write_text("{")
    assert prune(overlapping, "--keep-last", "1", "--yes") == EXIT_OK
    assert folders(overlapping) == [name(step) for step in (36, 40, 50)]


def test_what_nobody_went_on_from_goes_when_it_is_oldest_and_says_so(
    overlapping: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(overlapping, 60, incarnation="000002-bb")
    assert prune(overlapping, "--keep-last", "2", "--keep-every", "40", "--dry-run") == EXIT_OK
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[2:-1]] == [name(step) for step in (10, 20, 30)]
    assert prune(overlapping, "--keep-last", "1", "--yes") == EXIT_OK
    assert folders(overlapping) == [name(60)]
    rows = [line for line in capsys.readouterr().out.splitlines() if "others continued without it" in line]
    assert [row.split()[0] for row in rows] == [name(40), name(50)]


def test_what_nobody_went_on_from_counts_where_nothing_else_is_left(overlapping: Path) -> None:
    for step in (10, 20, 30, 36):
        shutil.rmtree(overlapping / "checkpoints" / name(step))
    assert prune(overlapping, "--keep-last", "1", "--yes") == EXIT_OK
    assert folders(overlapping) == [name(50)]
