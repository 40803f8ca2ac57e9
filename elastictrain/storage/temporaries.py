"""Names of unfinished local files, and which of them nobody will finish.

A name carries its writer: boot of the machine, pid namespace, pid, and when that process started. Whoever shares boot and
namespace with the writer can tell for certain that it is gone; anybody else cannot, and leaves the file alone. Age says
nothing: a write may take long, and clocks of hosts differ.
"""

import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from elastictrain.storage.keys import TEMPORARY_PREFIX


@dataclass(frozen=True, slots=True)
class Writer:
    """A process, told apart from every other one."""

    boot: str
    namespace: str
    pid: int
    started: str


def this_writer() -> Writer | None:
    """The calling process; None where the system does not tell (no /proc)."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = Path("/proc/self/ns/pid").readlink().name.strip("pid:[]")
    except OSError:
        return None
    started = start_of(os.getpid())
    return Writer(boot, namespace, os.getpid(), started) if started else None


def start_of(pid: int) -> str | None:
    """When a process began, in clock ticks since boot; None if there is no such process."""
    try:
        # The second field is the name of the program, in parentheses, and may itself contain spaces and parentheses.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (FileNotFoundError, ProcessLookupError):
        return None


def temporary_name(writer: Writer | None) -> str:
    """A name that no other write has."""
    unique = secrets.token_hex(8)
    if writer is None:
        return f"{TEMPORARY_PREFIX}{unique}"
    return f"{TEMPORARY_PREFIX}{writer.boot}.{writer.namespace}.{writer.pid}.{writer.started}.{unique}"


def is_abandoned(name: str, *, here: Writer | None, start_of: Callable[[int], str | None]) -> bool:
    """Whether the writer of the temporary file `name` is certainly gone."""
    parts = name.removeprefix(TEMPORARY_PREFIX).split(".")
    if here is None or not name.startswith(TEMPORARY_PREFIX) or len(parts) != 5 or not parts[2].isdecimal():
        return False
    boot, namespace, pid, started, _ = parts
    return (boot, namespace) == (here.boot, here.namespace) and start_of(int(pid)) != started
