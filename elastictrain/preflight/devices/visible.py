"""Whether the ranks of this host see the GPUs that they need."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from elastictrain.preflight.devices.gpu import Gpu, GpuReport, Trouble, Vendor, counted_names, subject, where
from elastictrain.preflight.devices.pci import AMD, NVIDIA, PciFacts
from elastictrain.preflight.verdict import Reporter, Scope, Status, Verdict

_verdict = Reporter("gpus")

SELECTORS = {
    Vendor.NVIDIA: ("CUDA_VISIBLE_DEVICES",),
    Vendor.AMD: ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
}
"""Variables that show a process only some GPUs. On AMD the first applies to all, and one of the others to what it left."""

CONTAINER = "NVIDIA_VISIBLE_DEVICES"
"""Which GPUs the container's runtime was asked to pass on."""


@dataclass(frozen=True, slots=True)
class Selection:
    """What a process may see. `unknown`: the first entry that names no GPU; it and all after it are ignored."""

    gpus: tuple[Gpu, ...]
    variable: str = ""
    value: str = ""
    unknown: str = ""
    mig_instances: int = 0


def select(gpus: Sequence[Gpu], environment: Mapping[str, str], vendor: Vendor) -> Selection:
    """The GPUs that the environment leaves, in its order.

    Source: CUDA's rule for CUDA_VISIBLE_DEVICES, which ROCm follows: indices or prefixes of UUIDs; the list ends at the first
    entry that is invalid; an empty list hides all.
    """
    left = Selection(tuple(gpus))
    for variable in SELECTORS[vendor]:
        value = environment.get(variable)
        if value is None or (
            variable == "CUDA_VISIBLE_DEVICES" and vendor is Vendor.AMD and left.variable == "HIP_VISIBLE_DEVICES"
        ):
            continue
        left = _selected(left.gpus, variable, value.strip())
    return left


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


def judge_visible(
    report: GpuReport | None,
    *,
    pci: PciFacts,
    bound: Sequence[str],
    environment: Mapping[str, str],
    local_world_size: int | None,
    host: str,
) -> list[Verdict]:
    """Verdicts of `gpus`. `bound`: PCI addresses that NVIDIA's driver holds; `local_world_size`: ranks here, if known."""
    if report is None or (report.trouble is not None and not report.lost):
        return [_judge_absent(report, pci, environment, host)]
    found = [*_judge_lost(report, bound, host), *_judge_recovery(report, host)]
    if not report.gpus:
        return found
    selection = select(report.gpus, environment, report.vendor)
    found += _judge_count(report, selection, local_world_size, host)
    if len({gpu.name for gpu in report.gpus if gpu.name}) > 1:
        remedy = "let the run use GPUs of one kind: set CUDA_VISIBLE_DEVICES to their indices"
        found.append(_verdict(host, Status.WARN, counted_names(report), "GPUs of one kind", remedy))
    if not report.whole and not report.lost:
        found.append(
            _verdict(host, Status.WARN, f"{report.tool} was cut short", "a whole answer", f"run {report.tool} and see")
        )
    if any(verdict.status is not Status.PASS for verdict in found):
        return [verdict for verdict in found if verdict.status is not Status.PASS]
    return found


def _judge_absent(report: GpuReport | None, pci: PciFacts, environment: Mapping[str, str], host: str) -> Verdict:
    """No GPU was listed. That is as it should be on a host without any."""
    trouble = report.trouble if report else None
    theirs = pci.gpus_of(AMD if report and report.vendor is Vendor.AMD else NVIDIA)
    said = f"{trouble}: {report.detail}" if report and report.detail else str(trouble)
    if trouble is Trouble.NO_ANSWER and report:
        remedy = "does the driver hang? dmesg | grep -e Xid -e NVRM -e amdgpu; reboot. Is the tool only slow? nvidia-smi -pm 1"
        return _verdict(host, Status.FAIL, f"{report.tool}: {trouble}", "an answer", remedy)
    if trouble is Trouble.MISMATCH:
        return _verdict(
            host, Status.FAIL, said, "the same driver in the kernel and in its libraries",
            "reboot the host, so that the kernel loads the driver that is installed; in a container: start it anew",
        )  # fmt: skip
    if trouble is Trouble.NO_DRIVER and theirs:
        module = "amdgpu" if report and report.vendor is Vendor.AMD else "nvidia"
        remedy = f"as root: modprobe {module}; if that fails, install the driver for this kernel: dmesg | grep -i {module}"
        return _verdict(host, Status.FAIL, said, f"{len(theirs)} GPUs", remedy)
    if trouble is Trouble.GARBLED and report:
        return _verdict(host, Status.WARN, said, "a list of GPUs", f"run {report.tool} and see what is wrong with it")
    any_gpu = pci.gpus_of(NVIDIA) or pci.gpus_of(AMD)
    if environment.get(CONTAINER) in {"void", "none", ""} and any_gpu:
        remedy = f"none for a run on CPUs; else start the container with GPUs ({CONTAINER}=all, docker run --gpus all)"
        return _verdict(host, Status.SKIP, "the container was given no GPU", "", remedy)
    if any_gpu:
        remedy = (
            "install the vendor's driver and its tools; in a container: start it with --gpus all and "
            "NVIDIA_DRIVER_CAPABILITIES=compute,utility (AMD: --device /dev/kfd --device /dev/dri)"
        )
        what = "nvidia-smi or rocm-smi" if report is None else said
        return _verdict(host, Status.WARN, f"{len(any_gpu)} GPUs on the PCI bus, but no {what}", "GPUs with a driver", remedy)
    return _verdict(host, Status.SKIP, "no GPU", "", "none for a run on CPUs; to train on GPUs, take a host that has some")


