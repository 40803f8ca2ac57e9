"""Mounts, and the limits of control groups for this process: CPUs, memory, processes; versions 1, 2 or both.

A limit may be set on any level, and a child never has more than its parents, so the tightest of all visible levels counts.
Inside a container neither the levels above it nor the path in /proc are visible.

Source: proc_pid_mountinfo(5); cgroups(7); admin-guide/cgroup-v1 (memory, cpu) and admin-guide/cgroup-v2 of the kernel.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

_HERE = Path("/")
_DEFAULT_POINT = "/sys/fs/cgroup"
_UNLIMITED_BYTES = 1 << 60  # version 1 writes "no limit" as the largest multiple of a page that fits 63 bits
_OCTAL = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, slots=True)
class Mount:
    """One mount. `root`: folder of its file system that is visible at `point`; `options`: those of the file system."""

    root: str
    point: str
    kind: str
    options: frozenset[str]


def read_mounts(root: Path = _HERE) -> list[Mount]:
    """All mounts that this process sees, in order; empty if the kernel does not list them. Malformed lines are skipped."""
    found = []
    for line in _text(root, "proc/self/mountinfo").splitlines():
        fields, separator, behind = line.partition(" - ")
        before, after = fields.split(), behind.split()
        if separator and len(before) >= 6 and len(after) >= 2:
            options = frozenset(after[2].split(",") if len(after) > 2 else ())
            found.append(Mount(_plain(before[3]), _plain(before[4]), after[0], options))
    return found


def mount_of(path: str, mounts: Sequence[Mount]) -> Mount | None:
    """The mount of an absolute path; of several at one point the last one hides the others."""
    points = [(mount.point.rstrip("/"), mount) for mount in reversed(mounts)]
    fitting = [(len(point), mount) for point, mount in points if path == point or path.startswith(f"{point}/")]
    return max(fitting, key=lambda one: one[0], default=(0, None))[1]


def _plain(text: str) -> str:
    """Decode the kernel's octal escapes of space, tab, newline and backslash."""
    return _OCTAL.sub(lambda match: chr(int(match[1], 8)), text)


@dataclass(frozen=True, slots=True)
class Throttling:
    """How often processes had used up their share of the CPUs, since the control group was created."""

    periods: int
    throttled_periods: int


@dataclass(frozen=True, slots=True)
class MemoryGroup:
    """A memory limit. `used_bytes` excludes file pages that the kernel can drop at once."""

    limit_bytes: int
    used_bytes: int

    @property
    def free_bytes(self) -> int:
        """Memory below the limit; 0 if more than the limit is used."""
        return max(0, self.limit_bytes - self.used_bytes)


@dataclass(frozen=True, slots=True)
class ProcessGroup:
    """A limit on the number of processes and threads."""

    limit: int
    used: int


@dataclass(frozen=True, slots=True)
class Allowance:
    """The limits of control groups; None where they set none, or it is unknown."""

    cpus: float | None = None
    throttling: Throttling | None = None
    memory: MemoryGroup | None = None
    processes: ProcessGroup | None = None


def read_allowance(root: Path = _HERE) -> Allowance:
    """The tightest limits of all visible levels."""
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
        # Of the most throttled level: a parent's counters do not include those of its children.
        throttling=max(throttling, key=lambda one: one.throttled_periods, default=None),
        memory=min(memory_groups(root), key=lambda group: group.free_bytes, default=None),
        processes=min(processes, key=lambda group: group.limit - group.used, default=None),
    )


def memory_groups(root: Path = _HERE) -> list[MemoryGroup]:
    """Each level that limits memory, this process's own group first."""
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
    """Parse /proc/self/cgroup: path of the own group by controller of version 1, and by "" of version 2."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        number, _, rest = line.partition(":")
        controllers, separator, path = rest.partition(":")
        if number.isdecimal() and separator and path.startswith("/") and "\0" not in path:
            for controller in controllers.split(","):
                found.setdefault(controller, path)
    return found


def _levels(root: Path, controller: str) -> Iterator[tuple[int, Callable[[str], str]]]:
    """From the own group of a controller to the topmost mounted level: version, and a reader of its files."""
    mounts, own = read_mounts(root), parse_membership(_text(root, "proc/self/cgroup"))
    # A controller in version 1 is not in version 2.
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
    # A container often sees its own group as the root of the mount, while /proc has the path on the host, or one outside of
    # the mount.
    top = root / point.lstrip("/")
    if ".." in parts or not top.joinpath(*parts).is_dir():
        parts = []
    for depth in range(len(parts), -1, -1):
        yield version, partial(_text, top.joinpath(*parts[:depth]))


def _numbers(text: str) -> dict[str, int]:
    """Numbers of lines `name number`; other lines are skipped."""
    rows = (line.partition(" ") for line in text.splitlines())
    return {name: number for name, _, value in rows if (number := _whole(value)) is not None}


def _whole(text: str) -> int | None:
    """A whole number of at most 20 digits; else None."""
    text = text.strip()
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= 20 else None


def _text(folder: Path, name: str) -> str:
    """Empty if it cannot be read."""
    try:
        return (folder / name).read_text(errors="replace").strip()
    except OSError:
        return ""
