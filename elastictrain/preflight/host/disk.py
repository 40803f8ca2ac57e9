"""Room on file systems: for the run, for temporary files, and in memory for snapshots."""

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from elastictrain.preflight.host.memory import GIB, MIB, in_gib
from elastictrain.preflight.host.mounts import Mount, mount_of, read_mounts
from elastictrain.preflight.surroundings import Surroundings
from elastictrain.preflight.verdict import Reporter, Verdict


@dataclass(frozen=True, slots=True)
class Space:
    """Room on the file system of a folder, for this user. Inodes are None where the file system does not count them."""

    path: str
    total_bytes: int
    free_bytes: int
    free_inodes: int | None
    kind: str | None = None
    """Such as "tmpfs"; None if unknown."""


def read_space(path: str, *, mounts: list[Mount]) -> Space | None:
    """Of a folder, or of the nearest one above it that exists; None if the system does not tell."""
    try:
        nearest = os.path.realpath(os.path.expanduser(path))  # noqa: PTH111
        while not os.path.isdir(nearest) and nearest != "/":  # noqa: PTH112
            nearest = os.path.dirname(nearest)  # noqa: PTH120
        found = os.statvfs(nearest)
    except (OSError, ValueError):
        return None
    mount = mount_of(nearest, mounts)
    return Space(
        path=nearest,
        total_bytes=found.f_blocks * found.f_frsize,
        free_bytes=found.f_bavail * found.f_frsize,
        # Btrfs and many network file systems make inodes as they need them, and say 0 of 0.
        free_inodes=found.f_favail if found.f_files else None,
        kind=mount.kind if mount else None,
    )


LEAST_BYTES = 64 * MIB
"""Below it not even events, logs and compiled kernels fit for long: the run would die of it in minutes."""

LOW_BYTES = GIB
"""Below it somebody should look, whatever the run needs."""

LEAST_INODES = 64
"""A checkpoint alone makes a file per rank and a few more."""

LOW_INODES = 10_000
"""A folder of temporary files with torch's compiler in it can hold as many."""


@dataclass(frozen=True, slots=True)
class CheckedFolder:
    """A folder that will be written."""

    path: str
    use: str
    """Such as "run.dir"."""

    relief: str
    """What to do where it is too small: a command or a setting."""


@dataclass(frozen=True, slots=True)
class DiskFacts:
    """A folder, and the room it has, if the system tells."""

    folder: CheckedFolder
    space: Space | None


def local_path(url: str) -> str | None:
    """The folder that a URL means, if it is one on this host."""
    protocol, separator, rest = url.partition("://")
    if not separator:
        return os.path.abspath(os.path.expanduser(url))  # noqa: PTH100, PTH111
    return rest if protocol in ("file", "local") and rest.startswith("/") else None


def folders_of(run_dir: str | None, *, environment: Mapping[str, str]) -> list[CheckedFolder]:
    """The run's folder, if it is on this host, and the one for temporary files."""
    found = []
    path = local_path(run_dir) if run_dir else None
    if path:
        prune = f"python -m elastictrain.checkpoint prune {path}, or set run.dir to a folder with more room"
        found.append(CheckedFolder(path, "run.dir", prune))
    temporary = next((environment[name] for name in ("TMPDIR", "TEMP", "TMP") if environment.get(name)), None)
    moving = "export TMPDIR=FOLDER with a folder that has more room"
    return [*found, CheckedFolder(temporary or tempfile.gettempdir(), "temporary files", moving)]


def read_disks(surroundings: Surroundings, folders: Sequence[CheckedFolder]) -> list[DiskFacts]:
    """Asks the file systems."""
    mounts = read_mounts(surroundings)
    return [DiskFacts(folder, read_space(folder.path, mounts=mounts)) for folder in folders]


def judge_disks(facts: Sequence[DiskFacts], *, host: str) -> list[Verdict]:
    """One verdict for each folder: of what is scarcest there."""
    return [_judge(one.folder, one.space, Reporter("disk", host)) for one in facts]


