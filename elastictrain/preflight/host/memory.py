"""Check `memory`: what is left of this host's memory, and of what its container may use."""

from dataclasses import dataclass

from elastictrain.preflight.host.cgroup import MemoryGroup, read_allowance
from elastictrain.preflight.surroundings import Surroundings
from elastictrain.preflight.verdict import Reporter, Verdict

MIB = 1 << 20
GIB = 1 << 30


def in_gib(num_bytes: float) -> float:
    """Bytes as GiB with three significant digits."""
    return float(f"{num_bytes / GIB:.3g}")


LEAST_BYTES = 512 * MIB
"""`import torch` alone takes about 224 MiB per process, and a rank has company."""

LOW_BYTES = 2 * GIB
"""Below it somebody should look, whatever the run needs."""

SWAPPED_SHARE, SCARCE_SHARE = 0.05, 0.2
"""So much of the memory's size out in swap, while no more than this is free, means that what is needed comes from disk. Swap
alone means nothing: the kernel leaves there what nobody has asked for since."""


@dataclass(frozen=True, slots=True)
class MemoryFacts:
    """In bytes; None for what the kernel does not tell. `group` is the container's limit."""

    total: int | None
    available: int | None
    swapped: int | None
    group: MemoryGroup | None


def read_memory(surroundings: Surroundings) -> MemoryFacts:
    """From /proc/meminfo and the control groups."""
    numbers = parse_meminfo(surroundings.read("proc/meminfo") or "")
    swap_total, swap_free = numbers.get("SwapTotal"), numbers.get("SwapFree")
    return MemoryFacts(
        total=numbers.get("MemTotal"),
        available=numbers.get("MemAvailable"),
        swapped=None if swap_total is None or swap_free is None else max(0, swap_total - swap_free),
        group=read_allowance(surroundings).memory,
    )


def parse_meminfo(text: str) -> dict[str, int]:
    """Sizes in bytes by name; lines of another form are left out. Source: proc_meminfo(5)."""
    found = {}
    for line in text.splitlines():
        name, _, value = line.partition(":")
        words = value.split()
        if len(words) == 2 and words[1] == "kB" and words[0].isascii() and words[0].isdecimal() and len(words[0]) < 20:
            found[name] = int(words[0]) * 1024
    return found


def judge_memory(facts: MemoryFacts, *, host: str) -> Verdict:
    """The less of what the host has and what its container may take counts."""
    report = Reporter("memory", host)
    inside = facts.group.free_bytes if facts.group is not None else None
    free = min((one for one in (facts.available, inside) if one is not None), default=None)
    if free is None:
        return report.skipped("unknown", remedy=f"look at /proc/meminfo on {host}")
    if facts.group is not None and free != facts.available:
        limit = f"{in_gib(facts.group.limit_bytes):g} GiB"
        unit = f"GiB available of the container's {limit}"
        remedy = (
            f"raise the container's limit of {limit} on {host} (`docker run --memory=...`, `resources.limits.memory`, "
            "`srun --mem=...`), or end what uses it: `ps -eo rss,pid,user,comm --sort=-rss | head`"
        )
    else:
        unit = "GiB available"
        remedy = f"end what uses it on {host}: `ps -eo rss,pid,user,comm --sort=-rss | head`, `df -h /dev/shm`"
    if free < LEAST_BYTES:
        return report.failed(in_gib(free), expected=in_gib(LOW_BYTES), unit=unit, remedy=remedy)
    if free < LOW_BYTES:
        return report.warned(in_gib(free), expected=in_gib(LOW_BYTES), unit=unit, remedy=remedy)
    if _swaps(facts):
        measured = f"{in_gib(facts.swapped or 0):g} GiB in swap"
        return report.warned(measured, expected="none", remedy=f"{remedy}; then `swapoff -a && swapon -a`")
    return report.passed(in_gib(free), expected=in_gib(LOW_BYTES), unit=unit)


def _swaps(facts: MemoryFacts) -> bool:
    if not facts.total or facts.swapped is None or facts.available is None:
        return False
    return facts.swapped > SWAPPED_SHARE * facts.total and facts.available < SCARCE_SHARE * facts.total
