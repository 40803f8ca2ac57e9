import os
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest

from elastictrain.errors import StopRequestedError
from elastictrain.fault import exits as previous_workers
from elastictrain.fault.exits import encode, identify, wait_for_previous_workers
from elastictrain.identity import Identity, Launcher

ALONE = Identity(0, 1, 0, 1, "here", launched=True)


def started_after(*pids: int) -> Identity:
    named = [one for pid in pids if (one := identify(pid)) is not None]
    return replace(ALONE, launcher=Launcher(1, 2, True, "/tmp/x", predecessors=encode(named)))


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
