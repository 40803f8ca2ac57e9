"""GPUs by their vendor's tool, verdicts on memory and clocks, parsers. What cannot be parsed is None, never a guess."""

import re
from collections import Counter
from dataclasses import dataclass
from enum import StrEnum

from elastictrain.preflight.verdict import Reporter, Status, Verdict
from elastictrain.surroundings import Surroundings

_NUMBER = re.compile(r"[+-]?\d{1,18}(?:\.\d{1,9})?(?![\d.])")
_BUS = re.compile(
    r"\b(?:(?P<domain>[0-9a-f]{4,8}):)?(?P<rest>[0-9a-f]{2}:[0-9a-f]{2})(?:\.(?P<function>[0-7]))?(?![0-9a-f])", re.I
)
_TRUE = frozenset({"yes", "active", "enabled", "true", "1"})
_FALSE = frozenset({"no", "not active", "disabled", "false", "0", "none"})
_UNKNOWN = frozenset({"", "n/a", "not supported", "unknown error", "err!", "unknown", "none"})


def decimal(text: str | None) -> float | None:
    """The leading number ("16x", "27 C", "26.562 GB/s"), or None ("N/A", "[Unknown Error]", "ERR!", empty)."""
    found = _NUMBER.match((text or "").strip())
    return float(found[0]) if found else None


def integer(text: str | None) -> int | None:
    """The leading whole number, or None."""
    found = decimal(text)
    return int(found) if found is not None and found == int(found) else None


def truth(text: str | None) -> bool | None:
    """Yes or no; None if the text is neither."""
    word = (text or "").strip().lower()
    return True if word in _TRUE else False if word in _FALSE else None


def word(text: str | None) -> str | None:
    """The text in one line; None if it means unknown."""
    line = " ".join((text or "").split())
    vague = line.strip("[]").lower()
    return None if vague in _UNKNOWN or "deprecated" in vague else line


def bus_id(text: str | None) -> str | None:
    """The first PCI address in a text, as the kernel writes it (`0000:3b:00.0`), or None."""
    found = _BUS.search(text or "")
    if found is None:
        return None
    domain = (found["domain"] or "0000").lower()
    return f"{domain[-4:] if domain[:-4].strip('0') == '' else domain}:{found['rest'].lower()}.{found['function'] or '0'}"


def link_widths(surroundings: Surroundings, device: str) -> tuple[int | None, int | None]:
    """PCIe lanes, used and possible, of the device in a folder below /sys; None is unknown."""
    width, max_width = (surroundings.number(f"{device}/{name}_link_width") for name in ("current", "max"))
    return width or None, max_width or None


class Vendor(StrEnum):
    NVIDIA = "NVIDIA"
    AMD = "AMD"


class Trouble(StrEnum):
    """Why a vendor's tool gave no usable answer."""

    NO_ANSWER = "no answer in time"
    NO_DRIVER = "no driver"
    MISMATCH = "the driver in the kernel and its libraries differ"
    NO_DEVICES = "no devices"
    GARBLED = "output not understood"

    @staticmethod
    def told(output: str) -> "Trouble":
        """What the tool complains of."""
        return next((trouble for words, trouble in _TROUBLES.items() if words in output.lower()), Trouble.GARBLED)


