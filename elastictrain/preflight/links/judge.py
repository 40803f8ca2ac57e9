"""All verdicts about links and hosts. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from elastictrain.preflight.links import remedies
from elastictrain.preflight.links.judge_contacts import (
    judge_clocks,
    judge_latency,
    judge_mtu,
    judge_reach,
)
from elastictrain.preflight.links.judge_flows import judge_bandwidth
from elastictrain.preflight.links.messages import Contact, Flow, HostIntroduction, Link, Roster
from elastictrain.preflight.links.options import LinkOptions
from elastictrain.preflight.verdict import Scope, Status, Verdict

_CHECK = "roster"


@dataclass(frozen=True, slots=True)
class Silence:
    """A host that is in the roster, and was not heard any more. `doing`: what it was to do."""

    place: int
    doing: str
    waited_s: float


def judge_roster(roster: Roster, *, silences: Sequence[Silence], names: Mapping[int, str]) -> list[Verdict]:
    """Who never came, and who fell silent. `names`: of hosts by node rank, unique, as far as they were
    told beforehand; a host is called the same whether it came or not."""
    verdicts = [_absent(rank, roster, names=names) for rank in roster.absent]
    labels = roster.labels()
    for silence in silences:
        label = labels[silence.place]
        verdicts.append(
            Verdict(
                check=_CHECK,
                scope=Scope.HOST,
                subject=label,
                status=Status.FAIL,
                measured=f"silent while {silence.doing}",
                expected=f"word within {silence.waited_s:.3g} s",
                remedy=f"look whether {label} ({roster.hosts[silence.place].address}) is up and its launcher runs (`ping`, "
                f"`ssh {roster.hosts[silence.place].address}`); restart it there, or run without this host",
            )
        )
    everybody = f"{len(roster.hosts)} hosts"
    return verdicts or [
        Verdict(check=_CHECK, scope=Scope.GROUP, subject="all", status=Status.PASS, measured=everybody, expected=everybody)
    ]


def leaderless(label: str, *, waited_s: float, leader: str) -> Verdict:
    """By a host that hears nothing of the first one."""
    return Verdict(
        check=_CHECK,
        scope=Scope.HOST,
        subject=leader,
        status=Status.FAIL,
        measured=f"{label} heard nothing of it for {waited_s:.3g} s",
        expected="its word",
        remedy=f"look whether the launcher runs on the host of node rank 0 ({leader}), and start it there",
    )


def claimed_twice(ours: HostIntroduction, theirs: HostIntroduction) -> Verdict:
    """Two launchers say that they are the same node."""
    return Verdict(
        check=_CHECK,
        scope=Scope.GROUP,
        subject=f"{ours.name}, {theirs.name}",
        status=Status.FAIL,
        measured=f"both say that they are node rank {ours.node_rank} ({ours.address}, {theirs.address})",
        expected="a node rank each",
        remedy=f"give one of them another `--node-rank` than {ours.node_rank}, or end what is left of an earlier start",
    )


def unheard(host: str, *, why: str) -> Verdict:
    """By a host that cannot leave word for the others."""
    return Verdict(
        check=_CHECK,
        scope=Scope.HOST,
        subject=host,
        status=Status.FAIL,
        measured=why,
        expected="word from and to all hosts",
        remedy=f"look whether {host} reaches the rendezvous endpoint (MASTER_ADDR and MASTER_PORT), and whether it is up",
    )


def no_port(host: str, *, address: str, interface: str, why: str) -> Verdict:
    """By a host that cannot listen for the others."""
    return Verdict(
        check="reachable",
        scope=Scope.HOST,
        subject=host,
        status=Status.FAIL,
        measured=why,
        expected=f"a listener on {address}",
        remedy=f"see who has the address and the ports: `ip address show dev {interface}`, `ss -ltnp`; choose others",
    )


def _absent(rank: int, roster: Roster, *, names: Mapping[int, str]) -> Verdict:
    label = names.get(rank, f"node rank {rank}")
    where = names.get(rank, f"the host of node rank {rank}")
    present, num_present = remedies.names(roster.labels()), len(roster.hosts)
    num_hosts = num_present + len(roster.absent)
    return Verdict(
        check=_CHECK,
        scope=Scope.HOST,
        subject=label,
        status=Status.FAIL,
        measured=f"no word in {roster.waited_s:.3g} s",
        expected=f"{num_hosts} hosts",
        remedy=f"start the launcher on {where}, or look there why it did not start (present: {present}); or run without it, "
        f"with a smaller minimum: `torchrun --nnodes={num_present}:{num_hosts}`",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """All that the first host has gathered. `flows_again`: of suspects; `full`: whether bandwidth was to be measured."""

    roster: Roster
    contacts: Mapping[Link, Contact]
    flows: tuple[Flow, ...] = ()
    flows_again: tuple[Flow, ...] = ()
    silences: tuple[Silence, ...] = ()
    full: bool = False


def judge(evidence: Evidence, *, options: LinkOptions, names: Mapping[int, str] | None = None) -> list[Verdict]:
    """Checks `roster`, `reachable`, `mtu`, `latency`, `clock` and, if it is full, `bandwidth`: a pass each, or what is wrong.

    Nothing that was asked of a host that fell silent is held against anybody else.
    """
    roster = evidence.roster
    silent = {silence.place for silence in evidence.silences}
    contacts = {link: contact for link, contact in evidence.contacts.items() if not silent & set(link)}
    verdicts = judge_roster(roster, silences=evidence.silences, names=names or {})
    verdicts += judge_reach(contacts, roster=roster)
    if len(roster.hosts) < 2:
        return verdicts
    verdicts += judge_mtu(contacts, roster=roster)
    verdicts += judge_latency(contacts, roster=roster, options=options)
    verdicts += judge_clocks(contacts, roster=roster, options=options)
    if evidence.full:
        verdicts += judge_bandwidth(
            [flow for flow in evidence.flows if not silent & set(flow.link)],
            [flow for flow in evidence.flows_again if not silent & set(flow.link)],
            roster=roster,
            options=options,
        )
    return verdicts
