import fcntl
import os
import subprocess
import sys
import time
from pathlib import Path

from elastictrain.checkpoint.saver.process import clear_if_abandoned
from elastictrain.storage.private import clear_folder, sweep_folders


def made(parent: Path, name: str, *, age_s: float = 0.0, lock: bool = True) -> Path:
    folder = parent / name
    folder.mkdir(parents=True)
    (folder / "own-r00000-s0").write_bytes(b"x")
    if lock:
        (folder / "keeper.lock").write_bytes(b"")
    then = time.time() - age_s
    os.utime(folder, (then, then))
    return folder


def held(folder: Path) -> int:
    descriptor = os.open(folder / "keeper.lock", os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    return descriptor


def test_only_what_was_left_long_ago_goes(tmp_path: Path) -> None:
    parent = tmp_path / "user"
    old, unlocked, young, kept = (
        made(parent, "old", age_s=4000),
        made(parent, "unlocked", age_s=4000, lock=False),
        made(parent, "young", age_s=3000),
        made(parent, "kept", age_s=9000),
    )
    saver = held(kept)
    (parent / "file").write_text("no folder")
    assert sorted(sweep_folders(str(parent), clear=clear_if_abandoned)) == [str(old), str(unlocked)]
    assert young.exists()
    assert (kept / "own-r00000-s0").exists()
    os.close(saver)
    swept = sweep_folders(str(parent), clear=clear_if_abandoned, now=time.time() + 4000)
    assert sorted(swept) == [str(kept), str(young)]
    assert not kept.exists()
    assert not young.exists()
    assert sweep_folders(f"{tmp_path}/nowhere", clear=clear_if_abandoned) == []


def test_a_kept_folder_is_not_abandoned(tmp_path: Path) -> None:
    folder = made(tmp_path / "user", "run")
    saver = held(folder)
    assert not clear_if_abandoned(str(folder))
    assert (folder / "own-r00000-s0").exists()
    os.close(saver)
    assert clear_if_abandoned(str(folder))
    assert not (tmp_path / "user").exists()
    assert clear_if_abandoned(str(folder)), "there is nothing"


def test_other_runs_of_the_user_stay(tmp_path: Path) -> None:
    folder, other = made(tmp_path / "user", "run"), made(tmp_path / "user", "other")
    clear_folder(str(folder))
    assert not folder.exists()
    assert other.exists()


FORKING = """
import os, subprocess, sys, threading, time
from elastictrain.checkpoint.saver.process import SaverStarter
from tests.unit.checkpoint.saver.running import FACTS

begun, usual = threading.Event(), subprocess._fork_exec

def fork_exec(*arguments):
    begun.set()
    time.sleep(0.3)
    return usual(*arguments)

subprocess._fork_exec, sys.executable = fork_exec, "/bin/true"
starting = threading.Thread(target=SaverStarter(sys.argv[1], FACTS).start_if_gone)
starting.start()
assert begun.wait(10)
if not (pid := os.fork()):
    # As a data worker lives on, with all that it had open when it was forked.
    time.sleep(10)
    os._exit(0)
began = time.monotonic()
starting.join()
print(time.monotonic() - began)
os.kill(pid, 9)
os.waitpid(pid, 0)
"""


def test_a_saver_that_is_started_while_a_data_worker_is_forked_is_not_waited_for(tmp_path: Path) -> None:
    """The fork comes while `Popen` has its pipe open, between two threads of one process."""
    done = subprocess.run(
        [sys.executable, "-c", FORKING, str(tmp_path / "memory")], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 3.0
