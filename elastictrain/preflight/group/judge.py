"""Verdicts from the figures of all ranks. Every rank has the same figures, and so the same verdicts. Pure."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from elastictrain.preflight.group.attendance import scope_of
from elastictrain.preflight.group.collectives import Collective, WrongResult
from elastictrain.preflight.group.corruption import DeviceFindings
from elastictrain.preflight.group.measurements import BandwidthPoint, PairBandwidth, size_text
from elastictrain.preflight.group.members import GroupMember, group_limit, local_limit
from elastictrain.preflight.host.gpu import GpuReport, Vendor, judge_throttle
from elastictrain.preflight.host.visible import Lanes, judge_pcie
from elastictrain.preflight.links.culprit import Culprit, LinkBlame, best_of, blame
from elastictrain.preflight.policy import host_of
from elastictrain.preflight.verdict import Figure, Reporter, Scope, Status, Verdict, failures, findings

# Time, and its variation, of any collective. Source: 64 MB between 2 H200 took 40 to 60 us longer than at the rate of 1 GB.
SLACK_S = 5e-5
STRAGGLER_RATIO_CPU = 0.7  # `straggler_ratio` on CPUs, which others share: two idle ranks on busy processors differed by 0.82
PAIR_RATIO = 0.5  # A pair of GPUs below this share of its host's median is slow. Pairs across sockets may be a bit slower.
COPY_RATIO = 0.5  # Copies to or from a GPU below this share of the median, or of half of what its PCIe link can do, are slow.
_WAYS = ("to the device", "from the device")
_LANE_GBS = {3: 0.75, 4: 1.5, 5: 3.0, 6: 6.0}  # payload of a lane by generation. Source: NCCL's 12 GB/s for 16 of the third
_TESTS = "test its GPU (`dcgmi diag -r 3`), and try NCCL_P2P_DISABLE=1 and NCCL_NVLS_ENABLE=0; if it stays, replace the host"
MOST_PARTS = 3
RDMA_SHARE = 0.5  # of the bytes that a rank sends at least so much must show in the ports' counters if they go over RDMA


def judge_results(
    collective: Collective, faults: Mapping[int, Sequence[WrongResult]], members: Sequence[GroupMember]
) -> list[Verdict]:
    """Check `collectives`, one of them: a rank from which several got wrong parts, else those with wrong results, or all."""
    found = {rank: some for rank, some in faults.items() if some}
    if not found:
        return [Reporter("collectives", scope=Scope.GROUP).passed("right", unit=collective)]
    sources = {fault.source for some in found.values() for fault in some}
    source = next(iter(sources)) if len(sources) == 1 else None
    culprits = {source} if source is not None and len(found) > 1 else set(found)
    report = Reporter("collectives", scope=scope_of(culprits, members))
    one, expected = next(iter(found.values()))[0].text, "the known result"
    if len(culprits) == len(members) > 1:
        remedy = f"on each host {_TESTS}"
        return [report.failed(f"on all ranks {one}", expected=expected, unit=collective, remedy=remedy)]
    verdicts = []
    for rank in sorted(culprits):
        measured, remedy = found[rank][0].text if rank in found else one, f"on {members[rank].host} {_TESTS}"
        verdicts.append(report(members[rank].name, Status.FAIL, measured, expected, remedy, unit=collective))
    return verdicts


def judge_bandwidth(point: BandwidthPoint, members: Sequence[GroupMember], *, nccl: bool, least_ratio: float) -> Verdict:
    """Check `bus_bandwidth`: the largest all-reduce against `least_ratio` of what links can do. A host alone is to blame."""
    hosts, unit = {member.host for member in members}, f"GB/s all_reduce {size_text(point.num_bytes)}"
    report = Reporter("bus_bandwidth", members[0].host) if len(hosts) == 1 else Reporter("bus_bandwidth", scope=Scope.GROUP)
    # gloo uses a host's memory and processors, whose limit is unknown.
    limit, measured = group_limit(members) if nccl else None, point.bus_gbs
    if limit is None or measured >= point.reachable_gbs(least_ratio * limit.bus_gbs, slack_s=SLACK_S):
        return report.passed(measured, expected=limit.bus_gbs if limit else None, unit=unit)
    look = "the check p2p, `nvidia-smi topo -m` and `nvidia-smi nvlink --status`"
    if len(hosts) > 1:
        look = "the checks nccl_transport and bandwidth, and `ibstat` or `ethtool INTERFACE` on each host"
    remedy = f"{limit.link} can do {limit.bus_gbs:.4g} GB/s: see {look}; start with NCCL_DEBUG=INFO"
    return report.failed(measured, expected=limit.bus_gbs, unit=unit, remedy=remedy)


def stragglers(rates: Mapping[int, float], *, ratio: float) -> dict[int, float]:
    """Ranks below `ratio` of the median, with their share of it."""
    typical = statistics.median(rates.values())
    return {rank: rate / typical for rank, rate in rates.items() if rate < ratio * typical}


def judge_rates(
    first: Mapping[int, float], again: Mapping[int, float] | None, members: Sequence[GroupMember], *, ratio: float
) -> list[Verdict]:
    """Check `matmul`. Slow ranks are measured again (`again`); a rank that is slow twice is a straggler. That is a failure
    among GPUs of one kind, where nothing else runs, and a warning on CPUs and where kinds are mixed."""
    rates = {rank: max(rate, again[rank]) if again else rate for rank, rate in first.items()}
    typical, slow = statistics.median(rates.values()), stragglers(rates, ratio=ratio)
    if again is None or not slow:
        return [Reporter("matmul", scope=Scope.GROUP).passed(typical, unit="TFLOP/s")]
    report, devices = Reporter("matmul", scope=scope_of(slow, members)), {member.device for member in members}
    status = Status.WARN if devices == {"cpu"} or len(devices) > 1 else Status.FAIL
    verdicts = []
    for rank in sorted(slow):
        host, index = members[rank].host, members[rank].local_rank
        clocks = f"`nvidia-smi -q -d CLOCK,PERFORMANCE,POWER -i {index}`"
        remedy = f"on {host} look at {clocks} and at other processes on GPU {index}; if it stays, replace the host"
        if members[rank].device == "cpu":
            remedy = f"on {host} look for other work (`top`), a CPU quota (`cat /sys/fs/cgroup/cpu.max`) and power saving"
        verdicts.append(report(members[rank].name, status, rates[rank], typical, remedy, unit="TFLOP/s"))
    return verdicts


def judge_pairs(
    reached: Mapping[int, Sequence[PairBandwidth]], members: Sequence[GroupMember], *, least_ratio: float
) -> list[Verdict]:
    """Check `p2p`, host by host: pairs without direct access, and pairs much slower than the others of their host. Where most
    pairs have the NVLinks of a switch to themselves, all must reach `least_ratio` of what these can do."""
    verdicts = []
    for host in dict.fromkeys(member.host for member in members):
        report = Reporter("p2p", host)
        pairs = {(one.source, rank): one for rank, some in reached.items() if members[rank].host == host for one in some}
        if not pairs:
            continue
        typical = statistics.median(one.gbs for one in pairs.values())
        limit = local_limit(members[next(iter(pairs))[1]].device)
        # Without a switch, a pair shares its NVLinks with other pairs.
        switched = limit is not None and limit.nvlink and typical > PAIR_RATIO * limit.bus_gbs
        expected, ratio = (limit.bus_gbs, least_ratio) if limit and switched else (typical, PAIR_RATIO)
        bad = []
        for (source, target), one in sorted(pairs.items()):
            figure: Figure = one.gbs
            if one.gbs < ratio * expected:
                remedy = f"on {host} look at what joins the two: `nvidia-smi topo -m`, `nvidia-smi nvlink --status`"
            elif one.access is False:
                figure = f"{one.gbs:.4g}, without direct access"
                acs = "boot with iommu=pt, `setpci -v -d '*:*' ECAP_ACS+0x6.w=0000`"
                remedy = f"on {host} see why in `nvidia-smi topo -p2p r`; with an IOMMU, ACS must be off ({acs})"
            else:
                continue
            subject = f"GPU {members[source].local_rank} -> GPU {members[target].local_rank} on {host}"
            bad.append(report(subject, Status.FAIL, figure, expected, remedy, unit="GB/s"))
        verdicts += bad or [report.passed(typical, expected=expected, unit="GB/s a pair")]
    return verdicts or [Reporter("p2p").skipped("one GPU on each host", remedy="nothing to do: there are no pairs")]


@dataclass(frozen=True, slots=True)
class RailFindings:
    """One rank's transfers with the same local rank of other hosts."""

    pairs: tuple[PairBandwidth, ...]
    sent_bytes: int
    port_bytes: int | None = None  # by which the counters of this host's RDMA ports grew; None: not read, or none


