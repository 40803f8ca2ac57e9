"""The ranks of a group, and what each knows of its host and device."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Literal

from elastictrain.preflight.group.expected import Links

Planned = Literal["rdma", "socket"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What other parts of preflight found out about this host; None is unknown."""

    network_gbps: float | None = None
    """Of all ports together that the backend uses to reach other hosts."""

    planned: Planned | None = None
    """What the transport plan has NCCL use between hosts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMember:
    """One rank, as it introduces itself."""

    rank: int
    host: str
    local_rank: int
    pid: int | None = None
    """None for a rank that has not introduced itself."""

    device: str = "cpu"
    """The GPU's name, or `cpu`."""

    free_bytes: int = 0
    network_gbps: float | None = None
    planned: Planned | None = None

    @property
    def name(self) -> str:
        """As verdicts name it."""
        return f"rank {self.rank} on {self.host}"

    @property
    def links(self) -> Links:
        """What its data moves over."""
        return Links(None if self.device == "cpu" else self.device, self.network_gbps)


def strangers(hosts: Sequence[str]) -> tuple[GroupMember, ...]:
    """The ranks as long as nobody has introduced itself. `hosts`: of each rank."""
    return tuple(
        GroupMember(rank=rank, host=host, local_rank=list(hosts[:rank]).count(host)) for rank, host in enumerate(hosts)
    )


def introduced(members: Sequence[GroupMember], figures: Mapping[int, object]) -> tuple[GroupMember, ...]:
    """With what those ranks said of themselves that said it."""
    names = {field.name for field in fields(GroupMember)}
    told = {rank: row for rank, row in figures.items() if isinstance(row, dict)}
    return tuple(
        GroupMember(**{name: value for name, value in told[member.rank].items() if name in names})
        if member.rank in told
        else member
        for member in members
    )


def neighbours(members: Sequence[GroupMember], *, host: str) -> list[int]:
    """Ranks of a host, by local rank."""
    return [one.rank for one in sorted(members, key=lambda one: one.local_rank) if one.host == host]
