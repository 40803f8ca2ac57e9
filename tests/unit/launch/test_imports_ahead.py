from pathlib import Path

import pytest

from elastictrain.launch.imports_ahead import why_no_fork


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
