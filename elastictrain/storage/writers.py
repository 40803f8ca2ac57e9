"""Processes, each told apart from every other one by a name, and whether they are gone.

A name carries boot of the machine, pid namespace, pid, and when the process started. Whoever shares boot and namespace with it
can tell for certain that it is gone; anybody else cannot.
"""

import os
from pathlib import Path

_PROC = Path("/proc")
_STATE, _THREADS, _STARTED = 0, 17, 19


def process_name(pid: int | None = None) -> str:
    """Of a process of this host, or of the calling one; '' where the system does not tell (no /proc)."""
    pid = os.getpid() if pid is None else pid
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        namespace = (_PROC / "self/ns/pid").readlink().name.strip("pid:[]")
    except OSError:
        return ""
    fields = _fields_of(_PROC / str(pid))
    return f"{boot}.{namespace}.{pid}.{fields[_STARTED] if fields else 0}"


def is_dead(name: str, *, here: str, proc: Path = _PROC) -> bool:
    """Whether a process is certainly gone, or has ended and was not asked for; false for one that cannot be seen from here.

    `here` is the name of the calling process.
    """
    parts = name.split(".")
    if len(parts) != 4 or parts[:2] != here.split(".")[:2] or not parts[2].isdecimal():
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
