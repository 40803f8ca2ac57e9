"""Rails: the GPUs with one local rank on all hosts, and the network ports that they use. Who is slow among them. Pure."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from elastictrain.preflight.group.measurements import PairBandwidth
from elastictrain.preflight.group.members import GroupMember
from elastictrain.preflight.links.culprit import Culprit, LinkBlame, best_of, blame
from elastictrain.preflight.verdict import Reporter, Scope, Verdict

MOST_PARTS = 3
RDMA_SHARE = 0.5  # of the bytes that a rank sends at least so much must show in the ports' counters if they go over RDMA


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
    typical, verdicts = found.typical, list[Verdict]()
    look = "`ibstat`, `mlxlink` and errors of the port nearest to this GPU (`nvidia-smi topo -m`), its cable and switch port"
    for culprit in found.hosts:
        report, unit = Reporter("rails", _rail(members[culprit.subject])), f"GB/s {culprit.way}"
        remedy = f"look at {look}; if it stays, replace the host"
        verdicts.append(report.failed(culprit.figure, expected=typical, unit=unit, remedy=remedy))
    for link in found.links:
        source, target = (_rail(members[rank]) for rank in link.subject)
        report = Reporter("rails", f"{source} -> {target}", Scope.LINK)
        verdicts.append(report.failed(link.figure, expected=typical, unit="GB/s", remedy=f"at both ends look at {look}"))
    rates = {one.host: one.network_gbps for one in members if one.network_gbps is not None}
    for host, rate in rates.items():
        if rate < (most := max(rates.values())):
            remedy = f"`ibstat` or `ethtool` on {host}: a port that is down or has trained to a lower rate"
            verdicts.append(Reporter("rails", host).warned(rate, expected=most, unit="Gb/s of ports", remedy=remedy))
    for rank, one in parts[0].items():
        if members[rank].planned == "rdma" and one.port_bytes is not None and one.port_bytes < RDMA_SHARE * one.sent_bytes:
            report, expected = Reporter("rails", members[rank].host), one.sent_bytes / 1e9
            remedy = (
                "see the check nccl_transport, and NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,NET: the traffic took another way"
            )
            verdicts.append(report.warned(one.port_bytes / 1e9, expected=expected, unit="GB through RDMA ports", remedy=remedy))
    return verdicts or [Reporter("rails", scope=Scope.GROUP).passed(typical, unit="GB/s a rail")]


def _rail(member: GroupMember) -> str:
    return f"rail {member.local_rank} on {member.host}"
