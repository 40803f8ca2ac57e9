"""What the kernel tells of a process, and does for it."""

import ctypes
import os
import signal
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
_PR_SET_PDEATHSIG = 1
_PF_EXITING = 0x4

NO_FORKS = threading.RLock()
"""While a thread holds it no other one forks. `Popen` waits for the end of a pipe, and a process that is forked meanwhile, such
as a data worker of torch, holds that end open until it ends itself."""
os.register_at_fork(before=NO_FORKS.acquire, after_in_parent=NO_FORKS.release, after_in_child=NO_FORKS.release)


def follow_parent(expected_parent: int, *, with_signal: int = signal.SIGTERM) -> bool:
    """Ask the kernel for a signal when the parent dies; False if the parent has died already.

    Source: prctl(2). The request is not retroactive, so the parent is checked after it. Linux only; elsewhere nothing happens.
    """
    if sys.platform != "linux":
        return True
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(with_signal), 0, 0, 0)
    return os.getppid() == expected_parent


@dataclass(frozen=True, slots=True)
class Stat:
    """The `stat` file of a process or thread. Source: proc(5); PF_EXITING of linux/sched.h."""

    name: str
    state: str  # one letter; see proc(5)
    parent: int
    exiting: bool  # whether it has begun to exit: nothing of its program runs any more
    num_threads: int
    started: int  # start time in ticks of the kernel: distinguishes processes that have had the same pid
    status: int  # as `os.wait` returns it; 0 also if it has not ended, or if this user may not see it


def read_stat(folder: Path) -> Stat | None:
    """By the folder of a process or thread in /proc; None if it does not exist."""
    try:
        head, _, tail = (folder / "stat").read_text(errors="replace").rpartition(")")
        fields = tail.split()
        exiting = fields[0] in "ZX" or bool(int(fields[6]) & _PF_EXITING)
        num_threads, started, status = int(fields[17]), int(fields[19]), int(fields[49])
        return Stat(head.partition("(")[2], fields[0], int(fields[1]), exiting, num_threads, started, status)
    except (OSError, ValueError, IndexError):
        return None
