"""Checks `memory`, `cpu`, `load`, `memlock`, `open_files`, `processes`, `disk` and `shared_memory`: what this host leaves to a
run and its ranks."""

import os
import re
import resource
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from elastictrain.cgroup import Allowance, MemoryGroup, Mount, ProcessGroup, Throttling, mount_of
from elastictrain.preflight.verdict import Reporter, Verdict
from elastictrain.storage.local import local_path
from elastictrain.surroundings import Surroundings

MIB = 1 << 20
GIB = 1 << 30

LEAST_MEMORY_BYTES = 512 * MIB  # `import torch` alone takes about 224 MiB per process, and a host runs several
LOW_MEMORY_BYTES = 2 * GIB  # a warning below it, whatever the run needs

# A warning if more than the first share of memory is in swap while at most the second is free: needed pages come from disk.
# Used swap alone means nothing: the kernel leaves unused pages there.
SWAPPED_SHARE, SCARCE_SHARE = 0.05, 0.2
THROTTLED_SHARE = 0.1  # share of periods; a group above it is short of CPUs, while a burst now and then is harmless
LEAST_PERIODS = 100  # fewer (10 s of work at 100 ms each) are no evidence
BUSY_LOAD = 1.5  # runnable processes per CPU; a host whose ranks have just ended shows 1 for another minute
FEW_OPEN_FILES = 4096  # a rank has sockets to all others, a file per shard and worker, and pipes; NCCL opens several per peer
LEAST_OPEN_FILES = 128  # torch, its store and one small process group hold about as many
FEW_PROCESSES = 1024  # threads count: a rank with its data workers has 30 to 100
LEAST_PROCESSES = 64
IPC_LOCK, SYS_ADMIN, SYS_RESOURCE = 1 << 14, 1 << 21, 1 << 24  # source: capabilities(7)
VERBS, CONNECTIONS = "libibverbs.so.1", "librdmacm.so.1"
_LIMITS_FILE = "in /etc/security/limits.d/elastictrain.conf and a new login"


def in_gib(num_bytes: float) -> float:
    """GiB with three significant digits."""
    return float(f"{num_bytes / GIB:.3g}")


def judge_memory(*, total: int, available: int, swapped: int, group: MemoryGroup | None, host: str) -> Verdict:
    """Sizes in bytes. The smaller of the host's free memory and its container's (`group`) counts."""
    report, free, unit = Reporter("memory", host), available, "GiB available"
    remedy = ending = f"end what uses it on {host}: `ps -eo rss,pid,user,comm --sort=-rss | head`, `df -h /dev/shm`"
    if group is not None and group.free_bytes < available:
        free, limit = group.free_bytes, f"{in_gib(group.limit_bytes):g} GiB"
        unit = f"GiB available of the container's {limit}"
        remedy = f"raise that limit (`docker run --memory=...`, `resources.limits.memory`, `srun --mem=...`), or {ending}"
    if free < LOW_MEMORY_BYTES:
        fatal, expected = free < LEAST_MEMORY_BYTES, in_gib(LOW_MEMORY_BYTES)
        return report.failed(in_gib(free), fatal=fatal, expected=expected, unit=unit, remedy=remedy)
    if swapped > SWAPPED_SHARE * total and available < SCARCE_SHARE * total:
        measured = f"{in_gib(swapped):g} GiB in swap"
        return report.warned(measured, expected="none", remedy=f"{remedy}; then `swapoff -a && swapon -a`")
    return report.passed(in_gib(free), expected=in_gib(LOW_MEMORY_BYTES), unit=unit)


def judge_cpu(allowance: Allowance, *, visible: int, needed: float | None, host: str) -> Verdict:
    """A quota that throttles, or leaves less than is needed. `visible`: CPUs that this process may run on."""
    report = Reporter("cpu", host)
    raising = f"raise the container's CPUs on {host}: `docker run --cpus=N`, `resources.limits.cpu`, `srun --cpus-per-task=N`"
    throttling = allowance.throttling or Throttling(0, 0)
    share = throttling.throttled_periods / max(throttling.periods, 1)
    if throttling.periods >= LEAST_PERIODS and share > THROTTLED_SHARE:
        remedy = f"{raising}; or use fewer: OMP_NUM_THREADS=1, fewer data.workers"
        measured, most = f"throttled in {share:.0%} of its periods", f"at most {THROTTLED_SHARE:.0%}"
        return report.warned(measured, expected=most, remedy=remedy)
    usable, wanted = min(allowance.cpus or visible, visible), needed or visible
    if usable < wanted:
        why = f"a quota of {usable:g}" if usable < visible else f"{visible} visible"
        remedy = f"{raising}; or use fewer: OMP_NUM_THREADS={max(1, int(usable))}, fewer ranks, fewer data.workers"
        return report.warned(round(usable, 2), expected=wanted, unit=f"CPUs ({why})", remedy=remedy)
    return report.passed(round(usable, 2), expected=wanted, unit="CPUs")


def judge_load(load: float, *, cpus: int, host: str) -> Verdict:
    """Load by other processes. `load` and `cpus` are those of the whole host, also in a container."""
    report, most, unit = Reporter("load", host), BUSY_LOAD * cpus, "processes that want to run"
    if load <= most:
        return report.passed(load, expected=most, unit=unit)
    waiting = "what waits for a disk or a network folder counts, too: `ps -eo state,pid,comm | grep ^D`"
    remedy = f"on {host} end what competes: `ps -eo pcpu,pid,user,comm --sort=-pcpu | head`; {waiting}"
    return report.warned(load, expected=most, unit=unit, remedy=remedy)


