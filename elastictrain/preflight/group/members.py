"""The ranks of a group, their devices, and the bandwidth that the links between them can reach."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from elastictrain.bounded_json import as_record

Planned = Literal["rdma", "socket"]

# GB/s of payload that one NVLink carries in one direction: the signalling rate without the packets' own bytes. Source: NCCL's
# table of links by compute capability (graph/topo.h); 18 links of Hopper: 371 of 450 GB/s.
_NVLINK_2, _NVLINK_3, _NVLINK_4, _NVLINK_5 = 20.0, 20.0, 20.6, 40.1

# GB/s of payload of 16 PCIe lanes of each generation in one direction. Source: NCCL's 12 GB/s for the third, doubled.
_PCIE_3, _PCIE_4, _PCIE_5 = 12.0, 24.0, 48.0

_NETWORK_SHARE = 0.96  # payload's share of a network port's rate. Source: NCCL counts 12 GB/s for 100 Gb/s

_MODELS = {
    (18, _NVLINK_5): "GB300, GB200, B300, B200, B100",
    (18, _NVLINK_4): "H200, H100, H20",
    (8, _NVLINK_4): "H800",
    (12, _NVLINK_3): "A100-SXM",
    (8, _NVLINK_3): "A800-SXM",
    (6, _NVLINK_2): "V100-SXM",
    (0, _PCIE_5): "H200 NVL, H100 NVL, H100 PCIe, H800 PCIe, RTX PRO 6000, RTX 5090",
    (0, _PCIE_4): "A100, A800, A30, L40S, L40, RTX 6000 Ada, RTX 4090",
    (0, _PCIE_3): "V100, T4",
}
MODELS = sorted(((name, link) for link, names in _MODELS.items() for name in names.split(", ")), key=lambda one: -len(one[0]))
"""Parts of GPUs' names, longer ones first: number of NVLinks that are always connected, and GB/s of one; or 0, if there is none
or a bridge is optional, and GB/s of PCIe. Source: the vendor's data sheets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMember:
    """One rank, as it introduces itself."""

    rank: int
    host: str
    local_rank: int
    pid: int | None = None  # None: it has not introduced itself
    device: str = "cpu"  # the GPU's name, or `cpu`
    free_bytes: int = 0
    network_gbps: float | None = None  # of all ports together that the backend uses to reach other hosts
    planned: Planned | None = None  # what the transport plan has NCCL use between hosts

    @property
    def name(self) -> str:
        return f"rank {self.rank} on {self.host}"


def strangers(hosts: Sequence[str]) -> tuple[GroupMember, ...]:
    """The ranks before any has introduced itself. `hosts`: of each rank."""
    return tuple(GroupMember(rank=at, host=host, local_rank=list(hosts[:at]).count(host)) for at, host in enumerate(hosts))


def introduced(members: Sequence[GroupMember], figures: Mapping[int, object]) -> tuple[GroupMember, ...]:
    """The members, with the introductions of those ranks that sent one."""
    known = list(members)
    for rank, figure in figures.items():
        with suppress(ValueError):
            known[rank] = as_record(figure, GroupMember)
    return tuple(known)


def neighbours(members: Sequence[GroupMember], *, host: str) -> list[int]:
    """Ranks of a host, by local rank."""
    return [one.rank for one in sorted(members, key=lambda one: one.local_rank) if one.host == host]


@dataclass(frozen=True, slots=True)
class LinkLimit:
    """The bus bandwidth that all-reduce can reach, and the link that limits it, for people."""

    bus_gbs: float
    link: str
    nvlink: bool = False


def local_limit(gpu: str) -> LinkLimit | None:
    """Between the GPUs of a host; None for a GPU whose name is not in the table."""
    for name, (num_links, gbs) in MODELS:
        if name.lower() in gpu.lower():
            if num_links:
                return LinkLimit(num_links * gbs, f"{num_links} NVLinks of {name}", nvlink=True)
            return LinkLimit(gbs, f"PCIe of {name}")
    return None


def group_limit(members: Sequence[GroupMember]) -> LinkLimit | None:
    """The slowest link in use (with one rank per host, none within hosts); None if one is unknown, or there is none."""
    num_hosts = len({one.host for one in members})
    limits = [local_limit(one.device) for one in members] if len(members) > num_hosts else []
    for gbps in [one.network_gbps for one in members] if num_hosts > 1 else []:
        # Bus bandwidth is what crosses the border of a host in each direction, however many GPUs it has.
        limits.append(LinkLimit(gbps / 8 * _NETWORK_SHARE, f"{gbps:g} Gb/s of network") if gbps else None)
    known = [limit for limit in limits if limit is not None]
    return min(known, key=lambda limit: limit.bus_gbs) if known and len(known) == len(limits) else None