def _judge_lost(report: GpuReport, bound: Sequence[str], host: str) -> list[Verdict]:
    lost = [
        _verdict(
            f"GPU {which} on {host}", Status.FAIL, "lost", "in reach",
            "power-cycle the host (a warm reboot often does not bring the GPU back), or replace it; see dmesg | grep Xid",
        )
        for which in report.lost
    ]  # fmt: skip
    listed = {gpu.bus for gpu in report.gpus} | set(report.lost)
    silent = [address for address in bound if address not in listed] if report.whole and not report.lost else []
    remedy = (
        "unless they are kept from this process on purpose (container, cgroup): see dmesg | grep -e NVRM -e Xid, and reboot"
    )
    if silent and report.gpus:
        lost.append(_verdict(host, Status.WARN, f"not listed: {', '.join(silent)}", "all GPUs of the driver listed", remedy))
    return lost


def _judge_recovery(report: GpuReport, host: str) -> list[Verdict]:
    found = []
    for gpu in report.gpus:
        wanted = (gpu.recovery or "").lower()
        if not wanted:
            continue
        status = Status.WARN if wanted.startswith("drain") else Status.FAIL
        remedy = (
            "reboot the host"
            if "reboot" in wanted
            else f"as root, with no process on any GPU: nvidia-smi --gpu-reset -i {where(gpu)}, or reboot the host"
        )
        found.append(_verdict(subject(gpu, host), status, f"the driver asks for: {gpu.recovery}", "nothing to recover", remedy))
    return found


def _judge_count(report: GpuReport, selection: Selection, needed: int | None, host: str) -> list[Verdict]:
    seen = len(selection.gpus) + selection.mig_instances
    by = f" by {selection.variable}={selection.value}" if selection.variable else ""
    if selection.unknown:
        remedy = (
            f"correct it: {selection.variable}={','.join(str(gpu.index) for gpu in report.gpus)} would show all, unset does too"
        )
        measured = f"{selection.unknown!r} in {selection.variable} is no GPU of this host, or stands there twice"
        status = Status.FAIL if needed is None or seen < needed else Status.WARN
        return [_verdict(host, status, measured, f"some of {len(report.gpus)} GPUs", remedy)]
    if not seen:
        remedy = f"none for a run on CPUs; to use the {len(report.gpus)} GPUs: unset {selection.variable}"
        return [_verdict(host, Status.SKIP, f"all GPUs hidden{by}", "", remedy)]
    if needed is not None and seen < needed:
        remedy = f"start fewer ranks (torchrun --nproc-per-node={seen})" + (f", or unset {selection.variable}" if by else "")
        return [_verdict(host, Status.FAIL, f"{seen} GPUs{by}", f"{needed}, one for each rank", remedy)]
    divided = [gpu for gpu in selection.gpus if gpu.mig]
    if (divided or selection.mig_instances > 1) and needed is not None and needed > 1:
        remedy = (
            "as root, with the GPUs idle: nvidia-smi -mig 0; a process sees only one MIG instance, and NCCL does not join them"
        )
        return [_verdict(host, Status.WARN, "MIG is on", f"{needed} whole GPUs", remedy)]
    return [Verdict(
        check="gpus", scope=Scope.HOST, subject=host, status=Status.PASS,
        measured=counted_names(report) if not by else f"{seen} GPUs{by}", expected=needed,
    )]  # fmt: skip
