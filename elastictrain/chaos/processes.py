"""Processes that chaos, and the tests of whole runs, start, watch and end."""

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Protocol

import psutil

import elastictrain
from elastictrain.errors import ElasticTrainError

SOURCES = Path(elastictrain.__file__).parents[1]
"""The folder that has the package: a checkout, or site-packages."""

_GONE = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
_POLL_S = 0.02
_KILL_LIMIT_S = 60.0


class StuckError(ElasticTrainError):
    """Something that must happen within a limit has not: a bug of ours, or of whoever wrote the test."""


class ProcessHandle(Protocol):
    """The part of subprocess.Popen that is used here."""

    @property
    def pid(self) -> int: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...


@dataclass(slots=True)
class StartedProcess:
    """A process with its output."""

    process: ProcessHandle
    log: Path

    def wait(self, timeout_s: float = 240) -> int:
        """Exit code. Raises: StuckError if it takes longer; the whole tree is killed then."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill_tree()
            raise StuckError(f"not finished within {timeout_s} s:\n{self.output()[-4000:]}") from None

    def output(self) -> str:
        """Everything printed so far."""
        return self.log.read_text(errors="replace")

    def family(self) -> list[psutil.Process]:
        """Its living descendants, and itself at the end."""
        try:
            own = psutil.Process(self.process.pid)
            return [*own.children(recursive=True), own]
        except psutil.NoSuchProcess:
            return []

    def workers(self) -> list[psutil.Process]:
        """Living worker processes, in order of rank."""
        return workers_among(self.family())

    def kill_tree(self) -> None:
        """End everything it started, and itself."""
        for member in self.family():
            with suppress(psutil.NoSuchProcess):
                member.kill()


def start_process(command: Sequence[str], *, log: Path, cwd: Path, environment: Mapping[str, str]) -> StartedProcess:
    """Start a process whose output is appended to `log`."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=dict(environment), cwd=cwd)  # noqa: S603
    return StartedProcess(process, log)


def child_environment(extra: Mapping[str, str] = {}) -> dict[str, str]:
    """For child processes: one thread, a resolver that gives up quickly, our package on the path."""
    # The last one is set by what compiles within this process.
    own = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHINDUCTOR_CACHE_DIR")
    kept = {name: value for name, value in os.environ.items() if name not in own}
    path = os.pathsep.join(filter(None, [str(SOURCES), os.environ.get("PYTHONPATH")]))
    return {**kept, "OMP_NUM_THREADS": "1", "RES_OPTIONS": "timeout:1 attempts:1", "PYTHONPATH": path, **extra}


def rank_of(process: psutil.Process, *, program: str = "elastictrain") -> int | None:
    """Of a worker: one that a fork server or torchrun forked is named after it, any other has it in its environment."""
    if named := re.fullmatch(r"rank (\d+)", process.name()):
        return int(named[1])
    rank = process.environ().get("RANK")
    return int(rank) if rank is not None and program in " ".join(process.cmdline()) else None


def workers_among(processes: Iterable[psutil.Process], *, program: str = "elastictrain") -> list[psutil.Process]:
    """Those that are living workers, in order of rank; the first of each rank."""
    ranks: dict[int, psutil.Process] = {}
    for process in sorted(processes, key=lambda one: one.pid, reverse=True):
        with suppress(psutil.Error):
            if process.status() not in _GONE and (rank := rank_of(process, program=program)) is not None:
                ranks[rank] = process
    return [ranks[rank] for rank in sorted(ranks)]


def savers(below: Path | str) -> list[psutil.Process]:
    """Savers whose host memory lies below a folder; they outlive their launcher."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            line = process.cmdline()
            if "elastictrain.checkpoint.saver" in line and line[-1].startswith(f"{below}/"):
                found.append(process)
    return found


def send_signal(processes: Iterable[psutil.Process], number: int) -> None:
    """To each that still lives."""
    for process in processes:
        with suppress(psutil.Error):
            process.send_signal(number)


def kill_all(living: Callable[[], Collection[int]]) -> None:
    """SIGKILL until nobody is left: a process may have had a child after it was looked for. Raises: StuckError."""
    deadline = time.monotonic() + _KILL_LIMIT_S
    while pids := living():
        if time.monotonic() > deadline:
            raise StuckError(f"processes {sorted(pids)} do not end within {_KILL_LIMIT_S:g} s of SIGKILL")
        # All stop first: as on a host that loses its power, nobody sees another process end, and tells of it.
        for number, pid in product((signal.SIGSTOP, signal.SIGKILL), pids):
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        time.sleep(0.01)


def wait_until(condition: Callable[[], object], *, timeout_s: float, what: str) -> None:
    """Poll until it holds. Raises: StuckError."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise StuckError(f"{what} did not come within {timeout_s:g} s")
        time.sleep(_POLL_S)
