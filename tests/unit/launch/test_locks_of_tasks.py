import os
import re
import secrets
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastictrain.errors import HostUnfitError
from elastictrain.launch.locks import acquire_task_lock, wait_for_launcher

QUIET: list[str] = []
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Locks of its own, short turns, and the handlers as they were."""
    monkeypatch.setattr("elastictrain.launch.locks.tempfile.gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr("elastictrain.launch.locks._TURN_S", 0.005)
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def job() -> str:
    return secrets.token_hex(4)


def test_who_is_idle_ends_with_the_launcher(job: str) -> None:
    descriptor = acquire_task_lock(job, print_line=QUIET.append)
    ended_s: list[float] = []

    def end() -> None:
        time.sleep(0.1)
        ended_s.append(time.monotonic())
        os.close(descriptor)

    ending = threading.Thread(target=end)
    ending.start()
    assert wait_for_launcher(job, comes_s=0.01) == 0
    assert time.monotonic() >= ended_s[0]
    ending.join()


def test_a_launcher_may_come_a_little_later(job: str) -> None:
    came: list[float] = []

    def launch() -> None:
        time.sleep(0.1)
        descriptor = acquire_task_lock(job, print_line=QUIET.append)
        time.sleep(0.1)
        came.append(time.monotonic())
        os.close(descriptor)

    launching = threading.Thread(target=launch)
    launching.start()
    assert wait_for_launcher(job, comes_s=10.0) == 0
    assert time.monotonic() >= came[0]
    launching.join()


def test_a_launcher_that_never_comes_is_not_waited_for(job: str) -> None:
    began_s = time.monotonic()
    assert wait_for_launcher(job, comes_s=0.05) == 0
    assert 0.05 <= time.monotonic() - began_s < 5.0


def test_the_launcher_of_another_job_does_not_count(job: str) -> None:
    descriptor = acquire_task_lock(job, print_line=QUIET.append)
    assert wait_for_launcher(secrets.token_hex(4), comes_s=0.02) == 0
    os.close(descriptor)


def test_hosts_that_share_the_folder_do_not_wait_for_each_other(job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    descriptors = []
    for host in ("n1", "n2"):
        monkeypatch.setattr("elastictrain.launch.locks.socket.gethostname", lambda host=host: host)
        descriptors.append(acquire_task_lock(job, print_line=QUIET.append))
    for descriptor in descriptors:
        os.close(descriptor)


def test_what_ends_the_job_is_left_to_the_launcher(job: str) -> None:
    wait_for_launcher(job, comes_s=0.0)
    assert {signal.getsignal(number) for number in SIGNALS} == {signal.SIG_IGN}


def test_nothing_is_held_afterwards(job: str) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    wait_for_launcher(job, comes_s=0.0)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    os.close(acquire_task_lock(job, print_line=QUIET.append))


def test_a_link_that_somebody_else_has_put_there_is_not_followed(job: str, tmp_path: Path) -> None:
    name = f"elastictrain-{os.getuid()}-{job}-{socket.gethostname()}.lock"
    (tmp_path / name).symlink_to(tmp_path / "precious")
    with pytest.raises(HostUnfitError, match=re.escape(name)):
        acquire_task_lock(job, print_line=QUIET.append)
    assert not (tmp_path / "precious").exists()


def test_another_launcher_is_waited_for_and_that_is_said(job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastictrain.launch.locks._QUIET_S", 0.02)
    first, said = acquire_task_lock(job, print_line=QUIET.append), list[str]()
    taken: list[int] = []
    second = threading.Thread(target=lambda: taken.append(acquire_task_lock(job, print_line=said.append)))
    second.start()
    while not said:
        time.sleep(0.005)
    assert not taken
    os.close(first)
    second.join(10.0)
    os.close(taken[0])
    assert len(said) == 1
    assert not QUIET
