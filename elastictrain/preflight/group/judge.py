"""Verdicts from the figures of all ranks; every rank has the same figures, and so comes to the same verdicts. Pure."""

import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from elastictrain.preflight.group.collectives import Collective, WrongResult
from elastictrain.preflight.group.expected import group_limit
from elastictrain.preflight.group.judge_attendance import scope_of
from elastictrain.preflight.group.measurements import Point, Reach, size_text
from elastictrain.preflight.group.members import GroupMember
from elastictrain.preflight.group.options import GroupOptions
from elastictrain.preflight.verdict import Figure, Reporter, Scope, Status, Verdict

_TESTS = "test its GPU (`dcgmi diag -r 3`), and try NCCL_P2P_DISABLE=1 and NCCL_NVLS_ENABLE=0; if it stays, replace the host"


def judge_present(members: Sequence[GroupMember], *, seconds: float) -> Verdict:
    """All are there: whoever is not has been judged already."""
    return _reporter("present", seconds)("all", Status.PASS, measured=len(members), expected=len(members), unit="ranks")


def judge_results(
    collective: Collective, faults: Mapping[int, Sequence[WrongResult]], members: Sequence[GroupMember], *, seconds: float
) -> list[Verdict]:
    """Check `collectives`, one of them. If all that is wrong came from one rank, and several got it, that rank is named, else
    those that got something wrong; where all did, the group."""
    found = {rank: list(some) for rank, some in faults.items() if some}
    if not found:
        return [_reporter("collectives", seconds)("all", Status.PASS, measured="right", unit=collective)]
    sources = {fault.source for some in found.values() for fault in some}
    source = next(iter(sources)) if len(sources) == 1 else None
    culprits = {source} if source is not None and len(found) > 1 else set(found)
    texts = {rank: some[0].text for rank, some in found.items()}
    one = next(iter(texts.values()))
    if len(culprits) == len(members) > 1:
        return [_wrong(collective, "all", f"on all ranks {one}", f"on each host {_TESTS}", seconds)]
    verdicts = [
        _wrong(collective, members[rank].name, texts.get(rank, one), f"on {members[rank].host} {_TESTS}", seconds)
        for rank in sorted(culprits)
    ]
    return _blaming(culprits, verdicts, members)


def judge_bandwidth(
    points: Sequence[Point], members: Sequence[GroupMember], *, nccl: bool, options: GroupOptions, seconds: float
) -> list[Verdict]:
    """Check `bus_bandwidth`: the largest all-reduce against what the links can do."""
    num_hosts = len({member.host for member in members})
    point = max(points, key=lambda point: point.num_bytes)
    # gloo goes through the memory and the processors of a host; there is no figure for what these can do.
    limit = group_limit([one.links for one in members], num_hosts=num_hosts, num_ranks=len(members)) if nccl else None
    slow = limit is not None and _is_slow(point, options.expected_ratio * limit.bus_gbs, options)
    remedy = f"{limit.link} can do {limit.bus_gbs:.4g} GB/s: {_look(num_hosts)}; start with NCCL_DEBUG=INFO" if limit else ""
    return [
        _reporter("bus_bandwidth", seconds)(
            "all",
            Status.WARN if slow else Status.PASS,
            measured=_rounded(point.bus_gbs),
            expected=_rounded(limit.bus_gbs) if limit else None,
            unit=f"GB/s all_reduce {size_text(point.num_bytes)}",
            remedy=remedy if slow else "",
        )
    ]


def _is_slow(point: Point, least_gbs: float, options: GroupOptions) -> bool:
    """Below what a bus of `least_gbs` lets a message of this size have."""
    return point.bus_gbs < point.reachable_gbs(least_gbs, slack_s=options.slack_s)


def stragglers(rates: Mapping[int, float], *, ratio: float) -> dict[int, float]:
    """Ranks below `ratio` of the median, with their share of it."""
    typical = statistics.median(rates.values())
    return {rank: rate / typical for rank, rate in rates.items() if rate < ratio * typical}


