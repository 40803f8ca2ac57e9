"""One GPU, and what a vendor's tool said about all of them. Facts only; None always means unknown or not applicable."""

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum


class Vendor(StrEnum):
    """Who made the GPUs."""

    NVIDIA = "NVIDIA"
    AMD = "AMD"


class Trouble(StrEnum):
    """Why a vendor's tool did not tell what it should."""

    NO_ANSWER = "no answer in time"
    NO_DRIVER = "no driver"
    MISMATCH = "the driver in the kernel and its libraries differ"
    NO_DEVICES = "no devices"
    GARBLED = "output not understood"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """What is known of one GPU."""

    index: int
    bus: str | None = None
    """PCI address as the kernel writes it, for example `0000:3b:00.0`."""

    name: str | None = None
    uuid: str | None = None
    temperature_c: float | None = None
    width: int | None = None
    """PCIe lanes in use."""

    max_width: int | None = None
    ecc_on: bool | None = None
    uncorrected: int | None = None
    """Uncorrected memory errors since the driver was loaded or the GPU was reset."""

    worn_out: bool | None = None
    """So many uncorrected errors that the vendor says: replace."""

    remap_pending: bool | None = None
    """Bad memory waits for a reset to be replaced by spare memory."""

    remap_failed: bool | None = None
    """No spare memory was left."""

    slowed: tuple[str, ...] | None = None
    """Why clocks are held down now, as far as heat and power supply are the reasons."""

    mig: bool | None = None
    mig_instances: int = 0
    fabric_state: str | None = None
    """How far the GPU has come in joining an NVSwitch fabric; None where it has none, or does not say."""

    fabric_status: str | None = None
    recovery: str | None = None
    """What the driver wants done before the GPU is used again: "Reset", "Reboot", "Drain P2P", "Drain and Reset"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuReport:
    """What a vendor's tool said. `whole`: it was read to its end."""

    vendor: Vendor
    tool: str
    trouble: Trouble | None = None
    detail: str = ""
    """The tool's own words, where there is trouble."""

    driver: str | None = None
    gpus: tuple[Gpu, ...] = ()
    lost: tuple[str, ...] = ()
    """GPUs, by PCI address or index, that the driver knows and cannot reach."""

    whole: bool = True

    def of_bus(self, bus: str | None) -> Gpu | None:
        """The GPU at a PCI address."""
        return next((gpu for gpu in self.gpus if bus and gpu.bus == bus), None)


def subject(gpu: Gpu, host: str) -> str:
    """How a verdict names a GPU."""
    return f"GPU {gpu.index} on {host}"


def where(gpu: Gpu) -> str:
    """How a person or a command finds a GPU: its PCI address, or else its index."""
    return gpu.bus or str(gpu.index)


def counted_names(report: GpuReport) -> str:
    """For example "8 x NVIDIA H200"."""
    names = Counter(gpu.name or "unknown GPU" for gpu in report.gpus)
    return ", ".join(f"{count} x {name}" for name, count in names.items())
