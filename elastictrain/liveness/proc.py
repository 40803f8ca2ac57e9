"""What the kernel tells of a process that does not speak for itself."""

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from elastictrain.fault.exits import read_stat

_STATES = {
    "R": "runs",
    "S": "sleeps",
    "D": "waits for a disk or a file server, and cannot even be killed",
    "T": "is stopped by a signal",
    "t": "is stopped by a debugger",
    "Z": "has ended",
}


@dataclass(frozen=True, slots=True)
class Task:
    """A process, or one thread of it."""

    pid: int
    name: str
    state: str
    """One letter; see proc(5)."""

    parent: int
    exiting: bool
    """Whether it is past the point of return: giving back what it held of a GPU can take it long after that."""

    where: str
    """The function of the kernel in which it waits; empty if it does not, or that is a secret here."""

    def __str__(self) -> str:
        where = f" in {self.where}" if self.where else ""
        return f"{self.name} ({self.pid}) {_STATES.get(self.state, f'is in state {self.state}')}{where}"


def look_at(pid: int, *, proc: Path = Path("/proc")) -> Task | None:
    """A process or thread; None if it is gone."""
    stat = read_stat(proc / str(pid))
    return Task(pid, stat.name, stat.state, stat.parent, stat.exiting, _where(proc / str(pid))) if stat is not None else None


def describe_process(pid: int, *, proc: Path = Path("/proc")) -> str:
    """A process, its threads and the processes that it has started, one on a line."""
    lines = [f"  {task}" for task in _threads(pid, proc=proc)]
    lines += [f"  its child {task}" for task in _children(pid, proc=proc)]
    return "\n".join(lines)


def _threads(pid: int, *, proc: Path) -> Iterator[Task]:
    with suppress(OSError):
        for name in sorted(os.listdir(proc / str(pid) / "task"), key=int):  # noqa: PTH208
            if (task := look_at(int(name), proc=proc / str(pid) / "task")) is not None:
                yield task


def _children(pid: int, *, proc: Path) -> Iterator[Task]:
    for name in os.listdir(proc):  # noqa: PTH208
        if name.isdecimal() and (task := look_at(int(name), proc=proc)) is not None and task.parent == pid:
            yield task


def _where(folder: Path) -> str:
    with suppress(OSError):
        where = (folder / "wchan").read_text().strip()
        return "" if where == "0" else where
    return ""
