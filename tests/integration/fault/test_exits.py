import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from elastictrain.errors import StopRequestedError
from elastictrain.fault import exits as previous_workers
from elastictrain.fault.exits import (
    AGAIN_S,
    FIRST_S,
    Process,
    WaitNotice,
    decode,
    describe_process,
    early_exit_code,
    encode,
    identify,
    is_there,
    runs,
    wait_for_previous_workers,
    wait_until_gone,
)
from elastictrain.identity import Identity, Launcher
from elastictrain.processes import follow_parent, read_stat
from tests.unit.fault.fake_proc import EXITING, RUNNING, make_process

KILLED = int(signal.SIGKILL)


def test_this_process_runs_and_is_there() -> None:
    own = identify(os.getpid())
    assert own is not None
    assert is_there(own)
    assert runs(own.pid)
    assert early_exit_code(own, parent=os.getppid()) is None
    stat = read_stat(Path("/proc/self"))
    assert stat is not None
    assert (stat.parent, stat.exiting, stat.status) == (os.getppid(), False, 0)
    assert stat.num_threads == len([*Path("/proc/self/task").iterdir()])


@pytest.mark.parametrize(
    ("stat", "exiting"),
    [
        ("7 (a) b) S 1 7 7 0 -1 4194560", False),
        ("7 (a) b) S 1 7 7 0 -1 4194564", True),
        ("7 (a) b) Z 1 7 7 0 -1 4228100", True),
    ],
)
def test_a_process_past_the_point_of_return_is_known_by_its_flags(stat: str, exiting: bool, tmp_path: Path) -> None:
    (tmp_path / "stat").write_text(stat + 43 * " 1")
    found = read_stat(tmp_path)
    assert found is not None
    assert found.exiting is exiting


@pytest.mark.parametrize("stat", ["", "7 (a"])
def test_what_is_no_stat_is_no_process(stat: str, tmp_path: Path) -> None:
    (tmp_path / "stat").write_text(stat)
    assert read_stat(tmp_path) is None


