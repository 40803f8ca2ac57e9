"""Verdicts about bandwidth, from rounds of disjoint pairs. Pure."""

import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from elastictrain.preflight.links import remedies
from elastictrain.preflight.links.culprit import BadLink, Culprit, LinkBlame, Way, best_of, blame, blame_twice
from elastictrain.preflight.links.judge_contacts import Speaker
from elastictrain.preflight.links.messages import Flow, Link, Roster
from elastictrain.preflight.links.options import LinkOptions
from elastictrain.preflight.links.rounds import Round, num_second_rounds, second_rounds
from elastictrain.preflight.verdict import Status, Verdict


@dataclass(frozen=True, slots=True)
class FlowBlame:
    """Who is to blame for bandwidth one way, and who only while bytes flow both ways."""

    one_way: LinkBlame
    both_ways: LinkBlame


def flow_blame(first: Iterable[Flow], second: Iterable[Flow] | None, *, options: LinkOptions) -> FlowBlame:
    """`second`: what was measured of suspects again; None before that."""
    second = None if second is None else tuple(second)
    first = tuple(first)
    found = {}
    for both in (False, True):
        once = _values(first, both=both)
        again = None if second is None else _values(second, both=both)

        def too_slow(figure: float, typical: float) -> bool:
            return figure < options.slow_ratio * typical

        if again is None:
            found[both] = blame(once, too_bad=too_slow)
        else:
            excused = best_of((flow.link, flow.excused_gbps()) for flow in second or () if flow.both is both)
            found[both] = blame_twice(once, again, excused=excused, too_bad=too_slow)
    return FlowBlame(found[False], found[True])


def suspect_rounds(flows: Iterable[Flow], *, num_hosts: int, options: LinkOptions) -> tuple[Round, ...]:
    """Rounds in which all that looks guilty is measured again; none if nothing does."""
    flows = tuple(flows)
    found = flow_blame(flows, None, options=options)
    hosts = {culprit.host for one in (found.one_way, found.both_ways) for culprit in one.hosts}
    links = {bad.link for one in (found.one_way, found.both_ways) for bad in one.links}
    measured = {flow.link for flow in flows}
    tainted = hosts | {host for link in links for host in link}
    present = sorted({host for link in measured for host in link} - hosts)
    # Hosts without any suspicious link are the better witnesses, where there are some.
    good = [host for host in present if host not in tainted] or present
    links = {link for link in links if not set(link) & hosts}
    return second_rounds(hosts=hosts, links=links, good=good, met=measured, num=num_second_rounds(num_hosts))


def judge_bandwidth(
    first: Iterable[Flow],
    second: Iterable[Flow],
    *,
    roster: Roster,
    options: LinkOptions,
) -> list[Verdict]:
    """Check `bandwidth`: hosts by their best link against the median of all hosts', and links between good hosts."""
    first, second = tuple(first), tuple(second)
    speaker = Speaker("bandwidth", roster)
    found = flow_blame(first, second, options=options)
    if found.one_way.typical is None:
        return [speaker.skipped("no link was measured", remedy="see what the other link checks say, and repeat")]
    verdicts = list(_verdicts(speaker, found.one_way, both=False))
    # Bytes in one direction wait for acknowledgements in the other: what is named already has more such symptoms.
    guilty = {culprit.host for culprit in found.one_way.hosts}
    named = {bad.link for bad in found.one_way.links}
    both_ways = replace(
        found.both_ways,
        hosts=tuple(culprit for culprit in found.both_ways.hosts if culprit.host not in guilty),
        links=tuple(
            bad for bad in found.both_ways.links if not guilty & set(bad.link) and not named & {bad.link, bad.link[::-1]}
        ),
    )
    verdicts += _verdicts(speaker, both_ways, both=True)
    typical = typical_gbps(first, both=False)
    return verdicts or [speaker.passed(_rounded(typical or 0.0), unit="Gbit/s")]


def typical_gbps(flows: Iterable[Flow], *, both: bool) -> float | None:
    """Median over all links; None if there are none, or nothing came through most of them."""
    values = _values(flows, both=both)
    return (statistics.median(values.values()) if values else None) or None


def _verdicts(speaker: Speaker, found: LinkBlame, *, both: bool) -> Iterator[Verdict]:
    typical = _rounded(found.typical or 0.0)
    words = " while sending and receiving" if both else ""
    for culprit in found.hosts:
        host = speaker.roster.hosts[culprit.host]
        way = "" if culprit.way is Way.BOTH else f" {culprit.way}"
        yield speaker.say(
            culprit.host,
            measured=_rounded(culprit.score),
            expected=typical,
            unit=f"Gbit/s{way}{words}{_doubt(culprit)}",
            remedy=remedies.look_at_host(host, label=speaker.host(culprit.host), way=culprit.way),
            status=Status.FAIL if culprit.confirmed else Status.WARN,
        )
    fails = len(speaker.roster.hosts) == 2
    for bad in found.links:
        source, target = (speaker.host(place) for place in bad.link)
        yield speaker.say(
            bad.link,
            measured=_rounded(bad.value),
            expected=typical,
            unit=f"Gbit/s{words}{_doubt(bad)}",
            remedy=remedies.look_at_link(source, target),
            status=Status.FAIL if bad.confirmed and (fails or _is_hopeless(bad.value, found.typical)) else Status.WARN,
        )


def _doubt(found: Culprit | BadLink) -> str:
    """There was no room for a second measurement, or no processor."""
    return "" if found.confirmed else " (not confirmed: repeat when processors are idle)"


def _is_hopeless(value: float, typical: float | None) -> bool:
    """A link between two good hosts that has less than a tenth of what others have drags the whole group down."""
    return typical is not None and value < 0.1 * typical


def _values(flows: Iterable[Flow], *, both: bool) -> dict[Link, float]:
    return best_of((flow.link, flow.gbps) for flow in flows if flow.both is both)


def _rounded(gbps: float) -> float:
    return float(f"{gbps:.3g}")
