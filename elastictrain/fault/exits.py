"""How processes end: what /proc shows of them, waits for previous workers, and a limit on this process's own end.

A killed worker may take seconds to release its device and its memory. Its program no longer runs, and its exit code is known,
but `wait()` returns only after the release. A long wait reports its reason, so that a user does not take it for a hang.
"""

import faulthandler
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from elastictrain.identity import Identity
from elastictrain.processes import PROC, Stat, read_stat

_LOCK_FREE_MARGIN_S = 1.0
_PAUSE_S = 0.01

FIRST_S = 5.0  # a shorter wait is not reported
AGAIN_S = 30.0
PREVIOUS_EXIT_TIMEOUT_S = 30.0  # how long previous workers may delay a start: some end only when a device has answered


def wait_for_previous_workers(identity: Identity, *, poll: Callable[[], None] = lambda: None) -> list[int]:
    """Wait until no previous worker holds anything on this host; return the pids that still do after half a minute.

    An error that `poll` raises ends the wait.
    """

    def pause(seconds: float) -> None:
        poll()
        time.sleep(seconds)

    processes = decode(identity.launcher.previous_workers) if identity.launcher is not None else ()
    return wait_until_gone(processes, limit_s=PREVIOUS_EXIT_TIMEOUT_S, sleep=pause)


def limit_the_end(grace_s: float, *, exit_code: int) -> None:
    """End this process with `exit_code` after `grace_s`, unless it has ended before."""
    limit = threading.Timer(grace_s, os._exit, args=(exit_code,))
    limit.daemon = True
    limit.start()
    # A call into a device's library may hang with the interpreter's lock held, and the timer with it. This limit needs no
    # lock; its exit code is 1.
    faulthandler.dump_traceback_later(grace_s + _LOCK_FREE_MARGIN_S, exit=True)


@dataclass(frozen=True, slots=True)
class Process:
    """A process, distinct from a later one with the same pid."""

    pid: int
    started: int


def identify(pid: int, *, proc: Path = PROC) -> Process | None:
    """None if it does not exist; a zombie exists until its parent reaps it."""
    stat = read_stat(proc / str(pid))
    return Process(pid, stat.started) if stat is not None else None


def early_exit_code(process: Process, *, parent: int, proc: Path = PROC) -> int | None:
    """Exit code of a child that has all but ended, negative for a signal; None if it still runs, or ends with status 0.

    `parent` must be its parent: where /proc shows another pid namespace, strangers have the same pids.
    """
    stat = read_stat(proc / str(process.pid))
    if stat is None or (stat.started, stat.parent) != (process.started, parent):
        return None
    # Status 0 means success, or that the kernel hides the status.
    if stat.status == 0 or not stat.exiting or runs(process.pid, proc=proc):
        return None
    return os.waitstatus_to_exitcode(stat.status)


def runs(pid: int, *, proc: Path = PROC) -> bool:
    """Whether a thread of it may still run code of its program."""
    stat = read_stat(proc / str(pid))
    if stat is None:
        return False
    threads = read_threads(pid, proc=proc)
    # A listing may lack threads if one of them ends meanwhile.
    return len(threads) < stat.num_threads or any(not one.exiting for one in threads.values())


def read_threads(pid: int, *, proc: Path = PROC) -> dict[Path, Stat]:
    """The threads of a process by folder in /proc, in order of their numbers; empty if it does not exist."""
    try:
        folders = sorted((proc / str(pid) / "task").iterdir(), key=lambda folder: int(folder.name))
    except OSError:
        return {}
    return {folder: stat for folder in folders if (stat := read_stat(folder)) is not None}


def is_there(process: Process, *, proc: Path = PROC) -> bool:
    """Whether it holds anything. A zombie does not; its parent may never reap it, as in many containers."""
    stat = read_stat(proc / str(process.pid))
    if stat is None or stat.started != process.started:
        return False
    # Its first thread may have ended while another one waits for a device, and keeps everything that they share.
    return stat.state not in "ZX" or stat.num_threads > 1


def encode(processes: Iterable[Process]) -> str:
    return ",".join(f"{one.pid}:{one.started}" for one in processes)


def decode(text: str) -> tuple[Process, ...]:
    """The inverse of `encode`; invalid parts are skipped."""
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
    """Wait until the processes hold nothing any more; return the pids of those that still do after `limit_s`."""
    deadline = clock() + limit_s
    while left := [one.pid for one in processes if is_there(one, proc=proc)]:
        if clock() >= deadline:
            break
        sleep(_PAUSE_S)
    return left


class WaitNotice:
    """Reports one wait, which begins when this is made."""

    def __init__(self, print_line: Callable[[str], None], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._say = print_line
        self._clock = clock
        self._began_s = clock()
        self._next_s = self._began_s + FIRST_S

    def tell(self, what: Callable[[], str], *, until_s: float | None) -> None:
        """Call repeatedly while waiting; `until_s` (of `clock`) is when the wait is given up, if that is known."""
        now_s = self._clock()
        if now_s < self._next_s:
            return
        self._next_s = now_s + AGAIN_S
        limit = "" if until_s is None else f", {max(0.0, until_s - now_s):.0f} s more at most"
        self._say(f"waiting for {what()} ({now_s - self._began_s:.0f} s so far{limit})")


def describe_process(pid: int, *, proc: Path = PROC) -> str:
    """A process, and what keeps it from running, if anything does."""
    stat = read_stat(proc / str(pid))
    if stat is None:
        return f"process {pid}, which is gone"
    if stat.state in "Tt":
        return f"process {pid}, which is stopped; `kill -CONT {pid}` resumes it"
    return f"process {pid}"
