"""Workers that are forked and not started: what they are like, and when it is left to torchrun to start them."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from torchruns import environment, wait_until

COMMAND = (sys.executable, "-u", "-m", "elastictrain.run")
HEAD = """
import os, subprocess, sys, threading
from elastictrain.launch.forks import Forks, import_ahead
forks = Forks()
"""


def python(program: str, *, limit_s: float = 60) -> str:
    """What a program prints that must end well."""
    done = subprocess.run(
        [sys.executable, "-u", "-c", HEAD + program],
        capture_output=True,
        text=True,
        timeout=limit_s,
        env=environment(),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_fork_is_the_program_in_its_environment() -> None:
    said = python(
        f"""
forks.prepare(2)
fork = forks.take([*{COMMAND}, "--help"], {{"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "PATH": os.environ["PATH"]}})
try:
    fork.wait(0.0)
except subprocess.TimeoutExpired:
    print("waits no longer than it is told")
print("code", fork.wait(60), fork.poll())
wrong = forks.take([*{COMMAND}, "recipe=none"], {{"RANK": "x", "WORLD_SIZE": "1", "PATH": os.environ["PATH"]}})
print("code", wrong.wait(60))
print(forks.take([*{COMMAND}], {{}}))
"""
    )
    assert "waits no longer than it is told" in said
    assert "python -m elastictrain.run" in said
    assert "code 0 0" in said
    assert "code 78" in said
    assert said.endswith("None\n")


def test_what_is_not_a_worker_is_left_to_torchrun() -> None:
    said = python(
        f"""
forks.prepare(1)
print(forks.take(["numactl", *{COMMAND}], {{}}))
print(forks.take([sys.executable, "-u", "-m", "another"], {{}}))
"""
    )
    assert said.split() == ["None", "None"]


def test_a_process_with_threads_does_not_fork() -> None:
    said = python(
        f"""
end = threading.Event()
threading.Thread(target=end.wait).start()
print("2 threads" in forks.prepare(1))
print(forks.take({COMMAND}, {{}}))
end.set()
"""
    )
    assert said.split() == ["True", "None"]


def test_modules_that_cannot_be_imported_are_for_workers_to_tell_of() -> None:
    said = python('import_ahead(["no.such.module"])\nprint(os.environ.get("OPENBLAS_NUM_THREADS"))')
    assert said.split() == ["None"]


def test_what_is_imported_ahead_leaves_one_thread_and_no_device() -> None:
    said = python(
        """
import_ahead()
import torch
from elastictrain.launch.forks import why_no_fork
print(not why_no_fork(), torch.cuda.is_initialized(), "elastictrain.train.worker" in sys.modules)
""",
        limit_s=120,
    )
    assert said.split() == ["True", "False", "True"]


@pytest.mark.parametrize("what", ["socket.socketpair", "os.fork"])
def test_where_there_is_no_room_for_all_forks_there_are_fewer(what: str) -> None:
    said = python(
        f"""
import socket, warnings
# What is left to the garbage collector to close.
warnings.simplefilter("error")
sys.unraisablehook = print
before = set(os.listdir("/proc/self/fd"))
make, made = {what}, []
def make_two():
    if len(made) == 2:
        raise OSError(24, "no room")
    made.append(1)
    return make()
{what} = make_two
print("no room" in forks.prepare(4))
pids = [fork.pid for fork in forks._waiting]
print(len(pids), len(set(os.listdir("/proc/self/fd")) - before))
"""
    )
    assert said.split() == ["True", "2", "2"]


def test_a_fork_that_dies_before_it_is_ready_leaves_nothing() -> None:
    said = python(
        """
from elastictrain.launch import forks as module
before = os.listdir("/proc/self/fd")
module.follow_parent = lambda *told, **how: False
forks.prepare(2)
print(forks._waiting, len(os.listdir("/proc/self/fd")) - len(before))
try:
    print(os.waitpid(-1, os.WNOHANG))
except ChildProcessError:
    print("no child")
"""
    )
    assert said == "[] 0\nno child\n"


def test_a_fork_that_cannot_have_a_session_of_its_own_does_not_go_on_as_another_torchrun() -> None:
    said = python(
        """
def refuse():
    raise PermissionError(1, "no session")
os.setsid = refuse
sys.stderr = sys.stdout
forks.prepare(1)
print("once")
"""
    )
    assert said == "once\n"


def test_a_process_that_has_touched_a_device_does_not_fork(tmp_path: Path) -> None:
    device = tmp_path / "device"
    device.touch()
    said = python(
        f"""
from elastictrain.launch import forks as module
module._DEVICES = ({str(device)!r},)
with open({str(device)!r}):
    forks.prepare(1)
print(forks._waiting)
forks.prepare(1)
print(len(forks._waiting))
"""
    )
    assert said.split() == ["[]", "1"]


@pytest.mark.parametrize("end", ["exit", "kill"])
def test_forks_that_are_not_needed_end_with_their_torchrun(end: str, tmp_path: Path) -> None:
    program = """
forks.prepare(2)
print(*[fork.pid for fork in forks._waiting], flush=True)
sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-u", "-c", HEAD + program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment()
    ) as process:
        assert process.stdout is not None
        pids = [int(word) for word in process.stdout.readline().split()]
        assert len(pids) == 2
        assert all(os.getsid(pid) == pid for pid in pids)
        if end == "kill":
            process.kill()
        else:
            process.communicate(timeout=30)
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids), timeout_s=20, what="the end of the forks")
