"""Checks `gpus` and `pcie`: ranks see the GPUs that they need, and devices have all their PCIe lanes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from elastictrain.preflight.host.gpu import Gpu, GpuReport, Trouble, Vendor, bus_id, link_widths
from elastictrain.preflight.verdict import Reporter, Status, Verdict
from elastictrain.surroundings import Surroundings

NVIDIA = "0x10de"
AMD = "0x1002"
_DEVICES = "/sys/bus/pci/devices"
_GPU_CLASSES = ("0x0300", "0x0302", "0x0380", "0x1200")  # VGA, 3D, other display; accelerators (AMD Instinct)
_SWITCH_CLASS = "0x0680"  # an NVSwitch is an "other" bridge of NVIDIA
FAST_PORT_MBIT = 25_000  # a port this fast or faster slows a run down if it lacks PCIe lanes
# Variables that show a process only some GPUs. On AMD the first applies to all, and one of the others to what it left.
SELECTORS = {
    Vendor.NVIDIA: ("CUDA_VISIBLE_DEVICES",),
    Vendor.AMD: ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
}
CONTAINER = "NVIDIA_VISIBLE_DEVICES"  # the GPUs that the container runtime was asked to pass on


@dataclass(frozen=True, slots=True)
class PciFacts:
    """PCI addresses of GPUs, and the number of NVSwitches."""

    nvidia: tuple[str, ...] = ()
    amd: tuple[str, ...] = ()
    switches: int = 0


def read_pci(surroundings: Surroundings) -> PciFacts:
    """GPUs and NVSwitches on the PCI bus; in a container those of the whole machine."""
    found: dict[tuple[str, str], list[str]] = {}
    for address in surroundings.names(_DEVICES):
        vendor = surroundings.read(f"{_DEVICES}/{address}/vendor") or ""
        kind = (surroundings.read(f"{_DEVICES}/{address}/class") or "")[:6]
        found.setdefault((vendor, "GPU" if kind in _GPU_CLASSES else kind), []).append(address)
    nvidia, amd, switches = (found.get(key, []) for key in ((NVIDIA, "GPU"), (AMD, "GPU"), (NVIDIA, _SWITCH_CLASS)))
    return PciFacts(tuple(nvidia), tuple(amd), len(switches))


@dataclass(frozen=True, slots=True)
class Selection:
    """The GPUs that a process may see."""

    gpus: tuple[Gpu, ...]
    variable: str = ""
    value: str = ""
    unknown: str = ""  # first entry that names no GPU; it and all later ones are ignored
    mig_instances: int = 0


def select(gpus: Sequence[Gpu], environment: Mapping[str, str], vendor: Vendor) -> Selection:
    """The GPUs that the environment leaves, in its order. Source: CUDA's rule for CUDA_VISIBLE_DEVICES, which ROCm follows:
    indices or prefixes of UUIDs; the list ends at the first invalid entry; an empty list hides all."""
    left = Selection(tuple(gpus))
    for variable in SELECTORS[vendor]:
        value, is_cuda = environment.get(variable), variable == "CUDA_VISIBLE_DEVICES"
        if value is None or (is_cuda and vendor is Vendor.AMD and left.variable == "HIP_VISIBLE_DEVICES"):
            continue
        left = _selected(left.gpus, variable, value.strip())
    return left


def visible_gpus(report: GpuReport, environment: Mapping[str, str]) -> tuple[Gpu, ...]:
    """The GPUs that the environment leaves to this process: a broken one that is hidden does no harm."""
    selection = select(report.gpus, environment, report.vendor)
    return report.gpus if selection.mig_instances else selection.gpus


def _selected(gpus: Sequence[Gpu], variable: str, value: str) -> Selection:
    chosen: list[Gpu] = []
    instances = 0
    for entry in (part.strip() for part in value.split(",")):
        if entry.upper().startswith("MIG-"):
            instances += 1
            continue
        if entry.isdecimal() and len(entry) <= 4:
            fitting = list(gpus[int(entry) : int(entry) + 1])
        else:
            fitting = [gpu for gpu in gpus if entry and (gpu.uuid or "").lower().startswith(entry.lower())]
        if len(fitting) != 1 or fitting[0] in chosen:
            unknown = "" if entry in {"", "-1", "NoDevFiles"} and not chosen else entry or "(empty)"
            return Selection(tuple(chosen), variable, value, unknown, instances)
        chosen.append(fitting[0])
    return Selection(tuple(chosen), variable, value, "", instances)


def check_visible(
    surroundings: Surroundings, report: GpuReport | None, *, pci: PciFacts, local_world_size: int | None
) -> list[Verdict]:
    """Check `gpus`. `local_world_size`: ranks on this host, if known."""
    host, environment = surroundings.host, surroundings.environment
    verdict = Reporter("gpus", host)
    if report is None or (report.trouble is not None and not report.lost):
        return [_judge_absent(report, pci, environment, verdict)]
    found = []
    for which in report.lost:
        remedy = "power-cycle the host (a warm reboot often does not bring the GPU back), or replace it; see dmesg | grep Xid"
        found.append(verdict(f"GPU {which} on {host}", Status.FAIL, "lost", "in reach", remedy))
    if not report.gpus:
        return found
    # GPUs that NVIDIA's driver holds.
    silent = sorted(set(surroundings.names("/proc/driver/nvidia/gpus")) - {gpu.bus for gpu in report.gpus})
    if silent and report.whole and not report.lost:
        remedy = "unless a container or cgroup hides them on purpose: see dmesg | grep -e NVRM -e Xid, and reboot"
        found.append(verdict.warned(f"not listed: {', '.join(silent)}", expected="all GPUs of the driver", remedy=remedy))
    for gpu in report.gpus:
        if gpu.recovery:
            status = Status.WARN if gpu.recovery.lower().startswith("drain") else Status.FAIL
            reset = f"as root, GPUs idle: nvidia-smi --gpu-reset -i {gpu.where}, or "
            remedy = f"{'' if 'reboot' in gpu.recovery.lower() else reset}reboot the host"
            measured = f"the driver asks for: {gpu.recovery}"
            found.append(verdict(f"GPU {gpu.index} on {host}", status, measured, "nothing to recover", remedy))
    selection = select(report.gpus, environment, report.vendor)
    found.append(_judge_count(report, selection, local_world_size, verdict))
    if len({gpu.name for gpu in report.gpus if gpu.name}) > 1:
        remedy = "let the run use GPUs of one kind: set CUDA_VISIBLE_DEVICES to their indices"
        found.append(verdict.warned(report.counted_names(), expected="GPUs of one kind", remedy=remedy))
    if not report.whole and not report.lost:
        measured, remedy = f"{report.tool} was cut short", f"run {report.tool} and see"
        found.append(verdict.warned(measured, expected="a whole answer", remedy=remedy))
    return [one for one in found if one.status is not Status.PASS] or found


def _judge_absent(report: GpuReport | None, pci: PciFacts, environment: Mapping[str, str], verdict: Reporter) -> Verdict:
    """No GPU was listed: the driver or its tool has a problem, or the host has none, as is right on many hosts."""
    any_gpu, said = pci.nvidia or pci.amd, ""
    if report is not None:
        said = f"{report.trouble}: {report.detail}" if report.detail else str(report.trouble)
        amd = report.vendor is Vendor.AMD
        theirs, module = (pci.amd, "amdgpu") if amd else (pci.nvidia, "nvidia")
        match report.trouble:
            case Trouble.NO_ANSWER:
                remedy = "if the driver hangs (dmesg | grep -e Xid -e NVRM -e amdgpu) reboot; if it is slow: nvidia-smi -pm 1"
                return verdict.failed(f"{report.tool}: {report.trouble}", expected="an answer", remedy=remedy)
            case Trouble.MISMATCH:
                remedy = "reboot the host, so that the kernel loads the driver that is installed; in a container: start it anew"
                return verdict.failed(said, expected="the same driver in the kernel and in its libraries", remedy=remedy)
            case Trouble.NO_DRIVER if theirs:
                remedy = f"as root: modprobe {module}; if that fails (dmesg | grep -i {module}), install it for this kernel"
                return verdict.failed(said, expected=f"{len(theirs)} GPUs", remedy=remedy)
            case Trouble.GARBLED:
                return verdict.warned(said, expected="a list of GPUs", remedy=f"run {report.tool} and see what is wrong")
    if environment.get(CONTAINER) in {"void", "none", ""} and any_gpu:
        remedy = f"none for a run on CPUs; else start the container with GPUs ({CONTAINER}=all, docker run --gpus all)"
        return verdict.skipped("the container was given no GPU", remedy=remedy)
    if any_gpu:
        passing = "start the container with --gpus all (AMD: --device /dev/kfd --device /dev/dri)"
        remedy = f"install the vendor's driver and its tools; {passing} and NVIDIA_DRIVER_CAPABILITIES=compute,utility"
        measured = f"{len(any_gpu)} GPUs on the PCI bus, but no {said or 'nvidia-smi or rocm-smi'}"
        return verdict.warned(measured, expected="GPUs with a driver", remedy=remedy)
    return verdict.skipped("no GPU", remedy="none for a run on CPUs; to train on GPUs, take a host that has some")


def _judge_count(report: GpuReport, selection: Selection, needed: int | None, verdict: Reporter) -> Verdict:
    seen = len(selection.gpus) + selection.mig_instances
    by = f" by {selection.variable}={selection.value}" if selection.variable else ""
    if selection.unknown:
        indices = ",".join(str(gpu.index) for gpu in report.gpus)
        remedy = f"correct it: {selection.variable}={indices} would show all, unset does too"
        measured = f"{selection.unknown!r} in {selection.variable} is no GPU of this host, or stands there twice"
        fatal = needed is None or seen < needed
        return verdict.failed(measured, fatal=fatal, expected=f"some of {len(report.gpus)} GPUs", remedy=remedy)
    if not seen:
        remedy = f"none for a run on CPUs; to use the {len(report.gpus)} GPUs: unset {selection.variable}"
        return verdict.skipped(f"all GPUs hidden{by}", remedy=remedy)
    if needed is not None and seen < needed:
        remedy = f"start fewer ranks (torchrun --nproc-per-node={seen})" + (f", or unset {selection.variable}" if by else "")
        return verdict.failed(f"{seen} GPUs{by}", expected=f"{needed}, one for each rank", remedy=remedy)
    divided = any(gpu.mig for gpu in selection.gpus) or selection.mig_instances > 1
    if divided and needed is not None and needed > 1:
        remedy = "as root, with the GPUs idle: nvidia-smi -mig 0; NCCL does not join MIG instances"
        return verdict.warned("MIG is on", expected=f"{needed} whole GPUs", remedy=remedy)
    return verdict.passed(f"{seen} GPUs{by}" if by else report.counted_names(), expected=needed)


@dataclass(frozen=True, slots=True)
class Lanes:
    """The PCIe link of one device; None is unknown."""

    subject: str
    bus: str
    width: int | None
    max_width: int | None
    generation: int | None = None  # only of a link that works, see `Gpu`
    max_generation: int | None = None


def read_lanes(surroundings: Surroundings, report: GpuReport | None) -> list[Lanes]:
    """Links of GPUs, as the vendor's tool reported them, of RDMA devices, and of network interfaces of 25 Gbit/s or more."""
    infiniband, net, host = "/sys/class/infiniband", "/sys/class/net", surroundings.host
    gpus = report.gpus if report is not None else ()
    devices = [(f"{infiniband}/{name}/device", name) for name in surroundings.names(infiniband)]
    for name in surroundings.names(net):
        if (surroundings.number(f"{net}/{name}/speed") or 0) >= FAST_PORT_MBIT:
            devices.append((f"{net}/{name}/device", name))
    found: dict[str, Lanes] = {}
    for device, name in devices:
        bus = bus_id((surroundings.read(f"{device}/uevent") or "").partition("PCI_SLOT_NAME=")[2].partition("\n")[0]) or name
        if any(widths := link_widths(surroundings, device)):
            # An interface and its RDMA device are one card.
            found.setdefault(bus, Lanes(f"{name} on {host}", bus, *widths))
    own = [Lanes(f"GPU {gpu.index} on {host}", gpu.bus or "", gpu.width, gpu.max_width) for gpu in gpus]
    return [*own, *found.values()]


