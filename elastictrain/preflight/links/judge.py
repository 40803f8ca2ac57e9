"""Verdicts on latency and bandwidth, by a host's best link against the median; `judge_links` for all link checks. Pure."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from elastictrain.config.preflight import PreflightThresholds
from elastictrain.preflight.links.culprit import Culprit, Direction, LinkBlame, blame
from elastictrain.preflight.links.judge_contacts import (
    LinkReporter,
    Silences,
    judge_clocks,
    judge_mtu,
    judge_reach,
    judge_roster,
)
from elastictrain.preflight.links.messages import Contact, Flow, Link, Roster
from elastictrain.preflight.links.rounds import Round, num_second_rounds, second_rounds
from elastictrain.preflight.verdict import Verdict

LATE_FLOOR_S = 0.005  # besides `late_factor`, latency must exceed the median by this: a busy processor adds less
_MILLISECONDS = -1000.0  # figures of latency are negative seconds


def suspicious_contacts(contacts: Mapping[Link, Contact], *, thresholds: PreflightThresholds) -> set[Link]:
    """Links to try a second time before any host is blamed."""
    found = late_blame(contacts, thresholds=thresholds), loss_blame(contacts, least=thresholds.loss_warn)
    hosts, links = {bad.subject for one in found for bad in one.hosts}, {bad.subject for one in found for bad in one.links}
    counted = any(contact.least_loss is not None for contact in contacts.values())
    uncounted = {link for link, contact in contacts.items() if counted and contact.least_loss is None}
    return uncounted | {
        link
        for link, contact in contacts.items()
        if contact.blocked or contact.loses_large or link in links or hosts & set(link)
    }


def late_blame(contacts: Mapping[Link, Contact], *, thresholds: PreflightThresholds) -> LinkBlame:
    figures = [(link, -one.latency_s) for link, one in contacts.items() if one.latency_s is not None]
    late = thresholds.late_factor
    return blame(figures, too_bad=lambda one, typical: one < min(late * typical, typical - LATE_FLOOR_S), directed=False)


def loss_blame(contacts: Mapping[Link, Contact], *, least: float) -> LinkBlame:
    """Hosts and links that lose more than the part `least` of their segments, for sure."""
    figures = [(link, -contact.least_loss) for link, contact in contacts.items() if contact.least_loss is not None]
    return blame(figures, too_bad=lambda figure, typical: -figure > least)


def judge_loss(contacts: Mapping[Link, Contact], *, roster: Roster, thresholds: PreflightThresholds) -> list[Verdict]:
    """Check `loss`: TCP segments by what both kernels counted. The figures are lower bounds."""
    report, unit = LinkReporter("loss", roster), "% loss"
    found = loss_blame(contacts, least=thresholds.loss_warn)
    if found.typical is None:
        return report.nothing_known()
    fatal_below = -thresholds.loss_fail
    if len(found.hosts) == len({host for link in contacts for host in link}):
        least = min(-one.figure for one in found.hosts)
        remedy, fatal = "all hosts lose segments: look at the switch or the tunnel between them", least > thresholds.loss_fail
        expected = 100 * thresholds.loss_warn
        return [report(None).failed(_shown(least, 100.0), fatal=fatal, expected=expected, unit=unit, remedy=remedy)]
    hint = "look at cable, transceiver and switch port (`ethtool -S`: CRC errors, drops); "
    verdicts = _blamed(report, found, scale=-100.0, unit=unit, fatal_below=fatal_below, fatal_host_below=fatal_below, hint=hint)
    return list(verdicts) or [report(None).passed(_shown(found.typical, -100.0), unit=unit)]


def without_lossy(contacts: Mapping[Link, Contact], *, thresholds: PreflightThresholds) -> dict[Link, Contact]:
    """The contacts without those that loss explains for which `judge_loss` fails a host or link."""
    found = loss_blame(contacts, least=thresholds.loss_warn)
    hosts = {one.subject for one in found.hosts if -one.figure > thresholds.loss_fail}
    links = {one.subject for one in found.links if -one.figure > thresholds.loss_fail}
    return {link: one for link, one in contacts.items() if not hosts & set(link) and not links & {link, link[::-1]}}


def judge_latency(contacts: Mapping[Link, Contact], *, roster: Roster, thresholds: PreflightThresholds) -> list[Verdict]:
    """Check `latency`: a late host fails, a late link between good hosts is a warning; between the only two hosts it fails."""
    report = LinkReporter("latency", roster)
    found = late_blame(contacts, thresholds=thresholds)
    if found.typical is None:
        return report.nothing_known()
    late = {one.subject for one in found.links}
    # A round trip covers both directions: name each bad link once.
    once = tuple(one for one in found.links if one.subject[::-1] not in late or one.subject[0] < one.subject[1])
    fatal_below, hint = math.inf if len(roster.hosts) == 2 else -math.inf, "place it near the others (same zone or rack); "
    verdicts = _blamed(report, replace(found, links=once), scale=_MILLISECONDS, unit="ms", fatal_below=fatal_below, hint=hint)
    return list(verdicts) or [report(None).passed(_shown(found.typical, _MILLISECONDS), unit="ms")]


def flow_blame(
    first: Sequence[Flow], second: Sequence[Flow] | None, *, thresholds: PreflightThresholds
) -> tuple[LinkBlame, LinkBlame]:
    """Find culprits for bandwidth in one direction, and for bandwidth while bytes flow both ways. `second`: the second
    measurement of suspects, which counts if it is better; None before it. It confirms a suspect only if the rate stays bad when
    raised to what it may have been without waiting for a processor. The threshold was measured with 3 and 4 hosts: right for
    100 Mbit/s in one or both directions, +20 ms and 2 % loss."""

    def blamed(*, both: bool) -> LinkBlame:
        again = [flow for flow in second or () if flow.both is both]
        return blame(
            [(flow.link, flow.gbps) for flow in (*first, *again) if flow.both is both],
            too_bad=lambda figure, typical: figure < thresholds.slow_ratio * typical,
            excused=None if second is None else [(flow.link, flow.gbps / max(1.0 - flow.waited, 0.02)) for flow in again],
        )

    return blamed(both=False), blamed(both=True)


def suspect_rounds(flows: Sequence[Flow], *, num_hosts: int, thresholds: PreflightThresholds) -> tuple[Round, ...]:
    """Rounds in which all suspects are measured again; none without suspects."""
    found = flow_blame(flows, None, thresholds=thresholds)
    hosts = {culprit.subject for one in found for culprit in one.hosts}
    links = {bad.subject for one in found for bad in one.links}
    measured = {flow.link for flow in flows}
    tainted = hosts | {host for link in links for host in link}
    present = sorted({host for link in measured for host in link} - hosts)
    # Hosts without any suspicious link are the better witnesses, if there are any.
    good = [host for host in present if host not in tainted] or present
    links = {link for link in links if not set(link) & hosts}
    return second_rounds(hosts=hosts, links=links, good=good, met=measured, num=num_second_rounds(num_hosts))


def judge_bandwidth(
    first: Sequence[Flow], second: Sequence[Flow], *, roster: Roster, thresholds: PreflightThresholds
) -> list[Verdict]:
    """Check `bandwidth`: one way, and while bytes flow both ways."""
    report = LinkReporter("bandwidth", roster)
    one_way, both_ways = flow_blame(first, second, thresholds=thresholds)
    typical = one_way.typical
    if typical is None:
        return [report(None).skipped("no link was measured", remedy="see what the other link checks say, and repeat")]
    # Bytes in one direction wait for acknowledgements in the other: a culprit of the first list is also in the second.
    guilty = {culprit.subject for culprit in one_way.hosts}
    named = {bad.subject for bad in one_way.links}
    hosts = tuple(culprit for culprit in both_ways.hosts if culprit.subject not in guilty)
    others = (bad for bad in both_ways.links if not guilty & set(bad.subject))
    links = tuple(bad for bad in others if not named & {bad.subject, bad.subject[::-1]})
    both_ways = replace(both_ways, hosts=hosts, links=links)
    verdicts: list[Verdict] = []
    for blamed, words in ((one_way, ""), (both_ways, " while sending and receiving")):
        # A link between two good hosts with less than a tenth of the others' bandwidth slows down the whole group.
        fatal_below = math.inf if len(roster.hosts) == 2 else 0.1 * (blamed.typical or 0.0)
        verdicts += _blamed(report, blamed, scale=1.0, unit="Gbit/s", words=words, fatal_below=fatal_below)
    return verdicts or [report(None).passed(_shown(typical, 1.0), unit="Gbit/s")]


def _blamed(
    report: LinkReporter,
    found: LinkBlame,
    *,
    scale: float,
    unit: str,
    words: str = "",
    fatal_below: float,
    fatal_host_below: float = math.inf,
    hint: str = "",
) -> Iterator[Verdict]:
    """`fatal_below`: a confirmed bad link fails below this figure, else it is a warning; a host below `fatal_host_below`."""
    typical = _shown(found.typical or 0.0, scale)
    # Unconfirmed: no time for a second measurement, or no processor.
    doubts = {True: "", False: " (not confirmed: repeat when processors are idle)"}
    blamed: Sequence[Culprit[int] | Culprit[Link]] = (*found.hosts, *found.links)
    for one in blamed:
        if isinstance(one.subject, int):
            device, label = report.roster.hosts[one.subject].interface, report.label(one.subject)
            limits = f"limits of bandwidth (`tc -s qdisc show dev {device}`)"
            cable = f"speed and duplex (`ethtool {device}`) and errors (`ip -s link show dev {device}`)"
            looks = f"{limits}, then at {cable}" if one.way is Direction.OUT else f"{cable}, then at {limits}"
            remedy = f"{hint}on {label} look at {looks}; if it stays, replace the host"
        else:
            source, target = map(report.label, one.subject)
            looks = "switch ports, cables, routes (`tracepath` from one to the other)"
            remedy = f"look at what is between {source} and {target} only: {looks}; or run without one of them"
        way = "" if one.way is Direction.BOTH else f" {one.way}"
        fatal = one.confirmed and one.figure < (fatal_host_below if isinstance(one.subject, int) else fatal_below)
        measured, unit_here = _shown(one.figure, scale), f"{unit}{way}{words}{doubts[one.confirmed]}"
        yield report(one.subject).failed(measured, fatal=fatal, expected=typical, remedy=remedy, unit=unit_here)


def _shown(figure: float, scale: float) -> float:
    return float(f"{scale * figure:.3g}") + 0.0  # no -0.0


def judge_links(
    roster: Roster,
    *,
    contacts: Mapping[Link, Contact],
    flows: tuple[Sequence[Flow], Sequence[Flow]] | None,
    silences: Silences,
    thresholds: PreflightThresholds,
    names: Sequence[str],
) -> list[Verdict]:
    """All checks of links: one pass each, or the problems, without results of silent hosts and, but for `loss`, what heavy loss
    explains. `flows`: the first ones, and the second ones of suspects; None: not measured. `names`: of all hosts."""
    contacts = {link: contact for link, contact in contacts.items() if not silences.keys() & set(link)}
    counted, contacts = contacts, without_lossy(contacts, thresholds=thresholds)
    lossy = counted.keys() - contacts.keys()
    verdicts = [*judge_roster(roster, silences=silences, names=names), *judge_reach(contacts, roster=roster)]
    if len(roster.hosts) < 2:
        return verdicts
    verdicts += judge_mtu(contacts, roster=roster)
    verdicts += judge_loss(counted, roster=roster, thresholds=thresholds)
    verdicts += judge_latency(contacts, roster=roster, thresholds=thresholds)
    verdicts += judge_clocks(contacts, roster=roster, thresholds=thresholds)
    if flows is not None:
        first, again = (
            [flow for flow in part if not silences.keys() & set(flow.link) and flow.link not in lossy] for part in flows
        )
        verdicts += judge_bandwidth(first, again, roster=roster, thresholds=thresholds)
    return verdicts
