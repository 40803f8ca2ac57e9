import os
from pathlib import Path

import pytest

from elastictrain.launch.imports_ahead import folders_resolved_once, why_no_fork


def process(folder: Path, *, threads: int = 1, files: tuple[str, ...] = ("/dev/null", "socket:[12]")) -> Path:
    """What the kernel shows of one."""
    for thread in range(threads):
        (folder / "task" / str(thread)).mkdir(parents=True)
    (folder / "fd").mkdir()
    for number, file in enumerate(files):
        (folder / "fd" / str(number)).symlink_to(file)
    return folder


def test_a_process_with_one_thread_and_no_device_may_fork(tmp_path: Path) -> None:
    assert why_no_fork(process(tmp_path)) == ""


def test_a_process_with_threads_may_not_fork(tmp_path: Path) -> None:
    assert "2 threads" in why_no_fork(process(tmp_path, threads=2))


@pytest.mark.parametrize("device", ["/dev/nvidiactl", "/dev/nvidia0", "/dev/nvidia-uvm", "/dev/kfd"])
def test_a_process_with_a_device_may_not_fork(device: str, tmp_path: Path) -> None:
    assert device in why_no_fork(process(tmp_path, files=("/dev/null", device)))


def test_what_is_no_link_any_more_is_no_device(tmp_path: Path) -> None:
    folder = process(tmp_path)
    (folder / "fd" / "7").touch()
    assert why_no_fork(folder) == ""


def test_where_the_kernel_shows_nothing_nobody_forks(tmp_path: Path) -> None:
    assert why_no_fork(tmp_path)


def test_folders_are_resolved_once_and_links_as_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, link = tmp_path / "folder", tmp_path / "link"
    folder.mkdir()
    link.symlink_to(folder)
    (folder / "file").touch()
    (folder / "other").symlink_to("file")
    names = [str(link / "file"), str(link / "other"), str(link), f"{link}/", f"{link}/.", f"{link}/..", "x", "", f"{link}/none"]
    expected, asked = [os.path.realpath(name) for name in names], list[object]()
    lstat = os.lstat
    monkeypatch.setattr(os, "lstat", lambda path: (asked.append(path), lstat(path))[1])
    with folders_resolved_once():
        assert [os.path.realpath(name) for name in names] == expected
        asked.clear()
        assert os.path.realpath(link / "file") == expected[0]
    assert len(asked) == 1
    with pytest.raises(FileNotFoundError):
        os.path.realpath(link / "none", strict=True)
