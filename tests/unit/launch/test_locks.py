import os
from pathlib import Path

import pytest

from elastictrain.errors import HostUnfitError, UsageError
from elastictrain.launch.locks import lock_run


def test_a_second_launcher_of_a_run_is_refused_and_told_who_holds_it(tmp_path: Path) -> None:
    first = lock_run("s3://bucket/run", folder=str(tmp_path))
    first.sign("h1-12ab")
    with pytest.raises(UsageError, match=rf"s3://bucket/run .*process {os.getpid()}\)"):
        lock_run("s3://bucket/run", folder=str(tmp_path))
    assert lock_run("s3://bucket/other", folder=str(tmp_path)).before == ""


def test_who_comes_after_learns_who_it_was(tmp_path: Path) -> None:
    first = lock_run("runs/a", folder=str(tmp_path))
    assert first.before == ""
    first.sign("h1-12ab")
    first.close()
    second = lock_run("runs/a", folder=str(tmp_path))
    assert second.before == "h1-12ab"
    second.sign("h")
    second.close()
    assert lock_run("runs/a", folder=str(tmp_path)).before == "h"


@pytest.mark.parametrize("garbage", [b"", b"{", b"[]", b'"x"', b"\xff"])
def test_garbage_in_the_file_is_nobody(garbage: bytes, tmp_path: Path) -> None:
    lock_run("runs/a", folder=str(tmp_path)).close()
    (path,) = tmp_path.iterdir()
    path.write_bytes(garbage)
    assert lock_run("runs/a", folder=str(tmp_path)).before == ""


@pytest.mark.parametrize("other", ["{0}/run/", "{0}/link", "{0}/x/../run"])
def test_other_names_of_the_same_run_are_the_same_run(other: str, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "run")
    lock_run(f"{tmp_path}/run", folder=str(tmp_path))
    with pytest.raises(UsageError):
        lock_run(other.format(tmp_path), folder=str(tmp_path))


def test_a_trailing_slash_makes_no_other_bucket_folder(tmp_path: Path) -> None:
    lock_run("s3://bucket/run", folder=str(tmp_path))
    with pytest.raises(UsageError):
        lock_run("s3://bucket/run/", folder=str(tmp_path))


def test_a_folder_that_cannot_be_used_is_told(tmp_path: Path) -> None:
    with pytest.raises(HostUnfitError, match=r"/none/elastictrain-\d+-launch-\w+ "):
        lock_run("runs/a", folder=f"{tmp_path}/none")


@pytest.mark.parametrize("kind", ["fifo", "link", "open to others"])
def test_a_lock_file_that_is_taken_is_not_used(tmp_path: Path, kind: str) -> None:
    lock_run("runs/a", folder=str(tmp_path)).close()
    (path,) = tmp_path.iterdir()
    match kind:
        case "fifo":
            path.unlink()
            os.mkfifo(path, 0o600)
        case "link":
            path.rename(tmp_path / "elsewhere")
            path.symlink_to(tmp_path / "elsewhere")
        case _:
            path.chmod(0o666)
    with pytest.raises(HostUnfitError, match=rf"{path}.*TMPDIR"):
        lock_run("runs/a", folder=str(tmp_path))


def test_folders_that_killed_launchers_of_the_run_left_here_are_removed_and_no_others(tmp_path: Path) -> None:
    parent = tmp_path / "tmp"
    parent.mkdir()
    other = lock_run("runs/other", folder=str(parent))
    kept = other.make_folder()
    first = lock_run("runs/x", folder=str(parent))
    left = first.make_folder()
    (left / "generation-7").mkdir()
    first.close()
    second = lock_run("runs/x", folder=str(parent))
    fresh = second.make_folder()
    second.close()
    other.close()
    assert {path for path in parent.iterdir() if path.is_dir()} == {kept, fresh}
    assert fresh != left
    assert fresh.stat().st_mode & 0o777 == 0o700


def test_a_link_in_the_place_of_such_a_folder_is_not_followed(tmp_path: Path) -> None:
    parent, precious = tmp_path / "tmp", tmp_path / "precious"
    parent.mkdir()
    precious.mkdir()
    (precious / "kept").touch()
    lock = lock_run("runs/x", folder=str(parent))
    folder = lock.make_folder()
    folder.rename(tmp_path / "moved")
    folder.symlink_to(precious)
    lock.make_folder()
    lock.close()
    assert (precious / "kept").exists()