def judge_rates(
    first: Mapping[int, float],
    again: Mapping[int, float] | None,
    members: Sequence[GroupMember],
    *,
    options: GroupOptions,
    seconds: float,
) -> list[Verdict]:
    """Check `matmul`. Who is slow once is measured again (`again`), and who is slow twice is a straggler.

    That is a failure among GPUs of one kind, where nothing else runs, and a warning on CPUs and where kinds are mixed.
    """
    rates = {rank: max(rate, again[rank]) if again else rate for rank, rate in first.items()}
    typical = _rounded(statistics.median(rates.values()))
    devices = {member.device for member in members}
    slow = stragglers(rates, ratio=options.straggler_share(cuda=devices != {"cpu"}))
    if again is None or not slow:
        return [_reporter("matmul", seconds)("all", Status.PASS, measured=typical, unit="TFLOP/s")]
    verdicts = [
        _reporter("matmul", seconds)(
            members[rank].name,
            Status.WARN if devices == {"cpu"} or len(devices) > 1 else Status.FAIL,
            measured=_rounded(rates[rank]),
            expected=typical,
            unit="TFLOP/s",
            remedy=_slow_remedy(members[rank]),
        )
        for rank in sorted(slow)
    ]
    return _blaming(slow, verdicts, members)


def judge_pairs(
    reached: Mapping[int, Sequence[Reach]], members: Sequence[GroupMember], *, options: GroupOptions, seconds: float
) -> list[Verdict]:
    """Check `p2p`, host by host: pairs without direct access, and pairs much slower than the others of their host."""
    verdicts = []
    for host in dict.fromkeys(member.host for member in members):
        pairs = {(one.source, rank): one for rank, some in reached.items() if members[rank].host == host for one in some}
        if not pairs:
            continue
        typical = statistics.median(one.gbs for one in pairs.values())
        bad = []
        for (source, target), one in sorted(pairs.items()):
            subject = f"GPU {members[source].local_rank} -> GPU {members[target].local_rank} on {host}"
            if one.gbs < options.pair_ratio * typical:
                remedy = f"on {host} look at what joins the two: `nvidia-smi topo -m`, `nvidia-smi nvlink --status`"
                figure: Figure = _rounded(one.gbs)
            elif one.access is False:
                remedy = (
                    f"on {host} see why in `nvidia-smi topo -p2p r`; in a virtual machine or with an IOMMU, ACS must be off "
                    f"(boot with iommu=pt, `setpci -v -d '*:*' ECAP_ACS+0x6.w=0000`)"
                )
                figure = f"{one.gbs:.4g}, without direct access"
            else:
                continue
            expected = _rounded(typical)
            bad.append(
                _reporter("p2p", seconds)(
                    subject,
                    Status.WARN,
                    measured=figure,
                    expected=expected,
                    unit="GB/s",
                    remedy=remedy,
                )
            )
        verdicts += bad or [_reporter("p2p", seconds)(host, Status.PASS, measured=_rounded(typical), unit="GB/s a pair")]
    return verdicts or [
        _reporter("p2p", seconds)(
            "all",
            Status.SKIP,
            measured="one GPU on each host",
            remedy="nothing to do: there are no pairs",
        )
    ]


def _blaming(culprits: Collection[int], verdicts: Sequence[Verdict], members: Sequence[GroupMember]) -> list[Verdict]:
    """The same, about the host if there is one to blame."""
    scope = scope_of(culprits, members)
    return [replace(verdict, scope=scope) for verdict in verdicts]


def _wrong(collective: Collective, subject: str, measured: str, remedy: str, seconds: float) -> Verdict:
    return _reporter("collectives", seconds)(
        subject,
        Status.FAIL,
        measured=measured,
        expected="the known result",
        unit=collective,
        remedy=remedy,
    )


def _rounded(figure: float) -> float:
    return float(f"{figure:.4g}")


def _look(num_hosts: int) -> str:
    if num_hosts > 1:
        return "see the checks nccl_transport and bandwidth, and `ibstat` or `ethtool INTERFACE` on each host"
    return "look at `nvidia-smi topo -m` and `nvidia-smi nvlink --status`"


def _slow_remedy(member: GroupMember) -> str:
    if member.device == "cpu":
        return f"on {member.host} look for other work (`top`), a CPU quota (`cat /sys/fs/cgroup/cpu.max`) and power saving"
    return (
        f"on {member.host} look at `nvidia-smi -q -d CLOCK,PERFORMANCE,POWER -i {member.local_rank}` and at other processes on "
        f"GPU {member.local_rank}; if it stays, replace the host"
    )


def _reporter(check: str, seconds: float) -> Reporter:
    return Reporter(check, scope=Scope.GROUP, seconds=seconds)
