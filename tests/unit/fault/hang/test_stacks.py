import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastictrain.fault.hang.stacks import STACKS_SIGNAL, no_stacks_any_more, stacks_path, take_stacks, tell_stacks_when_asked


@pytest.fixture(autouse=True)
def the_signal_as_before() -> Iterator[None]:
    before = signal.getsignal(STACKS_SIGNAL)
    yield
    signal.signal(STACKS_SIGNAL, before)


@pytest.fixture(autouse=True)
def no_programs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))


def test_a_process_tells_its_own_stacks_when_asked_each_time_anew(tmp_path: Path) -> None:
    file = tell_stacks_when_asked(str(tmp_path), 0)
    for _ in range(2):
        text = take_stacks(str(tmp_path), [(0, os.getpid())])
        assert text.count("test_a_process_tells_its_own_stacks") == 1
        assert f"rank 0, process {os.getpid()}, as the kernel sees it:\n  " in text
    assert os.stat(stacks_path(str(tmp_path), 0)).st_mode & 0o777 == 0o600  # noqa: PTH116
    no_stacks_any_more(file)
    os.kill(os.getpid(), STACKS_SIGNAL)


def test_who_cannot_answer_is_not_asked(tmp_path: Path) -> None:
    # The signal would end a process that has not made its file.
    text = take_stacks(str(tmp_path), [(1, os.getpid())])
    assert "(it does not tell its own stacks)" in text


def test_who_does_not_answer_is_not_waited_for(tmp_path: Path) -> None:
    signal.signal(STACKS_SIGNAL, signal.SIG_IGN)
    Path(stacks_path(str(tmp_path), 1)).touch()
    assert "(it does not tell its own stacks)" in take_stacks(str(tmp_path), [(1, os.getpid())], patience_s=0.1)
