"""GPUs as their vendor's tool describes them, and verdicts on their memory and their clocks. Pure."""

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum

from elastictrain.preflight.verdict import Reporter, Status, Verdict


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


_ecc, _row_remap, _throttle = Reporter("ecc"), Reporter("row_remap"), Reporter("throttle")


def judge_ecc(report: GpuReport, *, host: str) -> list[Verdict]:
    """Uncorrected memory errors since the driver was loaded. Any at all is a failure, as it is for DCGM's health watch."""
    found = []
    for gpu in report.gpus:
        if gpu.worn_out:
            found.append(_ecc(subject(gpu, host), Status.FAIL, "too many uncorrected SRAM errors", "below the vendor's limit",
                f"replace the host, or have GPU {where(gpu)} replaced: its count of uncorrected SRAM errors calls for it",
            ))  # fmt: skip
        elif gpu.uncorrected:
            found.append(_ecc(subject(gpu, host), Status.FAIL, gpu.uncorrected, 0, _reset(gpu, report.vendor), unit="errors"))
    switched = {gpu.ecc_on for gpu in report.gpus if gpu.ecc_on is not None}
    if len(switched) == 2:
        off = [gpu for gpu in report.gpus if gpu.ecc_on is False]
        found += [
            _ecc(subject(gpu, host), Status.WARN, "off", "on, as on the other GPUs",
                f"as root, with the GPU idle: nvidia-smi -i {where(gpu)} -e 1; then reboot the host",
            )
            for gpu in off
        ]  # fmt: skip
    if found or not report.gpus:
        return found
    counting = sum(gpu.uncorrected is not None for gpu in report.gpus)
    if counting:
        return [_ecc(host, Status.PASS, f"no uncorrected errors on {counting} GPUs")]
    if all(gpu.ecc_on is None for gpu in report.gpus):
        return [
            _ecc(
                host,
                Status.SKIP,
                "no error counts",
                remedy=f"none: these GPUs, or what {report.tool} may see here, count no memory errors",
            )
        ]
    remedy = "to have memory errors found, as root: nvidia-smi -e 1, then reboot"
    return [_ecc(host, Status.SKIP, "ECC is off" if switched == {False} else "no error counts", remedy=remedy)]


def judge_row_remap(report: GpuReport, *, host: str) -> list[Verdict]:
    """Bad memory rows (before Ampere: pages) that were not replaced by spare ones, or not yet."""
    found = []
    for gpu in report.gpus:
        if gpu.remap_failed:
            found.append(_row_remap(subject(gpu, host), Status.FAIL, "remapping failed", "no failure",
                f"replace the host, or have GPU {where(gpu)} replaced: it has no spare memory left",
            ))  # fmt: skip
        elif gpu.remap_pending:
            found.append(
                _row_remap(subject(gpu, host), Status.WARN, "remapping pending", "none pending", _reset(gpu, report.vendor))
            )
    if found or not report.gpus:
        return found
    if all(gpu.remap_pending is None and gpu.remap_failed is None for gpu in report.gpus):
        return [
            _row_remap(
                host,
                Status.SKIP,
                "not reported",
                remedy="none: these GPUs do not remap memory, or not under this driver or mode",
            )
        ]
    return [_row_remap(host, Status.PASS, "none pending")]


def judge_throttle(report: GpuReport, *, host: str) -> list[Verdict]:
    """Clocks held down by heat or power supply before the run has even begun."""
    found = []
    for gpu in report.gpus:
        if not gpu.slowed:
            continue
        heat = f", {gpu.temperature_c:g} C" if gpu.temperature_c is not None else ""
        if any("power brake" in reason for reason in gpu.slowed):
            remedy = (
                "check the host's power supplies (ipmitool sdr type 'Power Supply') and its power limit; or replace the host"
            )
        elif report.vendor is Vendor.AMD:
            remedy = f"check fans, airflow and inlet temperature: amd-smi metric -g {gpu.index} --temperature --power"
        else:
            remedy = f"check fans, airflow and inlet temperature: nvidia-smi -q -i {where(gpu)} -d TEMPERATURE,PERFORMANCE"
        measured = ", ".join(gpu.slowed) + heat
        found.append(_throttle(subject(gpu, host), Status.WARN, measured, "clocks not held down", remedy))
    if found or not report.gpus:
        return found
    if all(gpu.slowed is None for gpu in report.gpus):
        return [
            _throttle(
                host, Status.SKIP, "not reported", remedy=f"none: {report.tool} does not say here why clocks are held down"
            )
        ]
    hottest = max((gpu.temperature_c for gpu in report.gpus if gpu.temperature_c is not None), default=None)
    return [_throttle(host, Status.PASS, "none" if hottest is None else f"none, at most {hottest:g} C")]


def _reset(gpu: Gpu, vendor: Vendor) -> str:
    command = f"nvidia-smi --gpu-reset -i {where(gpu)}" if vendor is Vendor.NVIDIA else f"amd-smi reset -G -g {gpu.index}"
    return f"as root, with no process on any GPU: {command} (or reboot the host); if it comes back, replace the host"
