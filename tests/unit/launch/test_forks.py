import os
import signal
import socket
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.elastic.multiprocessing import api
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from elastictrain.errors import EXIT_BUG
from elastictrain.launch.forks import Fork, Forks, hand_out, why_no_fork


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


@pytest.fixture
def torchrun_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is handed out in a test is not for the next one."""
    monkeypatch.setattr(api, "get_subprocess_handler", api.get_subprocess_handler)


@pytest.mark.usefixtures("torchrun_as_before")
def test_the_torch_that_is_installed_takes_our_workers() -> None:
    before = api.get_subprocess_handler
    assert hand_out(Forks()) == ""
    assert api.get_subprocess_handler is not before


def other(entrypoint: str) -> None:
    """What takes something else."""


def takes_more(
    entrypoint: str, args: object, env: object, stdout: object, stderr: object, local_rank_id: int, where: object
) -> None:
    """What the class it makes does not take."""


@pytest.mark.usefixtures("torchrun_as_before")
@pytest.mark.parametrize(
    ("what", "name"),
    [
        ("module moved", "SubprocessHandler._popen"),
        ("class renamed", "SubprocessHandler._popen"),
        ("function renamed", "get_subprocess_handler"),
        ("function changed", "get_subprocess_handler"),
        ("function takes more", "get_subprocess_handler"),
        ("method renamed", "SubprocessHandler._popen"),
        ("method changed", "SubprocessHandler._popen"),
        ("other method changed", "SubprocessHandler.close"),
    ],
)
def test_a_torch_that_has_changed_starts_its_workers_itself(what: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    package = "torch.distributed.elastic.multiprocessing.subprocess_handler"
    match what:
        case "module moved":
            monkeypatch.setitem(sys.modules, package, None)
        case "class renamed":
            monkeypatch.delattr(f"{package}.SubprocessHandler")
        case "function renamed":
            monkeypatch.delattr(api, "get_subprocess_handler")
        case "function changed":
            monkeypatch.setattr(api, "get_subprocess_handler", other)
        case "function takes more":
            monkeypatch.setattr(api, "get_subprocess_handler", takes_more)
        case "method renamed":
            monkeypatch.delattr(SubprocessHandler, "_popen")
        case "method changed":
            monkeypatch.setattr(SubprocessHandler, "_popen", other)
        case "other method changed":
            monkeypatch.setattr(SubprocessHandler, "close", other)
    before = getattr(api, "get_subprocess_handler", None)
    changed = hand_out(Forks())
    assert torch.__version__ in changed
    assert name in changed
    assert getattr(api, "get_subprocess_handler", None) is before


class Taken(Forks):
    """Says what is taken from it, and has nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    def take(self, command: object, environment: object) -> None:
        self.asked += 1


@pytest.mark.usefixtures("torchrun_as_before")
def test_a_worker_whose_output_goes_to_an_unknown_place_is_started_by_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    forks, started = Taken(), []
    monkeypatch.setattr(SubprocessHandler, "_popen", lambda self, args, env: started.append(args))
    assert hand_out(forks) == ""
    one = api.get_subprocess_handler("program", (), {}, "", "", 0, None)
    assert (forks.asked, len(started)) == (1, 1)
    del one._stdout
    one._popen(("program",), {})
    assert (forks.asked, len(started)) == (1, 2)


class Worker(Fork):
    """One that ends after so many looks."""

    def __init__(self, looks: int) -> None:
        super().__init__(os.getpid(), socket.socket())
        self._looks = looks
        self.close()

    def poll(self) -> int | None:
        self._looks -= 1
        return -9 if self._looks < 0 else None


def handlers_of(*workers: Worker, forks: Forks, monkeypatch: pytest.MonkeyPatch) -> list[SubprocessHandler]:
    left = [*workers]
    monkeypatch.setattr(SubprocessHandler, "_popen", lambda self, args, env: left.pop(0))
    assert hand_out(forks) == ""
    return [api.get_subprocess_handler("program", (), {}, "", "", 0, None) for _ in workers]


@pytest.mark.usefixtures("torchrun_as_before")
def test_who_has_lost_another_worker_may_say_so_before_it_is_asked_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    asked: list[object] = []
    monkeypatch.setattr(SubprocessHandler, "close", lambda self, death_sig=None: asked.append((self.proc, death_sig)))
    quick, slow, slower = Worker(5), Worker(10_000), Worker(10_000)
    forks = Forks(clock=lambda: now[0], sleep=sleep)
    one, two, three = handlers_of(quick, slow, slower, forks=forks, monkeypatch=monkeypatch)
    one.close(signal.SIGTERM)
    assert (asked, now[0]) == ([], pytest.approx(0.1))
    two.close(signal.SIGTERM)
    assert now[0] == pytest.approx(0.5, abs=0.03)
    three.close(signal.SIGTERM)
    # They share the time.
    assert now[0] == pytest.approx(0.5, abs=0.03)
    assert asked == [(slow, signal.SIGTERM), (slower, signal.SIGTERM)]


@pytest.mark.usefixtures("torchrun_as_before")
def test_who_is_to_be_killed_is_killed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr(SubprocessHandler, "close", lambda self, death_sig=None: asked.append(death_sig))
    forks = Forks(sleep=lambda seconds: pytest.fail("it waits"))
    (one,) = handlers_of(Worker(10), forks=forks, monkeypatch=monkeypatch)
    one.close(signal.SIGKILL)
    assert asked == [signal.SIGKILL]


def test_an_end_that_somebody_else_was_told_of_is_not_taken_for_a_good_one() -> None:
    ours, theirs = socket.socketpair()
    theirs.close()
    # No process of ours, so that the kernel says of it what it says where SIGCHLD is ignored.
    fork = Fork(os.getppid(), ours)
    assert fork.poll() == EXIT_BUG
    assert fork.wait(0.0) == EXIT_BUG
    fork.close()
