"""Where a cluster starts one launcher for each GPU, one of them launches, and the others wait for its end."""

import fcntl
import os
import signal
import time
from collections.abc import Callable

from elastictrain.errors import EXIT_OK
from elastictrain.launch.lock_file import open_lock

_LAUNCHER_COMES_S = 120.0
_TURN_S = 0.2
_QUIET_S = 2.0


def acquire_task_lock(job: str, *, say: Callable[[str], None]) -> int:
    """Held by the launcher of a job on its host as long as it lives; returns the descriptor. Waits for another one to end."""
    descriptor = open_lock(f"{job}.lock")
    quiet_until = time.monotonic() + _QUIET_S
    while time.monotonic() < quiet_until:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            # Tasks that wait for this one look now and then.
            time.sleep(_TURN_S / 4)
        else:
            return descriptor
    say("waiting for another launcher of this job to end on this host")
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    return descriptor


def wait_for_launcher(job: str, *, comes_s: float = _LAUNCHER_COMES_S) -> int:
    """Until the launcher of a job on this host has come and gone; returns an exit code."""
    # What ends the job is meant for the launcher: a task that ended before it could end all others.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    descriptor = open_lock(f"{job}.lock")
    deadline, came = time.monotonic() + comes_s, False
    while came or time.monotonic() < deadline:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            came = True
        else:
            if came:
                break
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        time.sleep(_TURN_S)
    os.close(descriptor)
    return EXIT_OK
