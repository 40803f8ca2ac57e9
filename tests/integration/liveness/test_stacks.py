import faulthandler
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastictrain.liveness.stacks import (
    STACKS_SIGNAL,
    describe_process,
    dump_stacks_on_signal,
    stacks_path,
    stop_stack_dumps,
    take_stacks,
)
from tests.unit.fault.fake_proc import make_process


@pytest.fixture(autouse=True)
def the_signal_as_before() -> Iterator[None]:
    before = signal.getsignal(STACKS_SIGNAL)
    yield
    signal.signal(STACKS_SIGNAL, before)


@pytest.fixture(autouse=True)
def no_programs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))


def test_a_process_tells_its_own_stacks_when_asked_each_time_anew(tmp_path: Path) -> None:
    file = dump_stacks_on_signal(str(tmp_path), 0)
    for _ in range(2):
        text = take_stacks(str(tmp_path), [(0, os.getpid())])
        assert text.count("test_a_process_tells_its_own_stacks") == 1
        assert str(os.getpid()) in text
    assert os.stat(stacks_path(str(tmp_path), 0)).st_mode & 0o777 == 0o600  # noqa: PTH116
    stop_stack_dumps(file)
    assert not Path(stacks_path(str(tmp_path), 0)).exists()
    assert is_ignored()


def is_ignored() -> bool:
    """What the kernel does with the signal, whatever Python thinks."""
    (mask,) = re.findall(r"SigIgn:\s(\w+)", Path("/proc/self/status").read_text())
    return bool(int(mask, 16) >> (STACKS_SIGNAL - 1) & 1)


def test_no_question_ever_ends_a_process_that_has_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moments: list[tuple[str, bool]] = []
    real_open, real_unregister = os.open, faulthandler.unregister

    def opener(path: str, flags: int, mode: int) -> int:
        moments.append(("opened", is_ignored()))
        return real_open(path, flags, mode)

    def unregister(number: int) -> None:
        assert not is_ignored()
        real_unregister(number)
        moments.append(("unregistered", is_ignored()))

    monkeypatch.setattr(os, "open", opener)
    monkeypatch.setattr(faulthandler, "unregister", unregister)
    stop_stack_dumps(dump_stacks_on_signal(str(tmp_path), 0))
    assert moments == [("opened", True), ("unregistered", True)]


def test_who_cannot_answer_is_not_asked(tmp_path: Path) -> None:
    # The signal would end a process that has not made its file.
    assert "test_who_cannot_answer" not in take_stacks(str(tmp_path), [(1, os.getpid())])


def test_who_does_not_answer_is_not_waited_for(tmp_path: Path) -> None:
    signal.signal(STACKS_SIGNAL, signal.SIG_IGN)
    Path(stacks_path(str(tmp_path), 1)).touch()
    assert "test_who_does_not_answer" not in take_stacks(str(tmp_path), [(1, os.getpid())], patience_s=0.1)


def test_threads_and_children_are_told_of(tmp_path: Path) -> None:
    make_process(tmp_path, 7, state="R")
    make_process(tmp_path, 9, name="a) R 1 (b", state="T", parent=7)
    make_process(tmp_path, 10, name="else", parent=1)
    (tmp_path / "self").mkdir()
    assert describe_process(7, proc=tmp_path) == (
        "  python (7) runs\n  its child a) R 1 (b (9) is stopped by a signal in do_nanosleep"
    )
    assert describe_process(11, proc=tmp_path) == ""