def blame_rails(parts: Sequence[Mapping[int, RailFindings]], members: Sequence[GroupMember], *, ratio: float) -> LinkBlame:
    """Ranks whose best transfer in a direction is below `ratio` of what is typical for all rails, and links between good ranks.
    Between two hosts each rank has one partner, so that only links can be named."""
    figures = [((pair.source, rank), pair.gbs) for part in parts for rank, one in part.items() for pair in one.pairs]
    found = blame(figures, too_bad=lambda figure, typical: figure < ratio * typical)
    if len({member.host for member in members}) > 2 or found.typical is None:
        return found
    typical = statistics.median(gbs for _, gbs in figures)
    bad = [Culprit(link, gbs) for link, gbs in sorted(best_of(figures).items()) if gbs < ratio * typical]
    return LinkBlame((), tuple(bad), typical)


def needs_more(parts: Sequence[Mapping[int, RailFindings]], members: Sequence[GroupMember], *, ratio: float) -> bool:
    """Whether the same transfers are to be measured (again): up to three times, as long as there are culprits."""
    found = blame_rails(parts, members, ratio=ratio)
    return not parts or (len(parts) < MOST_PARTS and bool(found.hosts or found.links))


def judge_rails(parts: Sequence[Mapping[int, RailFindings]], members: Sequence[GroupMember], *, ratio: float) -> list[Verdict]:
    """Check `rails`: slow ranks and links, hosts whose ports have a lower rate than those of others, and hosts whose traffic
    does not go over the RDMA that was planned. `parts`: of the same transfers, the best measurement of each counts."""
    found = blame_rails(parts, members, ratio=ratio)
    if found.typical is None:
        return [Reporter("rails").skipped("no rank has a partner", remedy="start as many ranks on each host")]
    typical, verdicts, rails = found.typical, list[Verdict](), [f"rail {one.local_rank} on {one.host}" for one in members]
    look = "`ibstat`, `mlxlink` and errors of the port nearest to this GPU (`nvidia-smi topo -m`), its cable and switch port"
    for culprit in found.hosts:
        report, unit = Reporter("rails", rails[culprit.subject]), f"GB/s {culprit.way}"
        remedy = f"look at {look}; if it stays, replace the host"
        verdicts.append(report.failed(culprit.figure, expected=typical, unit=unit, remedy=remedy))
    for link in found.links:
        report = Reporter("rails", " -> ".join(rails[rank] for rank in link.subject), Scope.LINK)
        verdicts.append(report.failed(link.figure, expected=typical, unit="GB/s", remedy=f"at both ends look at {look}"))
    rates = {one.host: one.network_gbps for one in members if one.network_gbps is not None}
    for host, rate in rates.items():
        if rate < (most := max(rates.values())):
            remedy = f"`ibstat` or `ethtool` on {host}: a port that is down or has trained to a lower rate"
            verdicts.append(Reporter("rails", host).warned(rate, expected=most, unit="Gb/s of ports", remedy=remedy))
    for rank, one in parts[0].items():
        if members[rank].planned == "rdma" and one.port_bytes is not None and one.port_bytes < RDMA_SHARE * one.sent_bytes:
            report, expected = Reporter("rails", members[rank].host), one.sent_bytes / 1e9
            remedy = "the traffic took another way: see check nccl_transport, and NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,NET"
            verdicts.append(report.warned(one.port_bytes / 1e9, expected=expected, unit="GB through RDMA ports", remedy=remedy))
    return verdicts or [Reporter("rails", scope=Scope.GROUP).passed(typical, unit="GB/s a rail")]


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
                verdicts.append(Reporter("pcie")(subject, Status.WARN, rate, expected, remedy, unit))
    return findings(verdicts)


def agreed(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """The verdicts of all parts. If `collectives` that are wrong name several hosts, none is certain: they are the group's."""
    wrong = [one for one in failures(verdicts) if one.check == "collectives"]
    certain = len({host_of(one.subject) for one in wrong if one.scope is Scope.HOST}) < 2
    return [one if certain or one not in wrong else replace(one, scope=Scope.GROUP) for one in verdicts]