_TROUBLES = {
    "version mismatch": Trouble.MISMATCH,
    "couldn't communicate with the nvidia driver": Trouble.NO_DRIVER,
    "failed to initialize nvml": Trouble.NO_DRIVER,
    "driver not initialized": Trouble.NO_DRIVER,
    "amdgpu not found": Trouble.NO_DRIVER,
    "no devices were found": Trouble.NO_DEVICES,
    "no amd gpus": Trouble.NO_DEVICES,
    "no json data": Trouble.NO_DEVICES,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU; None is unknown."""

    index: int
    bus: str | None = None  # PCI address as the kernel writes it, `0000:3b:00.0`
    name: str | None = None
    uuid: str | None = None
    temperature_c: float | None = None
    width: int | None = None  # PCIe lanes in use
    max_width: int | None = None  # PCIe lanes possible
    generation: int | None = None  # of PCIe in use: an idle link lowers it
    max_generation: int | None = None  # possible for the GPU in its slot
    replays: int | None = None  # PCIe packets sent again since the driver was loaded
    ecc_on: bool | None = None
    uncorrected: int | None = None  # memory errors since the driver was loaded or the GPU was reset
    worn_out: bool | None = None  # so many errors that the vendor says: replace
    remap_pending: bool | None = None  # bad memory is replaced by spare memory at the next reset
    remap_failed: bool | None = None  # no spare memory was left
    slowed: tuple[str, ...] | None = None  # why heat or power supply hold the clocks down now
    mig: bool | None = None
    fabric_state: str | None = None  # progress in joining an NVSwitch fabric; None without one
    fabric_status: str | None = None
    recovery: str | None = None  # required before further use: "Reset", "Reboot", "Drain P2P", "Drain and Reset"
    traits: tuple[tuple[str, str], ...] = ()  # what the GPUs of all hosts should have in common: names and values

    @property
    def where(self) -> str:
        """Its PCI address, or else its index, for people and commands."""
        return self.bus or str(self.index)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuReport:
    vendor: Vendor
    tool: str
    trouble: Trouble | None = None
    detail: str = ""  # the tool's own words, if it has trouble
    driver: str | None = None
    gpus: tuple[Gpu, ...] = ()
    lost: tuple[str, ...] = ()  # by PCI address or index: the driver knows them and cannot reach them
    whole: bool = True  # the output was complete

    def counted_names(self) -> str:
        """Such as "8 x NVIDIA H200"."""
        names = Counter(gpu.name or "unknown GPU" for gpu in self.gpus)
        return ", ".join(f"{count} x {name}" for name, count in names.items())


def judge_ecc(report: GpuReport, *, host: str) -> list[Verdict]:
    """Uncorrected memory errors since the driver was loaded. One is a failure, as for DCGM's health watch."""
    verdict = Reporter("ecc", host)
    switched = {gpu.ecc_on for gpu in report.gpus if gpu.ecc_on is not None}
    found = []
    for gpu in report.gpus:
        if gpu.worn_out:
            measured, expected = "too many uncorrected SRAM errors", "below the vendor's limit"
            remedy = f"replace the host, or have GPU {gpu.where} replaced: its count of uncorrected SRAM errors calls for it"
            found.append(verdict(f"GPU {gpu.index} on {host}", Status.FAIL, measured, expected, remedy))
        elif gpu.uncorrected:
            remedy = _reset(gpu, report.vendor)
            found.append(verdict(f"GPU {gpu.index} on {host}", Status.FAIL, gpu.uncorrected, 0, remedy, unit="errors"))
        if gpu.ecc_on is False and True in switched:
            remedy = f"as root, with the GPU idle: nvidia-smi -i {gpu.where} -e 1; then reboot the host"
            found.append(verdict(f"GPU {gpu.index} on {host}", Status.WARN, "off", "on, as on the other GPUs", remedy))
    if found or not report.gpus:
        return found
    if counting := sum(gpu.uncorrected is not None for gpu in report.gpus):
        return [verdict.passed(f"no uncorrected errors on {counting} GPUs")]
    if not switched:
        remedy = f"none: these GPUs, or what {report.tool} may see here, count no memory errors"
        return [verdict.skipped("no error counts", remedy=remedy)]
    remedy = "to have memory errors found, as root: nvidia-smi -e 1, then reboot"
    return [verdict.skipped("ECC is off" if switched == {False} else "no error counts", remedy=remedy)]


def judge_row_remap(report: GpuReport, *, host: str) -> list[Verdict]:
    """Bad memory rows (before Ampere: pages) that spare ones did not replace, or not yet."""
    verdict = Reporter("row_remap", host)
    found = []
    for gpu in report.gpus:
        subject = f"GPU {gpu.index} on {host}"
        if gpu.remap_failed:
            remedy = f"replace the host, or have GPU {gpu.where} replaced: it has no spare memory left"
            found.append(verdict(subject, Status.FAIL, "remapping failed", "no failure", remedy))
        elif gpu.remap_pending:
            found.append(verdict(subject, Status.WARN, "remapping pending", "none pending", _reset(gpu, report.vendor)))
    if found or not report.gpus:
        return found
    if all(gpu.remap_pending is None and gpu.remap_failed is None for gpu in report.gpus):
        remedy = "none: these GPUs do not remap memory, or not under this driver or mode"
        return [verdict.skipped("not reported", remedy=remedy)]
    return [verdict.passed("none pending")]


def judge_throttle(report: GpuReport, *, host: str) -> list[Verdict]:
    """Clocks held down by heat or power supply before the run starts."""
    verdict = Reporter("throttle", host)
    found = []
    for gpu in report.gpus:
        if not gpu.slowed:
            continue
        heat = f", {gpu.temperature_c:g} C" if gpu.temperature_c is not None else ""
        look = f"nvidia-smi -q -i {gpu.where} -d TEMPERATURE,PERFORMANCE"
        if report.vendor is Vendor.AMD:
            look = f"amd-smi metric -g {gpu.index} --temperature --power"
        remedy = f"check fans, airflow and inlet temperature: {look}"
        if any("power brake" in reason for reason in gpu.slowed):
            supplies = "the host's power supplies (ipmitool sdr type 'Power Supply')"
            remedy = f"check {supplies} and its power limit; or replace the host"
        measured = ", ".join(gpu.slowed) + heat
        found.append(verdict(f"GPU {gpu.index} on {host}", Status.WARN, measured, "clocks not held down", remedy))
    if found or not report.gpus:
        return found
    if all(gpu.slowed is None for gpu in report.gpus):
        return [verdict.skipped("not reported", remedy=f"none: {report.tool} does not say here why clocks are held down")]
    hottest = max((gpu.temperature_c for gpu in report.gpus if gpu.temperature_c is not None), default=None)
    return [verdict.passed("none" if hottest is None else f"none, at most {hottest:g} C")]


def _reset(gpu: Gpu, vendor: Vendor) -> str:
    command = f"nvidia-smi --gpu-reset -i {gpu.where}" if vendor is Vendor.NVIDIA else f"amd-smi reset -G -g {gpu.index}"
    return f"as root, with no process on any GPU: {command} (or reboot the host); if it comes back, replace the host"
