"""What control groups allow this process: CPUs, memory, processes. Reads version 1, version 2 and both side by side.

A limit may be set on any level, and a child never has more than its parents: so the tightest of all levels that can be seen
counts. Inside a container the levels above it cannot be seen, nor the path that /proc names.

Source: cgroups(7); admin-guide/cgroup-v1 (memory, cpu) and admin-guide/cgroup-v2 of the kernel.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from elastictrain.preflight.host.mounts import Mount, read_mounts
from elastictrain.preflight.surroundings import Surroundings

_DEFAULT_POINT = "/sys/fs/cgroup"
_UNLIMITED_BYTES = 1 << 60
"""Version 1 says "no limit" as the largest multiple of a page that fits 63 bits."""


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


@dataclass(frozen=True, slots=True)
class _Group:
    """The own group of one controller, and those above it: folders, innermost first."""

    version: int
    folders: Sequence[str]


def read_allowance(surroundings: Surroundings) -> Allowance:
    """The tightest limits of all levels that can be seen."""
    mounts, own = read_mounts(surroundings), parse_membership(surroundings.read("proc/self/cgroup") or "")
    cpu = _group("cpu", own, mounts, surroundings)
    return Allowance(
        cpus=min(_cpus(surroundings, cpu), default=None),
        throttling=_throttling(surroundings, cpu),
        memory=min(
            _memory(surroundings, _group("memory", own, mounts, surroundings)),
            key=lambda group: group.free_bytes,
            default=None,
        ),
        processes=min(
            _processes(surroundings, _group("pids", own, mounts, surroundings)),
            key=lambda group: group.limit - group.used,
            default=None,
        ),
    )


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


def _group(controller: str, own: Mapping[str, str], mounts: Sequence[Mount], surroundings: Surroundings) -> _Group:
    """Where a controller is in version 1, it is not in version 2."""
    if controller in own:
        version, path = 1, own[controller]
        fitting = [mount for mount in mounts if mount.kind == "cgroup" and controller in mount.options]
        default = f"{_DEFAULT_POINT}/{controller}"
    else:
        version, path = 2, own.get("", "/")
        fitting = [mount for mount in mounts if mount.kind == "cgroup2"]
        default = _DEFAULT_POINT
    mount = fitting[-1] if fitting else Mount("/", default, "", frozenset())
    return _Group(version, tuple(_levels(path, mount, surroundings)))


def _levels(path: str, mount: Mount, surroundings: Surroundings) -> Iterator[str]:
    """Folders from the own group up to the uppermost that is mounted."""
    point = mount.point.rstrip("/")
    if "\0" in point:
        return
    root = mount.root.rstrip("/")
    inner = path[len(root) :] if path == root or path.startswith(f"{root}/") else path
    parts = [part for part in inner.split("/") if part]
    # A container often sees its own group as the root of the mount, while /proc still tells the path on the host, or one that
    # leads out of what is mounted.
    if ".." in parts or not surroundings.names("/".join([point, *parts])):
        parts = []
    for depth in range(len(parts), -1, -1):
        yield "/".join([point, *parts[:depth]])


def _cpus(surroundings: Surroundings, group: _Group) -> Iterator[float]:
    for folder in group.folders:
        if group.version == 2:
            quota, _, period = (surroundings.read(f"{folder}/cpu.max") or "").partition(" ")
        else:
            quota = surroundings.read(f"{folder}/cpu.cfs_quota_us") or ""
            period = surroundings.read(f"{folder}/cpu.cfs_period_us") or ""
        quota_us, period_us = _whole(quota), _whole(period)
        # No limit is "max" or -1, which are no whole numbers.
        if quota_us and period_us:
            yield quota_us / period_us


def _throttling(surroundings: Surroundings, group: _Group) -> Throttling | None:
    """Of the level that was throttled most: the counters of a parent do not contain those of its children."""
    found = []
    for folder in group.folders:
        numbers = _numbers(surroundings.read(f"{folder}/cpu.stat") or "")
        if {"nr_periods", "nr_throttled"} <= numbers.keys():
            found.append(Throttling(numbers["nr_periods"], numbers["nr_throttled"]))
    return max(found, key=lambda one: one.throttled_periods, default=None)


def _memory(surroundings: Surroundings, group: _Group) -> Iterator[MemoryGroup]:
    limit_name, used_name, droppable = (
        ("memory.max", "memory.current", "inactive_file")
        if group.version == 2
        else ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    )
    for folder in group.folders:
        limit = _whole(surroundings.read(f"{folder}/{limit_name}") or "")
        used = _whole(surroundings.read(f"{folder}/{used_name}") or "")
        if limit is not None and limit < _UNLIMITED_BYTES and used is not None:
            dropped = _numbers(surroundings.read(f"{folder}/memory.stat") or "").get(droppable, 0)
            yield MemoryGroup(limit, max(0, used - dropped))


def _processes(surroundings: Surroundings, group: _Group) -> Iterator[ProcessGroup]:
    for folder in group.folders:
        limit = _whole(surroundings.read(f"{folder}/pids.max") or "")
        used = _whole(surroundings.read(f"{folder}/pids.current") or "")
        if limit is not None and used is not None:
            yield ProcessGroup(limit, used)


def _numbers(text: str) -> dict[str, int]:
    """A text of lines `name number`; other lines are left out."""
    found = {}
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        number = _whole(value)
        if number is not None:
            found[name] = number
    return found


def _whole(text: str) -> int | None:
    """A whole number of a size that a kernel can mean."""
    text = text.strip()
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= 20 else None
