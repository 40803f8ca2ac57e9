"""How processes end: what the kernel tells of those that do, workers whose agent is gone, and a limit on this one's own end.

A worker that was killed may take seconds to give back its device and its memory. Nothing of its program runs any more, and its
exit code is known; who waits for it only learns both when all that is over. A long wait tells a person what it is for, so that
nobody takes it for a hang.
"""

import ctypes
import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from elastictrain.identity import Identity

_PR_SET_PDEATHSIG = 1
_LOCK_FREE_MARGIN_S = 1.0
PROC = Path("/proc")
_PF_EXITING = 0x4
_PAUSE_S = 0.01

FIRST_S = 5.0  # a wait that is over sooner is of no interest to anybody
AGAIN_S = 30.0

PREVIOUS_EXIT_TIMEOUT_S = 30.0
"""How long they may hold up this start: the kernel lets go of some only when a device has answered."""


def wait_for_previous_workers(identity: Identity, *, poll: Callable[[], None] = lambda: None) -> list[int]:
    """Until nothing of the generation before holds anything on this host; returns what still does after half a minute.

    What `poll` raises ends the wait.
    """

    def pause(seconds: float) -> None:
        poll()
        time.sleep(seconds)

    processes = decode(identity.launcher.predecessors) if identity.launcher is not None else ()
    return wait_until_gone(processes, limit_s=PREVIOUS_EXIT_TIMEOUT_S, sleep=pause)


def follow_parent(expected_parent: int, *, with_signal: int = signal.SIGTERM) -> bool:
    """Ask the kernel for a signal when the parent dies; False if the parent is gone already.

    Source: prctl(2). The request is not retroactive, so the parent is checked after it. Linux only; elsewhere nothing happens.
    """
    if sys.platform != "linux":
        return True
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(with_signal), 0, 0, 0)
    return os.getppid() == expected_parent


def limit_the_end(grace_s: float, *, exit_code: int) -> None:
    """This process ends with `exit_code` after `grace_s`, unless it has ended before."""
    limit = threading.Timer(grace_s, os._exit, args=(exit_code,))
    limit.daemon = True
    limit.start()
    # A call into a device's library may hang with the interpreter's lock held, and the timer with it. This limit needs no
    # lock; its exit code is 1.
    faulthandler.dump_traceback_later(grace_s + _LOCK_FREE_MARGIN_S, exit=True)


@dataclass(frozen=True, slots=True)
class Stat:
    """One line of the kernel on a process, or on one thread of it. Source: proc(5), `stat`; PF_EXITING of linux/sched.h."""

    name: str
    state: str  # one letter; see proc(5)
    parent: int
    exiting: bool  # whether it is past the point of return: nothing of its program runs any more
    num_threads: int
    started: int  # when it was started, in ticks of the kernel: with it a number that is used again is told apart
    status: int  # how it ends, as `os.wait` would tell; 0 also where it does not end, or that is a secret here


def read_stat(folder: Path) -> Stat | None:
    """Of a process or thread by its folder in /proc; None if it is gone."""
    try:
        head, _, tail = (folder / "stat").read_text(errors="replace").rpartition(")")
        fields = tail.split()
        exiting = fields[0] in "ZX" or bool(int(fields[6]) & _PF_EXITING)
        num_threads, started, status = int(fields[17]), int(fields[19]), int(fields[49])
        return Stat(head.partition("(")[2], fields[0], int(fields[1]), exiting, num_threads, started, status)
    except (OSError, ValueError, IndexError):
        return None


@dataclass(frozen=True, slots=True)
class Process:
    """A process, told apart from a later one of the same number."""

    pid: int
    started: int


def identify(pid: int, *, proc: Path = PROC) -> Process | None:
    """None if it is gone; one that has ended is there until its parent has asked for it."""
    stat = read_stat(proc / str(pid))
    return Process(pid, stat.started) if stat is not None else None


def early_exit_code(process: Process, *, parent: int, proc: Path = PROC) -> int | None:
    """How a child ends that all but is gone, negative for a signal; None if it is not so far, or ends well.

    `parent` is its parent: where /proc shows the processes of another namespace, strangers have the same numbers.
    """
    stat = read_stat(proc / str(process.pid))
    if stat is None or (stat.started, stat.parent) != (process.started, parent):
        return None
    # Of one that ends well the kernel says the same as of one whose status it hides.
    if stat.status == 0 or not stat.exiting or runs(process.pid, proc=proc):
        return None
    return os.waitstatus_to_exitcode(stat.status)


def runs(pid: int, *, proc: Path = PROC) -> bool:
    """Whether a thread of it may still do anything of its program's."""
    stat = read_stat(proc / str(pid))
    if stat is None:
        return False
    threads = read_threads(pid, proc=proc)
    # A list may lack some when one of them ends while it is made.
    return len(threads) < stat.num_threads or any(not one.exiting for one in threads.values())


def read_threads(pid: int, *, proc: Path = PROC) -> dict[Path, Stat]:
    """Of a process, by their folders in /proc and in order of their numbers; empty if it is gone."""
    try:
        folders = sorted((proc / str(pid) / "task").iterdir(), key=lambda folder: int(folder.name))
    except OSError:
        return {}
    return {folder: stat for folder in folders if (stat := read_stat(folder)) is not None}


def is_there(process: Process, *, proc: Path = PROC) -> bool:
    """Whether it holds anything: one that has ended may wait for a parent that never asks for it, as in many containers."""
    stat = read_stat(proc / str(process.pid))
    if stat is None or stat.started != process.started:
        return False
    # Its first thread may have ended while another one still waits for a device, and with it all that they share.
    return stat.state not in "ZX" or stat.num_threads > 1


def encode(processes: Iterable[Process]) -> str:
    """For an environment variable."""
    return ",".join(f"{one.pid}:{one.started}" for one in processes)


def decode(text: str) -> tuple[Process, ...]:
    """The inverse of `encode`; what cannot be read is left out."""
    pairs = [word.split(":") for word in text.split(",")]
    return tuple(Process(int(pair[0]), int(pair[1])) for pair in pairs if len(pair) == 2 and all(map(str.isdecimal, pair)))


def wait_until_gone(
    processes: Sequence[Process],
    *,
    limit_s: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
    proc: Path = PROC,
) -> list[int]:
    """Until they hold nothing any more; returns the numbers of those that still do after `limit_s`."""
    deadline = clock() + limit_s
    while left := [one.pid for one in processes if is_there(one, proc=proc)]:
        if clock() >= deadline:
            break
        sleep(_PAUSE_S)
    return left


class WaitNotice:
    """One wait, which begins when this is made."""

    def __init__(self, print_line: Callable[[str], None], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._say = print_line
        self._clock = clock
        self._began_s = clock()
        self._next_s = self._began_s + FIRST_S

    def tell(self, what: Callable[[], str], *, until_s: float | None) -> None:
        """Call this again and again while waiting; `until_s` of the clock is when the wait is given up, if that is known."""
        now_s = self._clock()
        if now_s < self._next_s:
            return
        self._next_s = now_s + AGAIN_S
        limit = "" if until_s is None else f", {max(0.0, until_s - now_s):.0f} s more at most"
        self._say(f"waiting for {what()} ({now_s - self._began_s:.0f} s so far{limit})")


def describe_process(pid: int, *, proc: Path = PROC) -> str:
    """A process by its number, and what keeps it from running, if anything does."""
    stat = read_stat(proc / str(pid))
    if stat is None:
        return f"process {pid}, which is gone"
    if stat.state in "Tt":
        return f"process {pid}, which is stopped; `kill -CONT {pid}` resumes it"
    return f"process {pid}"
