"""Checks `memlock`, `open_files` and `processes`: what the kernel lets this user have."""

import resource
from dataclasses import dataclass

from elastictrain.preflight.host.cgroup import ProcessGroup, read_allowance
from elastictrain.preflight.host.memory import in_gib
from elastictrain.preflight.surroundings import Surroundings
from elastictrain.preflight.verdict import Reporter, Verdict

FEW_OPEN_FILES = 4096
"""A rank has sockets to all others, a file per shard and worker, and pipes; NCCL opens several sockets per peer."""

LEAST_OPEN_FILES = 128
"""torch, its store and one small process group hold about as many."""

FEW_PROCESSES = 1024
"""Threads count: a rank with its data workers has 30 to 100."""

LEAST_PROCESSES = 64

_IPC_LOCK, _SYS_ADMIN, _SYS_RESOURCE = 14, 21, 24
"""Capabilities. Source: capabilities(7)."""


@dataclass(frozen=True, slots=True)
class ResourceLimit:
    """A limit of this process; None means unlimited. It may raise `soft` up to `hard` by itself."""

    soft: int | None
    hard: int | None


@dataclass(frozen=True, slots=True)
class LimitFacts:
    """Limits, and what lifts them: `capabilities` is the set of the process as bits, None if unknown."""

    memlock: ResourceLimit
    open_files: ResourceLimit
    processes: ResourceLimit
    capabilities: int | None
    group: ProcessGroup | None = None


def read_limits(surroundings: Surroundings) -> LimitFacts:
    """Asks the kernel."""
    return LimitFacts(
        memlock=_limit(resource.RLIMIT_MEMLOCK),
        open_files=_limit(resource.RLIMIT_NOFILE),
        processes=_limit(resource.RLIMIT_NPROC),
        capabilities=parse_capabilities(surroundings.read("proc/self/status") or ""),
        group=read_allowance(surroundings).processes,
    )


def parse_capabilities(text: str) -> int | None:
    """The effective ones from a text like /proc/self/status."""
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name == "CapEff":
            try:
                return int(value.strip(), 16)
            except ValueError:
                return None
    return None


def judge_memlock(facts: LimitFacts, *, host: str, rdma: bool) -> Verdict:
    """Only InfiniBand, RoCE and EFA count memory against this limit; drivers of GPUs lock pages on their own account."""
    report, soft = Reporter("memlock", host), facts.memlock.soft
    measured = "unlimited" if soft is None else in_gib(soft)
    unit = "" if soft is None else "GiB"
    if not rdma or soft is None:
        return report.passed(measured, expected="unlimited" if rdma else None, unit=unit)
    if _has(facts, _IPC_LOCK):
        return report.passed(measured, expected="unlimited, or CAP_IPC_LOCK, as here", unit=unit)
    own = (
        "`ulimit -l unlimited` before the start"
        if facts.memlock.hard is None
        else (
            f"on {host}: `* - memlock unlimited` in /etc/security/limits.d/elastictrain.conf and a new login, "
            "`docker run --ulimit memlock=-1`, or `LimitMEMLOCK=infinity` in the systemd unit"
        )
    )
    return report.warned(measured, expected="unlimited", unit=unit, remedy=own)


def judge_open_files(facts: LimitFacts, *, host: str) -> Verdict:
    """Of files and sockets that one process may have open."""
    report, limit = Reporter("open_files", host), facts.open_files
    if limit.soft is None or limit.soft >= FEW_OPEN_FILES:
        return report.passed(limit.soft or "unlimited", expected=FEW_OPEN_FILES)
    if limit.hard is None or limit.hard >= FEW_OPEN_FILES:
        remedy = f"`ulimit -n {min(limit.hard or 65536, 65536)}` before the start on {host}"
    else:
        remedy = (
            f"on {host}: `* - nofile 65536` in /etc/security/limits.d/elastictrain.conf and a new login, "
            "`docker run --ulimit nofile=65536`, or `LimitNOFILE=65536` in the systemd unit"
        )
    report_as = report.failed if limit.soft < LEAST_OPEN_FILES else report.warned
    return report_as(limit.soft, expected=FEW_OPEN_FILES, remedy=remedy)


def judge_processes(facts: LimitFacts, *, host: str) -> Verdict:
    """Of processes and threads: the user's limit, which root does not have, and what is left in the control group."""
    report = Reporter("processes", host)
    if facts.group is not None and (left := facts.group.limit - facts.group.used) < FEW_PROCESSES:
        remedy = (
            f"raise the limit of the container on {host} ({facts.group.limit}, {facts.group.used} in use): "
            "`docker run --pids-limit=-1`, `podPidsLimit` of the kubelet, or `TasksMax=infinity` in the systemd unit"
        )
        report_as = report.failed if left < LEAST_PROCESSES else report.warned
        return report_as(max(0, left), expected=FEW_PROCESSES, unit="more in the control group", remedy=remedy)
    soft, hard = facts.processes.soft, facts.processes.hard
    if soft is None or soft >= FEW_PROCESSES or _has(facts, _SYS_ADMIN) or _has(facts, _SYS_RESOURCE):
        return report.passed("unlimited" if soft is None else soft, expected=FEW_PROCESSES)
    if hard is None or hard >= FEW_PROCESSES:
        remedy = f"`ulimit -u {min(hard or 65536, 65536)}` before the start on {host}"
    else:
        remedy = (
            f"on {host}: `* - nproc 65536` in /etc/security/limits.d/elastictrain.conf and a new login, or "
            "`LimitNPROC=65536` in the systemd unit"
        )
    report_as = report.failed if soft < LEAST_PROCESSES else report.warned
    return report_as(soft, expected=FEW_PROCESSES, remedy=remedy)


def _has(facts: LimitFacts, capability: int) -> bool:
    return facts.capabilities is not None and bool(facts.capabilities >> capability & 1)


def _limit(which: int) -> ResourceLimit:
    soft, hard = resource.getrlimit(which)
    return ResourceLimit(*(None if value == resource.RLIM_INFINITY else value for value in (soft, hard)))
