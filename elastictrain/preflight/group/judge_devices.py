"""Verdicts on silent data corruption, and on GPUs and their host links while all of them work. Pure."""

import statistics
from collections.abc import Mapping, Sequence

from elastictrain.preflight.group.corruption import DeviceFindings
from elastictrain.preflight.group.members import GroupMember
from elastictrain.preflight.host.gpu import GpuReport, Vendor, judge_throttle
from elastictrain.preflight.host.visible import Lanes, judge_pcie
from elastictrain.preflight.verdict import Reporter, Scope, Status, Verdict, findings

COPY_RATIO = 0.5  # Copies to or from a GPU below this share of the median, or of half of what its PCIe link can do, are slow.
_WAYS = ("to the device", "from the device")
_LANE_GBS = {3: 0.75, 4: 1.5, 5: 3.0, 6: 6.0}  # payload of a lane by generation. Source: NCCL's 12 GB/s for 16 of the third


def judge_corruption(parts: Sequence[Mapping[int, DeviceFindings]], members: Sequence[GroupMember]) -> list[Verdict]:
    """Check `sdc`: each GPU with wrong bits, or a warning if all of several have the same ones, as only software makes them."""
    wrong = {rank: one.wrong for found in parts for rank, one in found.items() if one.wrong}
    expected = "the known bits"
    if not wrong:
        return [Reporter("sdc", scope=Scope.GROUP).passed(f"no wrong bits on {len(members)} devices")]
    if len(wrong) == len(members) > 1 and len(set(wrong.values())) == 1:
        remedy = "compare versions of driver, CUDA and torch with those of a host where it passes; report it as a bug"
        measured = f"on all devices alike {wrong[min(wrong)][0]}"
        return [Reporter("sdc", scope=Scope.GROUP).warned(measured, expected=expected, remedy=remedy)]
    verdicts = []
    for rank, texts in sorted(wrong.items()):
        member, device = members[rank], f"GPU {members[rank].local_rank}"
        testing = f"test {device} (`dcgmi diag -r 4`, `nvidia-smi -q -d ECC,ROW_REMAPPER`)"
        remedy = f"leave {member.host} out, and {testing}; replace it"
        subject = f"{device} on {member.host}" if member.device != "cpu" else member.name
        verdicts.append(Reporter("sdc", subject).failed("; ".join(texts), expected=expected, remedy=remedy))
    return verdicts


def judge_load(found: Mapping[int, DeviceFindings], members: Sequence[GroupMember]) -> list[Verdict]:
    """Checks `throttle` and `pcie`, warnings only: GPUs that are held down while they work, and their links to the host."""
    verdicts: list[Verdict] = []
    for rank, one in found.items():
        host, report = members[rank].host, GpuReport(vendor=Vendor.NVIDIA, tool="nvidia-smi", gpus=one.gpus)
        lanes = [
            Lanes(f"GPU {gpu.index} on {host}", gpu.where, gpu.width, gpu.max_width, gpu.generation, gpu.max_generation)
            for gpu in one.gpus
        ]
        verdicts += [*judge_throttle(report, host=host), *judge_pcie(lanes, host=host)]
    copies = {rank: one.copies_gbs for rank, one in found.items() if one.copies_gbs}
    for rank, both in copies.items():
        member = members[rank]
        links = [gpu for one in found.values() for gpu in one.gpus if gpu.name == member.device]
        least = min((_LANE_GBS.get(gpu.max_generation or 0, 0.0) * (gpu.max_width or 0) for gpu in links), default=0.0)
        for way, rate in enumerate(both):
            expected = max(statistics.median(one[way] for one in copies.values()), least / 2)
            if rate < COPY_RATIO * expected:
                look = f"`nvidia-smi topo -m` against the CPUs of rank {rank} (`numactl -s`), `lspci -vv` (LnkSta of the GPU)"
                remedy = f"on {member.host} look at {look} and other processes that copy"
                subject, unit = f"GPU {member.local_rank} on {member.host}", f"GB/s {_WAYS[way]}"
                figures = (float(f"{rate:.4g}"), float(f"{expected:.4g}"))
                verdicts.append(Reporter("pcie")(subject, Status.WARN, *figures, remedy, unit=unit))
    return findings(verdicts)
