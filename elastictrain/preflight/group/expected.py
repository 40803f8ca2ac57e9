"""What the links of a group can do: from the names of GPUs, and the rates of ports. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass

# GB/s of payload that one NVLink carries in one direction, which is what is left of the signalling rate after the packets'
# own bytes. Source: NCCL's table of links by compute capability (graph/topo.h); 18 links of Hopper: 371 of 450 GB/s.
_NVLINK_2, _NVLINK_3, _NVLINK_4, _NVLINK_5 = 20.0, 20.0, 20.6, 40.1

# GB/s of payload of 16 PCIe lanes of each generation in one direction. Source: NCCL's 12 GB/s for the third, doubled.
_PCIE_3, _PCIE_4, _PCIE_5 = 12.0, 24.0, 48.0

_NETWORK_SHARE = 0.96
"""Of a network port's rate, what is left for payload. Source: NCCL counts 12 GB/s for 100 Gb/s."""


@dataclass(frozen=True, slots=True)
class GpuModel:
    """A GPU by a part of its name. `num_links`: NVLinks that are always connected; 0 where there are none, or a bridge is
    optional."""

    name: str
    num_links: int
    link_gbs: float
    pcie_gbs: float


# Longer names first: the first one that is part of the GPU's name counts. Source: the vendor's data sheets.
MODELS = (
    GpuModel("GB300", 18, _NVLINK_5, _PCIE_5),
    GpuModel("GB200", 18, _NVLINK_5, _PCIE_5),
    GpuModel("B300", 18, _NVLINK_5, _PCIE_5),
    GpuModel("B200", 18, _NVLINK_5, _PCIE_5),
    GpuModel("B100", 18, _NVLINK_5, _PCIE_5),
    GpuModel("H200 NVL", 0, 0.0, _PCIE_5),
    GpuModel("H200", 18, _NVLINK_4, _PCIE_5),
    GpuModel("H100 NVL", 0, 0.0, _PCIE_5),
    GpuModel("H100 PCIe", 0, 0.0, _PCIE_5),
    GpuModel("H100", 18, _NVLINK_4, _PCIE_5),
    GpuModel("H800 PCIe", 0, 0.0, _PCIE_5),
    GpuModel("H800", 8, _NVLINK_4, _PCIE_5),
    GpuModel("H20", 18, _NVLINK_4, _PCIE_5),
    GpuModel("A100-SXM", 12, _NVLINK_3, _PCIE_4),
    GpuModel("A100", 0, 0.0, _PCIE_4),
    GpuModel("A800-SXM", 8, _NVLINK_3, _PCIE_4),
    GpuModel("A800", 0, 0.0, _PCIE_4),
    GpuModel("V100-SXM", 6, _NVLINK_2, _PCIE_3),
    GpuModel("V100", 0, 0.0, _PCIE_3),
    GpuModel("L40S", 0, 0.0, _PCIE_4),
    GpuModel("L40", 0, 0.0, _PCIE_4),
    GpuModel("RTX PRO 6000", 0, 0.0, _PCIE_5),
    GpuModel("RTX 6000 Ada", 0, 0.0, _PCIE_4),
    GpuModel("RTX 5090", 0, 0.0, _PCIE_5),
    GpuModel("RTX 4090", 0, 0.0, _PCIE_4),
    GpuModel("A30", 0, 0.0, _PCIE_4),
    GpuModel("T4", 0, 0.0, _PCIE_3),
)


@dataclass(frozen=True, slots=True)
class Links:
    """What one rank's host told. `gpu`: name; `network_gbps`: all ports in use together."""

    gpu: str | None
    network_gbps: float | None


@dataclass(frozen=True, slots=True)
class LinkLimit:
    """What all-reduce can reach in bus bandwidth, and by which link, for a person."""

    bus_gbs: float
    link: str


def find_model(gpu: str | None) -> GpuModel | None:
    """None if the name is not in the table."""
    return next((model for model in MODELS if gpu and model.name.lower() in gpu.lower()), None)


def local_limit(links: Links) -> LinkLimit | None:
    """Between the GPUs of a host."""
    model = find_model(links.gpu)
    if model is None:
        return None
    if model.num_links:
        return LinkLimit(model.num_links * model.link_gbs, f"{model.num_links} NVLinks of {model.name}")
    return LinkLimit(model.pcie_gbs, f"PCIe of {model.name}")


def network_limit(links: Links) -> LinkLimit | None:
    """Between hosts. Bus bandwidth is what crosses the border of a host in each direction, however many GPUs it has."""
    if not links.network_gbps:
        return None
    return LinkLimit(links.network_gbps / 8 * _NETWORK_SHARE, f"{links.network_gbps:g} Gb/s of network")


def group_limit(links: Iterable[Links], *, num_hosts: int, num_ranks: int) -> LinkLimit | None:
    """The slowest link that is used; None if one of them is unknown, or there is no link.

    With a rank on each host only, data never moves between the GPUs of a host.
    """
    links = tuple(links)
    limits = [local_limit(one) for one in links] if num_ranks > num_hosts else []
    limits += [network_limit(one) for one in links] if num_hosts > 1 else []
    known = [limit for limit in limits if limit is not None]
    return min(known, key=lambda limit: limit.bus_gbs) if known and len(known) == len(limits) else None