def test_one_that_was_killed_tells_how_it_ends_while_nobody_has_asked_for_it() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    process = identify(child.pid)
    assert process is not None
    os.kill(child.pid, signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert early_exit_code(process, parent=os.getpid()) == -signal.SIGKILL
    # Who is not its parent, or knew another process of this number, learns nothing.
    assert early_exit_code(process, parent=1) is None
    assert early_exit_code(replace(process, started=1), parent=os.getpid()) is None
    # It waits for us only.
    assert not is_there(process)
    assert wait_until_gone([process], limit_s=0) == []
    child.wait()
    assert early_exit_code(process, parent=os.getpid()) is None
    assert identify(child.pid) is None
    assert not runs(child.pid)


@pytest.mark.parametrize(("status", "code"), [(KILLED, -9), (71 << 8, 71), (0, None)])
def test_who_gives_back_its_device_has_ended_but_is_there(status: int, code: int | None, tmp_path: Path) -> None:
    make_process(tmp_path, 7, state="D", flags=EXITING, status=status, threads={8: ("D", EXITING), 9: ("Z", EXITING)})
    assert early_exit_code(Process(7, 100), parent=1, proc=tmp_path) == code
    assert not runs(7, proc=tmp_path)
    process = identify(7, proc=tmp_path)
    assert process == Process(7, 100)
    assert is_there(process, proc=tmp_path)


def test_a_thread_that_cannot_be_killed_yet_may_still_do_something(tmp_path: Path) -> None:
    make_process(tmp_path, 7, state="Z", flags=EXITING, status=KILLED, threads={8: ("D", RUNNING)})
    assert early_exit_code(Process(7, 100), parent=1, proc=tmp_path) is None
    assert runs(7, proc=tmp_path)
    assert is_there(Process(7, 100), proc=tmp_path)


def test_threads_that_are_missing_in_a_list_may_still_do_something(tmp_path: Path) -> None:
    make_process(tmp_path, 7, state="D", flags=EXITING, status=KILLED, unlisted=1)
    assert runs(7, proc=tmp_path)
    assert early_exit_code(Process(7, 100), parent=1, proc=tmp_path) is None
    make_process(tmp_path, 8, state="Z", flags=EXITING, status=KILLED, unlisted=1)
    assert is_there(Process(8, 100), proc=tmp_path)


def test_one_that_was_stopped_by_a_signal_has_not_ended(tmp_path: Path) -> None:
    """The kernel tells the signal in the same place."""
    make_process(tmp_path, 7, state="T", status=(int(signal.SIGSTOP) << 8) | 0x7F)
    assert early_exit_code(Process(7, 100), parent=1, proc=tmp_path) is None


def test_another_process_of_the_same_number_is_not_waited_for(tmp_path: Path) -> None:
    make_process(tmp_path, 7, started=200)
    assert is_there(Process(7, 200), proc=tmp_path)
    assert not is_there(Process(7, 100), proc=tmp_path)
    assert not is_there(Process(8, 100), proc=tmp_path)


def test_what_is_left_after_the_limit_is_told(tmp_path: Path) -> None:
    make_process(tmp_path, 7, state="D", flags=EXITING)
    make_process(tmp_path, 8, state="Z", flags=EXITING)
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    left = wait_until_gone([Process(7, 100), Process(8, 100)], limit_s=30, clock=lambda: now[0], sleep=sleep, proc=tmp_path)
    assert left == [7]
    assert now[0] == pytest.approx(30, abs=0.1)


def test_who_goes_meanwhile_is_waited_for(tmp_path: Path) -> None:
    make_process(tmp_path, 7, state="D", flags=EXITING)
    paused: list[float] = []

    def sleep(seconds: float) -> None:
        paused.append(seconds)
        if len(paused) == 3:
            make_process(tmp_path, 7, state="Z", flags=EXITING)

    assert wait_until_gone([Process(7, 100)], limit_s=30, sleep=sleep, proc=tmp_path) == []
    assert len(paused) == 3


@pytest.mark.parametrize("processes", [(), (Process(7, 100),), (Process(7, 100), Process(12, 3))])
def test_processes_come_back_from_an_environment_variable(processes: tuple[Process, ...]) -> None:
    assert decode(encode(processes)) == processes


@pytest.mark.parametrize("text", ["", ",", "7", "7:", ":7", "a:b", "7:1:2", "-7:1"])
def test_what_is_no_process_is_left_out(text: str) -> None:
    assert decode(text) == ()
    assert decode(f"3:4,{text}") == (Process(3, 4),)


@pytest.mark.parametrize(("until_s", "left"), [(None, ""), (400.0, f"{300.0 - FIRST_S:.0f} s"), (100.0, "0 s")])
def test_a_wait_is_told_after_a_while_and_again_now_and_then(until_s: float | None, left: str) -> None:
    now, told = [100.0], list[tuple[float, str]]()
    notice = WaitNotice(lambda text: told.append((now[0] - 100.0, text)), clock=lambda: now[0])
    while now[0] < 100.0 + FIRST_S + 2 * AGAIN_S + 1.0:
        notice.tell(lambda: "the saver", until_s=until_s)
        now[0] += 0.5
    assert [at for at, _ in told] == [FIRST_S, FIRST_S + AGAIN_S, FIRST_S + 2 * AGAIN_S]
    assert told[0][1].startswith("waiting for the saver (")
    assert f"({FIRST_S:.0f} s" in told[0][1]
    assert ("more" in told[0][1]) == bool(left)
    assert left in told[0][1]


def test_a_short_wait_is_not_worth_a_word() -> None:
    now, told = [0.0], list[str]()
    notice = WaitNotice(told.append, clock=lambda: now[0])
    for now[0] in (0.0, FIRST_S - 0.1):
        notice.tell(lambda: "the saver", until_s=None)
    assert told == []


def test_a_process_is_named_with_what_keeps_it_from_running(tmp_path: Path) -> None:
    assert describe_process(os.getpid()) == f"process {os.getpid()}"
    assert "gone" in describe_process(7, proc=tmp_path)
    (tmp_path / "7").mkdir()
    fields = ["T", "1", *["0"] * 15, "1", "0", "99", *["0"] * 29, "0"]
    (tmp_path / "7" / "stat").write_text(f"7 (saver) {' '.join(fields)}")
    assert "-CONT 7`" in describe_process(7, proc=tmp_path)


PR_SET_PDEATHSIG, PR_GET_PDEATHSIG = 1, 2


def death_signal() -> int:
    number = ctypes.c_int(-1)
    assert ctypes.CDLL(None).prctl(PR_GET_PDEATHSIG, ctypes.byref(number), 0, 0, 0) == 0
    return number.value


def test_the_kernel_is_asked_for_sigterm_when_the_parent_dies() -> None:
    try:
        assert follow_parent(os.getppid())
        assert death_signal() == signal.SIGTERM
    finally:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, 0, 0, 0, 0)


def test_a_parent_that_died_before_is_noticed() -> None:
    try:
        assert not follow_parent(os.getppid() + 1)
    finally:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, 0, 0, 0, 0)


ALONE = Identity(0, 1, 0, 1, "here", launched=True)


def started_after(*pids: int) -> Identity:
    named = [one for pid in pids if (one := identify(pid)) is not None]
    return replace(ALONE, launcher=Launcher(1, 2, True, "/tmp/x", previous_workers=encode(named)))


def test_a_first_start_waits_for_nobody() -> None:
    assert wait_for_previous_workers(ALONE) == []
    assert wait_for_previous_workers(started_after()) == []


def test_who_is_still_there_is_waited_for() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    identity = started_after(child.pid)

    def end() -> None:
        child.kill()
        child.wait()

    began = time.monotonic()
    timer = threading.Timer(0.5, end)
    timer.start()
    assert wait_for_previous_workers(identity) == []
    assert time.monotonic() - began >= 0.5
    timer.join()


def test_who_does_not_go_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(previous_workers, "PREVIOUS_EXIT_TIMEOUT_S", 0.05)
    assert wait_for_previous_workers(started_after(os.getpid())) == [os.getpid()]


def test_a_wait_ends_when_this_run_has_to_go() -> None:
    def poll() -> None:
        raise StopRequestedError("asked to stop")

    with pytest.raises(StopRequestedError):
        wait_for_previous_workers(started_after(os.getpid()), poll=poll)
