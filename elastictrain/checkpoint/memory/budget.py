"""How many snapshot buffers fit into a host's memory. The decision is pure; `memory_of` reads the figures."""

import os
from collections.abc import Sequence
from dataclasses import dataclass

import psutil

from elastictrain.cgroup import memory_groups

HEADROOM = 0.1  # share of the host's memory that stays free
REPLICA_SLOTS = 2
REPLICATED_BUFFERS = 3


@dataclass(frozen=True, slots=True)
class HostMemory:
    """A host's memory for snapshots, in bytes; `held_bytes` are in slots and `held_replica_bytes` in replicas to be reused."""

    total_bytes: int
    available_bytes: int
    folder_free_bytes: int
    held_bytes: int = 0
    held_replica_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Buffers:
    """Buffers per rank (0: saves are synchronous), whether replicas are kept, and why it is less than wanted."""

    per_rank: int
    replicate: bool
    shortage: str = ""


def most_buffers(wanted: int, *, replicate: bool) -> int:
    # One is being sent, one keeps the step replicated before until that has arrived, one takes the next snapshot.
    return max(wanted, REPLICATED_BUFFERS) if wanted and replicate else wanted


def decide_buffers(memory: HostMemory, *, wanted: int, replicate: bool, snapshot_bytes: int, replica_bytes: int) -> Buffers:
    """The first of these that fits: as wanted, without replicas, with fewer and fewer buffers.

    `snapshot_bytes` is one snapshot of all ranks of this host; `replica_bytes` is that of the host whose replicas it keeps.
    """
    usable = min(memory.available_bytes - int(HEADROOM * memory.total_bytes), memory.folder_free_bytes) + memory.held_bytes
    if not wanted:
        return Buffers(0, replicate=False)
    usable_with = usable + memory.held_replica_bytes
    most = most_buffers(wanted, replicate=replicate)
    what = f"{most} buffer{'s' if most > 1 else ''} of {snapshot_bytes / 1e9:.2f} GB"
    what += f" and replicas of {replica_bytes / 1e9:.2f} GB" if replicate else ""
    needed = most * snapshot_bytes + (REPLICA_SLOTS * replica_bytes if replicate else 0)
    there = max(0, usable_with if replicate else usable)
    shortage = f"snapshots need {needed / 1e9:.2f} GB of host memory ({what}), but {there / 1e9:.2f} GB can be used"
    options = [(most, replicate), *((buffers, False) for buffers in range(wanted, 0, -1))]
    for per_rank, replicas in options:
        needed = per_rank * snapshot_bytes + (REPLICA_SLOTS * replica_bytes if replicas else 0)
        if needed <= (usable_with if replicas else usable):
            return Buffers(per_rank, replicas, "" if (per_rank, replicas) == (most, replicate) else shortage)
    return Buffers(0, False, shortage)


def least(choices: Sequence[Buffers]) -> Buffers:
    """What all hosts can do: the least of their decisions, with all reasons."""
    shortages = list(dict.fromkeys(choice.shortage for choice in choices if choice.shortage))
    per_rank = min(choice.per_rank for choice in choices)
    replicate = per_rank > 0 and all(choice.replicate for choice in choices)
    return Buffers(per_rank, replicate, "; ".join(shortages))


def describe(buffers: Buffers, *, replicate: bool) -> str:
    """The shortage and what it means for the run, for the log. `replicate`: whether replicas were wanted."""
    consequences = [
        "checkpoints are synchronous, and nothing is kept in host memory",
        "one buffer per rank: a worker killed while it is being filled falls back to storage",
        "two buffers per rank: snapshots are taken every third step at most",
    ]
    told = consequences[buffers.per_rank : buffers.per_rank + 1]
    if replicate and buffers.per_rank and not buffers.replicate:
        told.append("no replicas on other hosts")
    return f"{buffers.shortage}; {', and '.join(told)}"


def memory_of(folder: str, *, held_bytes: int = 0, held_replica_bytes: int = 0) -> HostMemory:
    """The memory of this host, or of the control group that confines this process."""
    found = psutil.virtual_memory()
    total, available = int(found.total), int(found.available)
    for group in memory_groups():
        total, available = min(total, group.limit_bytes), min(available, group.free_bytes)
    parent = folder
    while not os.path.isdir(parent):  # noqa: PTH112
        parent = os.path.dirname(parent) or "/"  # noqa: PTH120
    space = os.statvfs(parent)
    return HostMemory(total, available, space.f_bavail * space.f_frsize, held_bytes, held_replica_bytes)
