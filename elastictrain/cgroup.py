"""What is mounted where, and what control groups allow this process: CPUs, memory, processes, in versions 1, 2 or both.

A limit may be set on any level, and a child never has more than its parents: so the tightest of all levels that can be seen
counts. Inside a container the levels above it cannot be seen, nor the path that /proc names.

Source: proc_pid_mountinfo(5); cgroups(7); admin-guide/cgroup-v1 (memory, cpu) and admin-guide/cgroup-v2 of the kernel.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

_HERE = Path("/")
_DEFAULT_POINT = "/sys/fs/cgroup"
_UNLIMITED_BYTES = 1 << 60  # version 1 says "no limit" as the largest multiple of a page that fits 63 bits
_OCTAL = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, slots=True)
class Mount:
    """One mount. `root` is the folder of its file system that is seen at `point`; `options` are those of the file system."""

    root: str
    point: str
    kind: str
    options: frozenset[str]


def read_mounts(root: Path = _HERE) -> list[Mount]:
    """All mounts that this process sees, in order; none if the kernel does not tell. Lines that make no sense are left out."""
    found = []
    for line in _text(root, "proc/self/mountinfo").splitlines():
        fields, separator, behind = line.partition(" - ")
        before, after = fields.split(), behind.split()
        if separator and len(before) >= 6 and len(after) >= 2:
            options = frozenset(after[2].split(",") if len(after) > 2 else ())
            found.append(Mount(_plain(before[3]), _plain(before[4]), after[0], options))
    return found


def mount_of(path: str, mounts: Sequence[Mount]) -> Mount | None:
    """The mount on which an absolute path lies; of several at one point the last one hides the others."""
    points = [(mount.point.rstrip("/"), mount) for mount in reversed(mounts)]
    fitting = [(len(point), mount) for point, mount in points if path == point or path.startswith(f"{point}/")]
    return max(fitting, key=lambda one: one[0], default=(0, None))[1]


def _plain(text: str) -> str:
    """The kernel writes space, tab, newline and backslash as octal numbers."""
    return _OCTAL.sub(lambda match: chr(int(match[1], 8)), text)


@dataclass(frozen=True, slots=True)
class Throttling:
    """How often processes had used up their share of the CPUs, since the control group was made."""

    periods: int
    throttled_periods: int


@dataclass(frozen=True, slots=True)
class MemoryGroup:
    """A limit of memory. `used_bytes` is without files that can be dropped from memory at once."""

    limit_bytes: int
    used_bytes: int

    @property
    def free_bytes(self) -> int:
        """What may still be taken; 0 where more than the limit is used."""
        return max(0, self.limit_bytes - self.used_bytes)


@dataclass(frozen=True, slots=True)
class ProcessGroup:
    """A limit on the number of processes and threads."""

    limit: int
    used: int


@dataclass(frozen=True, slots=True)
class Allowance:
    """What control groups allow; None where they set no limit, or where nothing is known."""

    cpus: float | None = None
    throttling: Throttling | None = None
    memory: MemoryGroup | None = None
    processes: ProcessGroup | None = None


def read_allowance(root: Path = _HERE) -> Allowance:
    """The tightest limits of all levels that can be seen."""
    cpus, throttling, processes = list[float](), list[Throttling](), list[ProcessGroup]()
    for version, text in _levels(root, "cpu"):
        quota, _, period = text("cpu.max").partition(" ")
        if version == 1:
            quota, period = text("cpu.cfs_quota_us"), text("cpu.cfs_period_us")
        # No limit is "max" or -1, which are no whole numbers.
        if (quota_us := _whole(quota)) and (period_us := _whole(period)):
            cpus.append(quota_us / period_us)
        numbers = _numbers(text("cpu.stat"))
        if {"nr_periods", "nr_throttled"} <= numbers.keys():
            throttling.append(Throttling(numbers["nr_periods"], numbers["nr_throttled"]))
    for _, text in _levels(root, "pids"):
        limit, used = _whole(text("pids.max")), _whole(text("pids.current"))
        if limit is not None and used is not None:
            processes.append(ProcessGroup(limit, used))
    return Allowance(
        cpus=min(cpus, default=None),
        # Of the level that was throttled most: the counters of a parent do not contain those of its children.
        throttling=max(throttling, key=lambda one: one.throttled_periods, default=None),
        memory=min(memory_groups(root), key=lambda group: group.free_bytes, default=None),
        processes=min(processes, key=lambda group: group.limit - group.used, default=None),
    )


def memory_groups(root: Path = _HERE) -> list[MemoryGroup]:
    """Each level that limits memory, the own group first."""
    found = []
    for version, text in _levels(root, "memory"):
        names = ("memory.max", "memory.current", "inactive_file")
        if version == 1:
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        limit, used = _whole(text(names[0])), _whole(text(names[1]))
        if limit is not None and limit < _UNLIMITED_BYTES and used is not None:
            found.append(MemoryGroup(limit, max(0, used - _numbers(text("memory.stat")).get(names[2], 0))))
    return found


def parse_membership(text: str) -> Mapping[str, str]:
    """From a text like /proc/self/cgroup: path of the own group by controller of version 1, and by "" of version 2."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        number, _, rest = line.partition(":")
        controllers, separator, path = rest.partition(":")
        if number.isdecimal() and separator and path.startswith("/") and "\0" not in path:
            for controller in controllers.split(","):
                found.setdefault(controller, path)
    return found


def _levels(root: Path, controller: str) -> Iterator[tuple[int, Callable[[str], str]]]:
    """From the own group of a controller up to the uppermost that is mounted: its version, and what reads one of its files."""
    mounts, own = read_mounts(root), parse_membership(_text(root, "proc/self/cgroup"))
    # Where a controller is in version 1, it is not in version 2.
    version = 1 if controller in own else 2
    if version == 1:
        path, default = own[controller], f"{_DEFAULT_POINT}/{controller}"
        fitting = [mount for mount in mounts if mount.kind == "cgroup" and controller in mount.options]
    else:
        path, default = own.get("", "/"), _DEFAULT_POINT
        fitting = [mount for mount in mounts if mount.kind == "cgroup2"]
    mount = fitting[-1] if fitting else Mount("/", default, "", frozenset())
    point, seen = mount.point.rstrip("/"), mount.root.rstrip("/")
    if "\0" in point:
        return
    inner = path[len(seen) :] if path == seen or path.startswith(f"{seen}/") else path
    parts = [part for part in inner.split("/") if part]
    # A container often sees its own group as the root of the mount, while /proc still tells the path on the host, or one that
    # leads out of what is mounted.
    top = root / point.lstrip("/")
    if ".." in parts or not top.joinpath(*parts).is_dir():
        parts = []
    for depth in range(len(parts), -1, -1):
        yield version, partial(_text, top.joinpath(*parts[:depth]))


def _numbers(text: str) -> dict[str, int]:
    """Of lines `name number`; other lines are left out."""
    rows = (line.partition(" ") for line in text.splitlines())
    return {name: number for name, _, value in rows if (number := _whole(value)) is not None}


def _whole(text: str) -> int | None:
    """A whole number of a size that a kernel can mean."""
    text = text.strip()
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= 20 else None


def _text(folder: Path, name: str) -> str:
    """Empty if it cannot be read."""
    try:
        return (folder / name).read_text(errors="replace").strip()
    except OSError:
        return ""
