"""All verdicts about links and hosts. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass

from elastictrain.preflight.links.judge_contacts import (
    judge_clocks,
    judge_latency,
    judge_mtu,
    judge_reach,
)
from elastictrain.preflight.links.judge_flows import judge_bandwidth
from elastictrain.preflight.links.judge_roster import Silence, judge_roster
from elastictrain.preflight.links.measured import Contact, Flow, Link, Roster
from elastictrain.preflight.links.options import LinkOptions
from elastictrain.preflight.verdict import Verdict


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