def _judge(folder: CheckedFolder, space: Space | None, report: Reporter) -> Verdict:
    if space is None:
        return report.warned(
            f"nothing known of {folder.path}", remedy=f"look at it on {report.subject}: `stat -f {folder.path}`"
        )
    place = f"free for {folder.use} in {space.path}"
    bytes_remedy = f"on {report.subject}: `du -xhd1 {space.path} | sort -h` shows what is large; {folder.relief}"
    inodes_remedy = (
        f"on {report.subject}: `du --inodes -xd1 {space.path} | sort -n` shows where many files are; {folder.relief}"
    )
    free, inodes = in_gib(space.free_bytes), space.free_inodes
    if space.free_bytes < LEAST_BYTES:
        return report.failed(free, expected=in_gib(LOW_BYTES), unit=f"GiB {place}", remedy=bytes_remedy)
    if inodes is not None and inodes < LEAST_INODES:
        return report.failed(inodes, expected=LOW_INODES, unit=f"inodes {place}", remedy=inodes_remedy)
    if space.free_bytes < LOW_BYTES:
        return report.warned(free, expected=in_gib(LOW_BYTES), unit=f"GiB {place}", remedy=bytes_remedy)
    if inodes is not None and inodes < LOW_INODES:
        return report.warned(inodes, expected=LOW_INODES, unit=f"inodes {place}", remedy=inodes_remedy)
    return report.passed(free, expected=in_gib(LOW_BYTES), unit=f"GiB {place}")


CONTAINER_BYTES = 64 * MIB
"""What Docker, containerd and Kubernetes give a container unless they are told otherwise. Source: `docker run --shm-size`."""

LEAST_SHARED_BYTES = 16 * MIB
"""Below it NCCL and gloo cannot set up their buffers between ranks of one host."""

_SUGGESTED_BYTES = 16 << 30
_MEMORY_KINDS = ("tmpfs", "ramfs", "hugetlbfs")


@dataclass(frozen=True, slots=True)
class SharedMemoryFacts:
    """The folder `checkpoint.memory_dir`, and the room it has, if known."""

    folder: str
    space: Space | None


def read_shared_memory(surroundings: Surroundings, *, memory_dir: str) -> SharedMemoryFacts:
    """Asks the file system."""
    return SharedMemoryFacts(memory_dir, read_space(memory_dir, mounts=read_mounts(surroundings)))


def judge_shared_memory(facts: SharedMemoryFacts, *, host: str) -> Verdict:
    """A run can go on with little of it, but keeps no snapshots in memory then."""
    report, space, folder = Reporter("shared_memory", host), facts.space, facts.folder
    elsewhere = "or set checkpoint.memory_dir to a tmpfs"
    if space is None:
        return report.warned(f"nothing known of {folder}", remedy=f"look at it on {host}: `df -h {folder}`, {elsewhere}")
    size, unit = _SUGGESTED_BYTES >> 30, f"GiB free in {folder}"
    larger = (
        f"give {folder} on {host} {size} GiB: `docker run --shm-size={size}g`, in Kubernetes an "
        f"emptyDir with `medium: Memory` on {folder}, on a plain host `mount -o remount,size={size}g {folder}`"
    )
    free, expected = in_gib(space.free_bytes), in_gib(LEAST_SHARED_BYTES)
    if space.kind is not None and space.kind not in _MEMORY_KINDS:
        measured = f"{folder} is on {space.kind}"
        remedy = f"mount a tmpfs: `mount -t tmpfs tmpfs {folder}`, {elsewhere} such as /dev/shm"
        return report.warned(measured, expected="a file system in memory", remedy=remedy)
    if space.free_bytes < LEAST_SHARED_BYTES:
        remedy = f"`ls -la {folder}` shows what fills it on {host}: remove what dead processes left; {larger}"
        return report.failed(free, expected=expected, unit=unit, remedy=remedy)
    if space.total_bytes <= CONTAINER_BYTES:
        return report.warned(free, expected=size, unit=unit, remedy=larger)
    return report.passed(free, expected=expected, unit=unit)
