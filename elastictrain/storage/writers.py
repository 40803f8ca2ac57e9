"""Processes, each told apart from every other one by a name, and whether they are gone.

A name carries boot of the machine, pid namespace, pid, and when the process started. Whoever shares boot and namespace with it
can tell for certain that it is gone; anybody else cannot.
"""

import os
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_STATE, _THREADS, _STARTED = 0, 17, 19


@dataclass(frozen=True, slots=True)
class Writer:
    """A process."""

    boot: str
    namespace: str
    pid: int
    started: str

    @property
    def name(self) -> str:
        """In one word."""
        return f"{self.boot}.{self.namespace}.{self.pid}.{self.started}"


def this_writer() -> Writer | None:
    """The calling process; None where the system does not tell (no /proc)."""
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        namespace = (_PROC / "self/ns/pid").readlink().name.strip("pid:[]")
    except OSError:
        return None
    started = start_of(os.getpid())
    return Writer(boot, namespace, os.getpid(), started) if started else None


def start_of(pid: int) -> str | None:
    """When a process began, in clock ticks since boot; None if there is no such process."""
    fields = _fields_of(_PROC / str(pid))
    return fields[_STARTED] if fields else None


def is_dead(name: str, *, here: Writer | None, proc: Path = _PROC) -> bool:
    """Whether a process is certainly gone, or has ended and was not asked for; false for one that cannot be seen from here."""
    parts = name.split(".")
    if here is None or len(parts) != 4 or parts[:2] != [here.boot, here.namespace] or not parts[2].isdecimal():
        return False
    try:
        fields = _fields_of(proc / parts[2])
    except OSError:
        return False
    if fields is None:
        return True
    # Where its first thread has ended, another one may live.
    return fields[_STARTED] != parts[3] or (fields[_STATE] in "ZX" and int(fields[_THREADS]) <= 1)


def _fields_of(folder: Path) -> list[str] | None:
    """From the third field of a process's `stat` on; None if there is no such process. Raises: OSError."""
    try:
        # The second field is the name of the program, in parentheses, and may itself contain spaces and parentheses.
        return (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