@dataclass(frozen=True, slots=True)
class ResourceLimit:
    """A limit of this process; None means unlimited. The process may raise `soft` up to `hard`."""

    soft: int | None
    hard: int | None


def read_limit(which: int) -> ResourceLimit:
    soft, hard = resource.getrlimit(which)
    return ResourceLimit(*(None if value == resource.RLIM_INFINITY else value for value in (soft, hard)))


def read_capabilities(surroundings: Surroundings) -> int:
    """Effective capabilities of this process, as bits; 0 if unknown."""
    found = re.search(r"^CapEff:\s*([0-9a-f]{1,16})$", surroundings.read("proc/self/status") or "", re.M)
    return int(found[1], 16) if found else 0


def judge_memlock(limit: ResourceLimit, *, capabilities: int, host: str, rdma: bool) -> Verdict:
    """Only InfiniBand, RoCE and EFA count memory against this limit; GPU drivers lock pages outside of it."""
    report = Reporter("memlock", host)
    if limit.soft is None:
        return report.passed("unlimited", expected="unlimited" if rdma else None)
    measured = in_gib(limit.soft)
    if not rdma or capabilities & IPC_LOCK:
        return report.passed(measured, expected="unlimited, or CAP_IPC_LOCK, as here" if rdma else None, unit="GiB")
    own = "`ulimit -l unlimited` before the start"
    if limit.hard is not None:
        elsewhere = "`docker run --ulimit memlock=-1`, or `LimitMEMLOCK=infinity` in the systemd unit"
        own = f"on {host}: `* - memlock unlimited` {_LIMITS_FILE}, {elsewhere}"
    return report.warned(measured, expected="unlimited", unit="GiB", remedy=own)


def judge_open_files(limit: ResourceLimit, *, host: str) -> Verdict:
    elsewhere = f"`* - nofile 65536` {_LIMITS_FILE}, `docker run --ulimit nofile=65536`, or `LimitNOFILE=65536`"
    report = Reporter("open_files", host)
    return _judge_limit(report, limit, few=FEW_OPEN_FILES, least=LEAST_OPEN_FILES, option="-n", elsewhere=elsewhere)


def judge_processes(limit: ResourceLimit, group: ProcessGroup | None, *, capabilities: int, host: str) -> Verdict:
    """Processes and threads: the user's limit, which root does not have, and what is left in the control group."""
    report = Reporter("processes", host)
    if group is not None and (left := group.limit - group.used) < FEW_PROCESSES:
        raising = "`docker run --pids-limit=-1`, `podPidsLimit` of the kubelet, or `TasksMax=infinity` in the systemd unit"
        remedy = f"raise the limit of the container on {host} ({group.limit}, {group.used} in use): {raising}"
        fatal, unit = left < LEAST_PROCESSES, "more in the control group"
        return report.failed(max(0, left), fatal=fatal, expected=FEW_PROCESSES, unit=unit, remedy=remedy)
    if limit.soft is not None and capabilities & (SYS_ADMIN | SYS_RESOURCE):
        return report.passed(limit.soft, expected=FEW_PROCESSES)
    elsewhere = f"`* - nproc 65536` {_LIMITS_FILE}, or `LimitNPROC=65536`"
    return _judge_limit(report, limit, few=FEW_PROCESSES, least=LEAST_PROCESSES, option="-u", elsewhere=elsewhere)


def _judge_limit(report: Reporter, limit: ResourceLimit, *, few: int, least: int, option: str, elsewhere: str) -> Verdict:
    """`option`: of `ulimit`, if the user may raise the limit; `elsewhere`: where it is raised otherwise."""
    if limit.soft is None or limit.soft >= few:
        return report.passed(limit.soft or "unlimited", expected=few)
    remedy = f"on {report.subject}: {elsewhere} in the systemd unit"
    if limit.hard is None or limit.hard >= few:
        remedy = f"`ulimit {option} {min(limit.hard or 65536, 65536)}` before the start on {report.subject}"
    return report.failed(limit.soft, fatal=limit.soft < least, expected=few, remedy=remedy)


def judge_libraries(missing: Sequence[str], *, host: str, several_hosts: bool) -> list[Verdict]:
    """Check `infiniband`, of a host with RDMA: libraries that cannot be loaded. Source: NCCL's `ibvsymbols.cc`. Without
    libibverbs it uses sockets, which do not reach hosts that use InfiniBand. Its plugins load librdmacm, too."""
    if not missing:
        return []
    verdict, measured = Reporter("infiniband", host), f"cannot load {', '.join(missing)}"
    remedy = "apt-get install libibverbs1 ibverbs-providers librdmacm1  # in its container"
    if VERBS not in missing:
        return [verdict.skipped(measured, remedy=f"none for NCCL itself; for its plugins: {remedy}")]
    return [(verdict.failed if several_hosts else verdict.warned)(measured, expected="libraries for RDMA", remedy=remedy)]


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
    """Check `disk`: fails below `LEAST_BYTES` or `LEAST_INODES`, warns below `LOW_BYTES` or `LOW_INODES`. Pure."""
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
