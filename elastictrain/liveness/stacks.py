"""Where all threads of a host's processes are, from the processes themselves, from py-spy, or from the kernel."""

import faulthandler
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from elastictrain.fault.exits import read_threads
from elastictrain.processes import PROC, Stat, read_stat

STACKS_SIGNAL = signal.SIGRTMIN + 5  # asks a worker for its stacks; torchrun, clusters and our libraries do not use it

_PATIENCE_S = 1.0
_QUIET_S = 0.05
_PY_SPY_S = 5.0
_LONGEST_BYTES = 1 << 20

_STATES = {
    "R": "runs",
    "S": "sleeps",
    "D": "waits for a disk or a file server, and cannot even be killed",
    "T": "is stopped by a signal",
    "t": "is stopped by a debugger",
    "Z": "has ended",
}


def describe_process(pid: int, *, proc: Path = PROC) -> str:
    """A process, its threads and its child processes, one on a line."""
    lines = [f"  {_describe(folder, stat)}" for folder, stat in read_threads(pid, proc=proc).items()]
    for name in filter(str.isdecimal, os.listdir(proc)):  # noqa: PTH208
        if (stat := read_stat(proc / name)) is not None and stat.parent == pid:
            lines.append(f"  its child {_describe(proc / name, stat)}")
    return "\n".join(lines)


def _describe(folder: Path, stat: Stat) -> str:
    where = ""
    # The function of the kernel in which it waits; 0 if it does not wait, or if this user may not see it.
    with suppress(OSError):
        where = (folder / "wchan").read_text().strip()
    waits = f" in {where}" if where not in ("", "0") else ""
    return f"{stat.name} ({folder.name}) {_STATES.get(stat.state, f'is in state {stat.state}')}{waits}"


def stacks_path(folder: str, rank: int) -> str:
    return f"{folder}/r{rank:05d}.stacks"


def dump_stacks_on_signal(folder: str, rank: int) -> TextIO:
    """Answer `STACKS_SIGNAL` from now on. Call from the main thread and keep the file open. Raises: OSError."""
    # A reader that finds the file may ask at once, and an unhandled signal would end this process. `unregister` also restores
    # what is set here.
    signal.signal(STACKS_SIGNAL, signal.SIG_IGN)
    # Opened now, because the handler cannot open files. It needs no lock, so it works while a thread never releases the
    # interpreter's lock.
    ours = os.O_CLOEXEC | os.O_NOFOLLOW
    path = stacks_path(folder, rank)
    file = open(path, "w", opener=lambda name, flags: os.open(name, flags | ours, 0o600))  # noqa: SIM115
    faulthandler.register(STACKS_SIGNAL, file=file, all_threads=True, chain=False)
    return file


def stop_stack_dumps(file: TextIO) -> None:
    """Ignore the signal again, as before there was a handler, and delete the file."""
    faulthandler.unregister(STACKS_SIGNAL)
    file.close()
    with suppress(OSError):
        os.unlink(file.name)  # noqa: PTH108


def take_stacks(folder: str, ranks: Sequence[tuple[int, int]], *, patience_s: float = _PATIENCE_S) -> str:
    """The stacks of `(rank, pid)` of this host as text, within a bounded time. Never raises."""
    spy = shutil.which("py-spy")
    deadline = time.monotonic() + (patience_s if spy is None else _PY_SPY_S)
    sizes = [_ask(folder, rank, pid) for rank, pid in ranks] if spy is None else []
    parts = []
    for place, (rank, pid) in enumerate(ranks):
        if spy is None:
            own = _answer(folder, rank, sizes[place], deadline=deadline)
        else:
            own = _spy(spy, pid, limit_s=max(0.1, deadline - time.monotonic()))
        told = own or "(it does not tell its own stacks)\n"
        parts.append(f"rank {rank}, process {pid}, as the kernel sees it:\n{describe_process(pid)}\n{told}")
    return "\n".join(parts)


def _ask(folder: str, rank: int, pid: int) -> int:
    """Ask a worker for its stacks; return the size of its file before, or -1 if it cannot answer."""
    try:
        size = os.stat(stacks_path(folder, rank)).st_size  # noqa: PTH116  # a worker without the file has no handler
        stat = read_stat(PROC / str(pid))
        if stat is None or stat.state in "TtZ":
            return -1
        os.kill(pid, STACKS_SIGNAL)
    except OSError:
        return -1
    return size


def _answer(folder: str, rank: int, before: int, *, deadline: float) -> str:
    if before < 0:
        return ""
    size, told = before, b""
    with suppress(OSError), open(stacks_path(folder, rank), "rb") as file:  # noqa: PTH123
        while time.monotonic() < deadline:
            time.sleep(_QUIET_S)
            now = os.fstat(file.fileno()).st_size
            # The answer is complete when the file has stopped growing.
            if now == size > before:
                break
            size = now
        file.seek(before)
        told = file.read(_LONGEST_BYTES)
    return told.decode(errors="replace")


def _spy(program: str, pid: int, *, limit_s: float) -> str:
    # Without a pause of the process: py-spy would have to continue a process that is already stopped.
    command = [program, "dump", "--nonblocking", "--pid", str(pid)]
    try:
        done = subprocess.run(command, capture_output=True, timeout=limit_s, check=False, stdin=subprocess.DEVNULL)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode(errors="replace") if done.returncode == 0 else ""
