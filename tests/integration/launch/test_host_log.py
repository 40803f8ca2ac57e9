"""What is printed is in the file and on the terminal, each byte once."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from elastictrain.errors import HostUnfitError
from elastictrain.launch.host_log import HostLog

LIMIT_S = 30.0
PRINTS = "import os; [(os.write(1, b'out\\n'), os.write(2, b'error\\n')) for _ in range({times})]"
COPIER = "import psutil; copier = psutil.Process().children()[0]"
PROGRAM = """
import os, subprocess, sys, time
from elastictrain.launch.host_log import HostLog
log = HostLog.begin({folder!r}, host="a")
{body}
log.close({code})
sys.exit({code})
"""


def run(folder: Path, body: str, *, code: int = 0, stdout: int = subprocess.PIPE) -> subprocess.CompletedProcess[bytes]:
    program = PROGRAM.format(folder=str(folder), body=body, code=code)
    return subprocess.run([sys.executable, "-c", program], stdout=stdout, stderr=subprocess.PIPE, timeout=LIMIT_S, check=False)


def log_of(folder: Path) -> bytes:
    (path,) = folder.glob("a-*.log")
    return path.read_bytes()


def await_that(holds: Callable[[], bool]) -> None:
    until_s = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < until_s
        time.sleep(0.02)


@pytest.mark.parametrize("code", [0, 75])
def test_all_is_copied_in_order_and_the_exit_code_is_passed_on(code: int, tmp_path: Path) -> None:
    times = 100_000  # many times what a pipe holds
    child = f"subprocess.run([sys.executable, '-c', {PRINTS.format(times=times)!r}])"
    ended = run(tmp_path / "logs", f"print('begins', flush=True); {child}; sys.stderr.write('ends\\n')", code=code)
    assert ended.returncode == code
    assert ended.stdout == b"begins\n" + b"out\n" * times
    assert ended.stderr == b"error\n" * times + b"ends\n"
    log = log_of(tmp_path / "logs")
    assert log.endswith(f"elastictrain: exit code {code}\n".encode())
    lines = log.splitlines()
    # In the order of each stream; no line is torn, and the exit code comes after all.
    assert [one for one in lines if one in (b"begins", b"out")] == [b"begins", *[b"out"] * times]
    assert [one for one in lines if one in (b"error", b"ends")] == [*[b"error"] * times, b"ends"]
    assert len(log) == len(ended.stdout) + len(ended.stderr) + len(f"elastictrain: exit code {code}\n")


def test_a_launcher_that_is_killed_does_not_cut_its_children_short(tmp_path: Path) -> None:
    child = "import time; time.sleep(0.3); print('last words')"
    run(tmp_path, f"subprocess.Popen([sys.executable, '-c', {child!r}]); os.kill(os.getpid(), {signal.SIGKILL})")
    await_that(lambda: log_of(tmp_path) == b"last words\n")


def test_a_saver_that_stays_is_not_waited_for_and_goes_on_printing(tmp_path: Path) -> None:
    child = "import time; time.sleep(4); print('saved')"
    body = f"subprocess.Popen([sys.executable, '-c', {child!r}], start_new_session=True); print('trained', flush=True)"
    program, output = PROGRAM.format(folder=str(tmp_path), body=body, code=3), tmp_path / "terminal"
    began_s = time.monotonic()
    with output.open("wb") as terminal:
        assert subprocess.run([sys.executable, "-c", program], stdout=terminal, timeout=LIMIT_S, check=False).returncode == 3
    assert time.monotonic() - began_s < 4
    # The exit code is behind all that the launcher has printed, before and after its file.
    assert log_of(tmp_path) == b"trained\nelastictrain: exit code 3\n"
    await_that(lambda: log_of(tmp_path).endswith(b"exit code 3\nsaved\n"))
    assert output.read_bytes() == b"trained\nsaved\n"


def test_without_a_terminal_the_file_is_whole(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        assert (
            run(tmp_path, "print('one', flush=True); time.sleep(0.2); print('two', flush=True)", stdout=writer).returncode == 0
        )
    finally:
        os.close(writer)
    assert log_of(tmp_path) == b"one\ntwo\nelastictrain: exit code 0\n"


def test_a_signal_to_all_processes_of_the_terminal_leaves_the_copier(tmp_path: Path) -> None:
    body = (
        "import signal; signal.signal(signal.SIGINT, lambda *_: print('asked', flush=True)); os.setpgid(0, 0); os.killpg(0, 2)"
    )
    assert run(tmp_path, f"{body}; time.sleep(0.2)", code=75).returncode == 75
    assert log_of(tmp_path) == b"asked\nelastictrain: exit code 75\n"


@pytest.mark.parametrize("after_s", [0.0, 0.02, 0.5])
def test_signals_that_a_scheduler_sends_to_all_processes_leave_the_copier(after_s: float, tmp_path: Path) -> None:
    send = "[os.kill(copier.pid, number) for number in (1, 2, 10, 12, 13, 15)]"
    body = f"{COPIER}; time.sleep({after_s}); {send}; time.sleep(0.3); print(copier.status() != 'zombie', flush=True)"
    assert run(tmp_path, body).stdout == b"True\n"
    assert log_of(tmp_path) == b"True\nelastictrain: exit code 0\n"


def test_what_is_printed_survives_the_copier(tmp_path: Path) -> None:
    times = 100_000
    child = f"subprocess.run([sys.executable, '-c', {PRINTS.format(times=times)!r}])"
    # What it has read and not yet written would go with it.
    copied = f"[time.sleep(0.01) for _ in iter(lambda: os.path.getsize(glob.glob({str(tmp_path / 'a-*.log')!r})[0]), 4)]"
    kill = f"print('one', flush=True); import glob; {copied}; time.sleep(0.3); copier.kill()"
    ended = run(tmp_path, f"{COPIER}; {kill}; print('two', flush=True); {child}", code=75)
    assert ended.returncode == 75
    assert ended.stdout == b"one\ntwo\n" + b"out\n" * times
    assert ended.stderr == b"error\n" * times
    lines = log_of(tmp_path).splitlines()
    assert (lines.count(b"one"), lines.count(b"out"), lines.count(b"error")) == (1, times, times)
    assert lines[-1] == b"elastictrain: exit code 75"


def test_an_output_that_nobody_reads_does_not_hold_up_the_errors(tmp_path: Path) -> None:
    print_all = "__import__('threading').Thread(target=lambda: os.write(1, b'out ' * 100_000), daemon=True).start()"
    program = PROGRAM.format(folder=str(tmp_path), body=f"{print_all}; time.sleep(0.3); os.write(2, b'error')", code=3)
    reader, writer = os.pipe()
    try:
        process = subprocess.Popen([sys.executable, "-c", program], stdout=writer, stderr=subprocess.PIPE)
        assert process.stderr is not None
        assert process.stderr.read(5) == b"error"
        assert process.wait(LIMIT_S) == 3
        assert log_of(tmp_path).endswith(b"errorelastictrain: exit code 3\n")
    finally:
        os.close(reader)
        os.close(writer)
        process.stderr.close()


def test_a_terminal_that_does_not_block_gets_all(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    program = PROGRAM.format(folder=str(tmp_path), body="os.write(1, b'x' * 300_000)", code=0)
    process = subprocess.Popen([sys.executable, "-c", program], stdout=writer)
    os.close(writer)
    time.sleep(0.5)
    with os.fdopen(reader, "rb") as terminal:
        assert len(terminal.read()) == 300_000
    assert process.wait(LIMIT_S) == 0


def test_a_host_that_can_start_no_process_is_unfit(tmp_path: Path) -> None:
    fail = "def fail(*_, **__):\n    raise OSError(11, 'EAGAIN')\nsubprocess.Popen = fail\n"
    program = PROGRAM.replace("log =", f"{fail}log =", 1).format(folder=str(tmp_path), body="", code=0)
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=LIMIT_S, check=False)
    assert b"HostUnfitError: with `launch.log_dir`" in ended.stderr


def test_a_folder_that_cannot_be_made_makes_the_host_unfit(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(HostUnfitError, match=r"launch\.log_dir"):
        HostLog.begin(str(tmp_path / "file" / "logs"), host="a")
