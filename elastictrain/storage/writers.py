"""Unique names of processes, and whether a named process has ended.

A name holds the machine's boot id, pid namespace, pid and start time. Only a process with the same boot id and namespace can
be certain that the named one has ended.
"""

import os
from pathlib import Path

_PROC = Path("/proc")
_STATE, _THREADS, _STARTED = 0, 17, 19


def process_name(pid: int | None = None) -> str:
    """Name of a process of this host, by default the calling one; '' where /proc does not show it."""
    pid = os.getpid() if pid is None else pid
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        namespace = (_PROC / "self/ns/pid").readlink().name.strip("pid:[]")
    except OSError:
        return ""
    fields = _fields_of(_PROC / str(pid))
    if fields is None and pid == os.getpid():
        # /proc is that of another pid namespace: no process could tell from this name whether this one lives.
        return ""
    return f"{boot}.{namespace}.{pid}.{fields[_STARTED] if fields else 0}"


def is_dead(name: str, *, here: str, proc: Path = _PROC) -> bool:
    """Whether the process has certainly ended, reaped or not; False if it is not visible from `here`, the caller's name."""
    parts = name.split(".")
    if len(parts) != 4 or parts[:2] != here.split(".")[:2] or not parts[2].isdecimal():
        return False
    try:
        fields = _fields_of(proc / parts[2])
    except OSError:
        return False
    if fields is None:
        return True
    # When the first thread of a process has ended, others may still run.
    return fields[_STARTED] != parts[3] or (fields[_STATE] in "ZX" and int(fields[_THREADS]) <= 1)


def _fields_of(folder: Path) -> list[str] | None:
    """Fields of the process's `stat` file from the third on; None if there is no such process. Raises: OSError."""
    try:
        # The second field, the program's name in parentheses, may itself contain spaces and parentheses.
        return (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
