"""PCI devices of this host as the kernel lists them, and the width of their links."""

from collections.abc import Sequence
from dataclasses import dataclass

from elastictrain.preflight.devices.gpu import GpuReport, bus_id, integer
from elastictrain.preflight.surroundings import Surroundings
from elastictrain.preflight.verdict import Reporter, Status, Verdict

NVIDIA = "0x10de"
AMD = "0x1002"
_DEVICES = "/sys/bus/pci/devices"
_GPU_CLASSES = ("0x0300", "0x0302", "0x0380", "0x1200")
"""VGA, 3D and other display controllers; processing accelerators, which is what AMD's Instinct cards say they are."""

_SWITCH_CLASS = "0x0680"
"""An NVSwitch is a bridge of "other" kind, by NVIDIA."""

FAST_PORT_MBIT = 25_000
"""From this speed on, a port that lacks PCIe lanes slows a run down."""


@dataclass(frozen=True, slots=True)
class PciFacts:
    """Addresses of GPUs by vendor's PCI number, and how many NVSwitches there are."""

    gpus: tuple[tuple[str, str], ...] = ()
    """(vendor, address)."""

    switches: int = 0

    def gpus_of(self, vendor: str) -> list[str]:
        """Addresses of one vendor's GPUs."""
        return [address for maker, address in self.gpus if maker == vendor]


@dataclass(frozen=True, slots=True)
class Lanes:
    """The PCIe link of one device. A width of None is unknown."""

    subject: str
    bus: str
    width: int | None
    max_width: int | None


def read_pci(surroundings: Surroundings) -> PciFacts:
    """GPUs and NVSwitches on the PCI bus. In a container these are those of the whole machine."""
    gpus: list[tuple[str, str]] = []
    switches = 0
    for address in surroundings.names(_DEVICES):
        vendor = surroundings.read(f"{_DEVICES}/{address}/vendor")
        if vendor not in {NVIDIA, AMD}:
            continue
        kind = (surroundings.read(f"{_DEVICES}/{address}/class") or "")[:6]
        if kind in _GPU_CLASSES:
            gpus.append((vendor, address))
        elif kind == _SWITCH_CLASS and vendor == NVIDIA:
            switches += 1
    return PciFacts(tuple(gpus), switches)


def _read_lanes(surroundings: Surroundings, device: str, *, name: str) -> Lanes | None:
    """The link of the device in a folder below /sys; None if it is no PCI device."""
    width = integer(surroundings.read(f"{device}/current_link_width"))
    max_width = integer(surroundings.read(f"{device}/max_link_width"))
    if width is None and max_width is None:
        return None
    slot = (surroundings.read(f"{device}/uevent") or "").partition("PCI_SLOT_NAME=")[2].partition("\n")[0]
    bus = bus_id(slot) or device.removesuffix("/device").rpartition("/")[2]
    return Lanes(f"{name} on {surroundings.host}", bus, width or None, max_width or None)


def read_port_lanes(surroundings: Surroundings) -> list[Lanes]:
    """Links of RDMA devices, and of network interfaces of 25 Gbit/s or more."""
    infiniband, net = "/sys/class/infiniband", "/sys/class/net"
    devices = [(f"{infiniband}/{name}/device", name) for name in surroundings.names(infiniband)]
    for name in surroundings.names(net):
        if (integer(surroundings.read(f"{net}/{name}/speed")) or 0) >= FAST_PORT_MBIT:
            devices.append((f"{net}/{name}/device", name))
    found: dict[str, Lanes] = {}
    for device, name in devices:
        lanes = _read_lanes(surroundings, device, name=name)
        if lanes is not None:
            found.setdefault(lanes.bus, lanes)
    return list(found.values())


def gpu_lanes(report: GpuReport, host: str) -> list[Lanes]:
    """Links of GPUs, as the vendor's tool reported them."""
    return [Lanes(f"GPU {gpu.index} on {host}", gpu.bus or "", gpu.width, gpu.max_width) for gpu in report.gpus]


def judge_pcie(lanes: Sequence[Lanes], *, host: str) -> list[Verdict]:
    """Only the width counts: an idle link lowers its speed to save power, but never gives up lanes."""
    verdict = Reporter("pcie", host)
    known = [(one, one.width, one.max_width) for one in lanes if one.width is not None and one.max_width is not None]
    if not known:
        remedy = "look yourself, as root: lspci -vv | grep -e '^[0-9a-f]' -e LnkSta:"
        return [verdict.skipped("link widths unknown", remedy=remedy)] if lanes else []
    found = []
    for one, width, max_width in known:
        if width < max_width:
            remedy = (
                f"compare with the slot (as root: lspci -vv -s {one.bus} | grep -e LnkCap: -e LnkSta:); "
                f"if the slot has {max_width} lanes, reseat the card or its riser, or replace the host"
            )
            found.append(verdict(one.subject, Status.WARN, width, max_width, remedy, unit="lanes"))
    return found or [verdict.passed(f"{len(known)} links at full width")]