def judge_pcie(lanes: Sequence[Lanes], *, host: str) -> list[Verdict]:
    """The width, and the generation of links that work: an idle link lowers its speed to save power, but never its width."""
    verdict = Reporter("pcie", host)
    known = [(one, one.width, one.max_width) for one in lanes if one.width is not None and one.max_width is not None]
    if not known:
        remedy = "look yourself, as root: lspci -vv | grep -e '^[0-9a-f]' -e LnkSta:"
        return [verdict.skipped("link widths unknown", remedy=remedy)] if lanes else []
    found = []
    for one, width, max_width in known:
        if width < max_width:
            slot = f"as root: lspci -vv -s {one.bus} | grep -e LnkCap: -e LnkSta:"
            remedy = f"if the slot has {max_width} lanes ({slot}), reseat the card or its riser, or replace the host"
            found.append(verdict(one.subject, Status.WARN, width, max_width, remedy, unit="lanes"))
        if one.generation and one.max_generation and one.generation < one.max_generation:
            remedy = f"look for errors (dmesg | grep -i -e aer -e {one.bus}), reseat the card or its riser, or replace the host"
            found.append(verdict(one.subject, Status.WARN, one.generation, one.max_generation, remedy, unit="PCIe generation"))
    return found or [verdict.passed(f"{len(known)} links at full width")]
