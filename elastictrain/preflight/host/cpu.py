"""Checks `cpu` and `load`: whether the CPUs that this host shows can be used."""

import os
from dataclasses import dataclass

from elastictrain.preflight.host.cgroup import Throttling, read_allowance
from elastictrain.preflight.surroundings import Surroundings
from elastictrain.preflight.verdict import Reporter, Verdict

THROTTLED_SHARE = 0.1
"""A group that had to wait in more than this share of its periods is short of CPUs; a burst now and then is harmless."""

LEAST_PERIODS = 100
"""Fewer (10 s of work at 100 ms each) say nothing."""

BUSY_LOAD = 1.5
"""Processes that want to run, per CPU. A host whose ranks have just ended shows 1 for another minute."""


@dataclass(frozen=True, slots=True)
class CpuFacts:
    """CPUs that this process may run on, CPUs that the host has, and what control groups allow; None for unknown.

    `needed` is what the ranks of this host use, if known.
    """

    visible: int
    online: int | None
    quota: float | None
    throttling: Throttling | None
    load: float | None
    needed: float | None = None


def read_cpu(surroundings: Surroundings, *, needed: float | None) -> CpuFacts:
    """From the scheduler, /proc and the control groups."""
    allowance = read_allowance(surroundings)
    return CpuFacts(
        visible=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        online=count_cpus(surroundings.read("sys/devices/system/cpu/online") or ""),
        quota=allowance.cpus,
        throttling=allowance.throttling,
        load=_load(surroundings.read("proc/loadavg") or ""),
        needed=needed,
    )


def count_cpus(text: str) -> int | None:
    """How many a list like "0-3,8" names; None if it is none. Source: sysfs-devices-system-cpu of the kernel."""
    total = 0
    for part in text.split(","):
        first, separator, last = part.strip().partition("-")
        last = last if separator else first
        numbers = [int(one) for one in (first, last) if one.isascii() and one.isdecimal() and len(one) < 8]
        if len(numbers) != 2 or numbers[1] < numbers[0]:
            return None
        total += numbers[1] - numbers[0] + 1
    return total


def judge_cpu(facts: CpuFacts, *, host: str) -> Verdict:
    """A quota that throttles, or leaves less than is needed."""
    report = Reporter("cpu", host)
    raising = f"raise the container's CPUs on {host}: `docker run --cpus=N`, `resources.limits.cpu`, `srun --cpus-per-task=N`"
    share = throttled_share(facts.throttling)
    if share is not None and share > THROTTLED_SHARE:
        remedy = f"{raising}; or use fewer: OMP_NUM_THREADS=1, fewer data.workers"
        measured, most = f"throttled in {share:.0%} of its periods", f"at most {THROTTLED_SHARE:.0%}"
        return report.warned(measured, expected=most, remedy=remedy)
    usable = min(facts.quota or facts.visible, facts.visible)
    wanted = facts.needed or facts.visible
    if usable < wanted:
        why = f"a quota of {facts.quota:g}" if facts.quota and facts.quota < facts.visible else f"{facts.visible} visible"
        remedy = f"{raising}; or use fewer: OMP_NUM_THREADS={max(1, int(usable))}, fewer ranks, fewer data.workers"
        return report.warned(round(usable, 2), expected=wanted, unit=f"CPUs ({why})", remedy=remedy)
    return report.passed(round(usable, 2), expected=wanted, unit="CPUs")


def judge_load(facts: CpuFacts, *, host: str) -> Verdict:
    """What others do on this host; its load is that of the whole host, also as seen from a container."""
    report = Reporter("load", host)
    if facts.load is None or not facts.online:
        return report.skipped("unknown", remedy=f"look with `uptime` on {host}")
    most = BUSY_LOAD * facts.online
    if facts.load <= most:
        return report.passed(facts.load, expected=most, unit="processes that want to run")
    remedy = (
        f"on {host} end what competes: `ps -eo pcpu,pid,user,comm --sort=-pcpu | head`; what waits for a disk or a network "
        "folder counts, too: `ps -eo state,pid,comm | grep ^D`"
    )
    return report.warned(facts.load, expected=most, unit="processes that want to run", remedy=remedy)


def throttled_share(now: Throttling | None) -> float | None:
    """Share of its periods in which the group was throttled; None where too few say anything."""
    return now.throttled_periods / now.periods if now is not None and now.periods >= LEAST_PERIODS else None


def _load(text: str) -> float | None:
    """Average of the last minute. Source: proc_loadavg(5)."""
    first = text.partition(" ")[0]
    try:
        load = float(first)
    except ValueError:
        return None
    return load if 0 <= load < 1e6 else None
