"""Checks `disk` and `shared_memory`: room for the run, for temporary files, and in memory for snapshots."""

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from elastictrain.cgroup import Mount, mount_of
from elastictrain.preflight.host.resources import GIB, MIB, in_gib
from elastictrain.preflight.verdict import Reporter, Verdict
from elastictrain.storage.local import local_path

LEAST_BYTES = 64 * MIB  # below it events, logs and compiled kernels do not fit: the run would end in minutes
LOW_BYTES = GIB  # a warning below it, whatever the run needs
LEAST_INODES = 64  # a checkpoint alone makes a file per rank and a few more
LOW_INODES = 10_000  # torch's compiler can put as many into the folder of temporary files
CONTAINER_BYTES = 64 * MIB  # default of Docker, containerd and Kubernetes. Source: `docker run --shm-size`
LEAST_SHARED_BYTES = 16 * MIB  # below it NCCL and gloo cannot set up their buffers between ranks of one host
_SUGGESTED_GIB = 16
_MEMORY_KINDS = ("tmpfs", "ramfs", "hugetlbfs")


@dataclass(frozen=True, slots=True)
class Space:
    """Room on the file system of a folder, for this user."""

    path: str
    total_bytes: int
    free_bytes: int
    free_inodes: int | None  # None: the file system does not count them
    kind: str | None = None  # such as "tmpfs"; None: unknown


def read_space(path: str, *, mounts: Sequence[Mount]) -> Space | None:
    """Of a folder, or of its nearest existing parent; None if the system gives none."""
    try:
        nearest = os.path.realpath(os.path.expanduser(path))  # noqa: PTH111
        while not os.path.isdir(nearest) and nearest != "/":  # noqa: PTH112
            nearest = os.path.dirname(nearest)  # noqa: PTH120
        found = os.statvfs(nearest)
    except (OSError, ValueError):
        return None
    mount = mount_of(nearest, mounts)
    # Btrfs and many network file systems make inodes as needed, and report 0 of 0.
    inodes = found.f_favail if found.f_files else None
    kind = mount.kind if mount else None
    return Space(nearest, found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize, inodes, kind)


@dataclass(frozen=True, slots=True)
class CheckedFolder:
    path: str
    use: str  # such as "run.dir"
    relief: str  # what to do if it is too small


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


def judge_disk(folder: CheckedFolder, space: Space | None, *, host: str) -> Verdict:
    report = Reporter("disk", host)
    if space is None:
        return report.warned(f"nothing known of {folder.path}", remedy=f"look at it on {host}: `stat -f {folder.path}`")
    free, inodes, place = in_gib(space.free_bytes), space.free_inodes, f"free for {folder.use} in {space.path}"
    no_inodes = inodes is not None and inodes < LEAST_INODES
    if space.free_bytes < LEAST_BYTES or (space.free_bytes < LOW_BYTES and not no_inodes):
        remedy = f"on {host}: `du -xhd1 {space.path} | sort -h` shows what is large; {folder.relief}"
        fatal, unit = space.free_bytes < LEAST_BYTES, f"GiB {place}"
        return report.failed(free, fatal=fatal, expected=in_gib(LOW_BYTES), unit=unit, remedy=remedy)
    if inodes is not None and inodes < LOW_INODES:
        remedy = f"on {host}: `du --inodes -xd1 {space.path} | sort -n` shows where many files are; {folder.relief}"
        return report.failed(inodes, fatal=no_inodes, expected=LOW_INODES, unit=f"inodes {place}", remedy=remedy)
    return report.passed(free, expected=in_gib(LOW_BYTES), unit=f"GiB {place}")


def judge_shared_memory(folder: str, space: Space | None, *, host: str) -> Verdict:
    """`folder` is `checkpoint.memory_dir`. With little room there a run works, but keeps no snapshots in memory."""
    report, elsewhere = Reporter("shared_memory", host), "or set checkpoint.memory_dir to a tmpfs"
    if space is None:
        return report.warned(f"nothing known of {folder}", remedy=f"look at it on {host}: `df -h {folder}`, {elsewhere}")
    unit, size = f"GiB free in {folder}", f"{_SUGGESTED_GIB}g"
    mounting = f"an emptyDir with `medium: Memory`, `mount -o remount,size={size} {folder}`"
    larger = f"give {folder} on {host} {_SUGGESTED_GIB} GiB: `docker run --shm-size={size}`, {mounting}"
    free, expected = in_gib(space.free_bytes), in_gib(LEAST_SHARED_BYTES)
    if space.kind is not None and space.kind not in _MEMORY_KINDS:
        remedy = f"mount a tmpfs: `mount -t tmpfs tmpfs {folder}`, {elsewhere} such as /dev/shm"
        return report.warned(f"{folder} is on {space.kind}", expected="a file system in memory", remedy=remedy)
    if space.free_bytes < LEAST_SHARED_BYTES:
        remedy = f"`ls -la {folder}` shows what fills it on {host}: remove what dead processes left; {larger}"
        return report.failed(free, expected=expected, unit=unit, remedy=remedy)
    if space.total_bytes <= CONTAINER_BYTES:
        return report.warned(free, expected=_SUGGESTED_GIB, unit=unit, remedy=larger)
    return report.passed(free, expected=expected, unit=unit)
