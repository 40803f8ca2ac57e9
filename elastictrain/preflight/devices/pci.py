"""PCI devices of this host as the kernel lists them, and the width of their links."""

from collections.abc import Sequence
from dataclasses import dataclass

from elastictrain.preflight.devices.gpu import GpuReport, subject
from elastictrain.preflight.devices.words import bus_id, integer
from elastictrain.preflight.surroundings import Surroundings
from elastictrain.preflight.verdict import Scope, Status, Verdict

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


def read_lanes(surroundings: Surroundings, device: str, *, name: str) -> Lanes | None:
    """The link of the device in a folder below /sys; None if it is no PCI device."""
    width = integer(surroundings.read(f"{device}/current_link_width"))
    max_width = integer(surroundings.read(f"{device}/max_link_width"))
    if width is None and max_width is None:
        return None
    slot = next((line for line in (surroundings.read(f"{device}/uevent") or "").splitlines() if "PCI_SLOT_NAME=" in line), "")
    return Lanes(
        name,
        bus_id(slot.partition("=")[2]) or device.removesuffix("/device").rpartition("/")[2],
        width or None,
        max_width or None,
    )


def read_port_lanes(surroundings: Surroundings) -> list[Lanes]:
    """Links of RDMA devices, and of network interfaces of 25 Gbit/s or more."""
    found: dict[str, Lanes] = {}
    for folder, names in (
        ("/sys/class/infiniband", surroundings.names("/sys/class/infiniband")),
        ("/sys/class/net", surroundings.names("/sys/class/net")),
    ):
        for name in names:
            speed = integer(surroundings.read(f"{folder}/{name}/speed")) or 0
            if folder.endswith("net") and speed < FAST_PORT_MBIT:
                continue
            lanes = read_lanes(surroundings, f"{folder}/{name}/device", name=f"{name} on {surroundings.host}")
            if lanes is not None:
                found.setdefault(lanes.bus, lanes)
    return list(found.values())


def gpu_lanes(report: GpuReport, host: str) -> list[Lanes]:
    """Links of GPUs, as the vendor's tool reported them."""
    return [Lanes(subject(gpu, host), gpu.bus or "", gpu.width, gpu.max_width) for gpu in report.gpus]


def judge_pcie(lanes: Sequence[Lanes], *, host: str) -> list[Verdict]:
    """Only the width counts: an idle link lowers its speed to save power, but never gives up lanes."""
    known = [one for one in lanes if one.width is not None and one.max_width is not None]
    if not known:
        if not lanes:
            return []
        return [
            Verdict(
                check="pcie",
                scope=Scope.HOST,
                subject=host,
                status=Status.SKIP,
                measured="link widths unknown",
                expected="link widths",
                remedy="look yourself, as root: lspci -vv | grep -e '^[0-9a-f]' -e LnkSta:",
            )
        ]
    narrow = [
        Verdict(
            check="pcie",
            scope=Scope.HOST,
            subject=one.subject,
            status=Status.WARN,
            measured=one.width,
            expected=one.max_width,
            unit="lanes",
            remedy=f"compare with the slot (as root: lspci -vv -s {one.bus} | grep -e LnkCap: -e LnkSta:); "
            f"if the slot has {one.max_width} lanes, reseat the card or its riser, or replace the host",
        )
        for one in known
        if one.width is not None and one.max_width is not None and one.width < one.max_width
    ]
    passed = Verdict(
        check="pcie", scope=Scope.HOST, subject=host, status=Status.PASS, measured=f"{len(known)} links at full width"
    )
    return narrow or [passed]
