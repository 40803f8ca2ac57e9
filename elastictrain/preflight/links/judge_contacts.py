"""Verdicts about reach, MTU, latency and clocks, from what hosts found of each other. Pure."""

import statistics
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from elastictrain.preflight.links import remedies
from elastictrain.preflight.links.culprit import LinkBlame, Way, blame, find_broken
from elastictrain.preflight.links.messages import Contact, Link, Roster
from elastictrain.preflight.links.options import LinkOptions
from elastictrain.preflight.verdict import Figure, Reporter, Scope, Status, Verdict

_ALL = "all"


@dataclass(frozen=True, slots=True)
class Speaker:
    """Says what `check` found, with the hosts' names."""

    check: str
    roster: Roster

    def host(self, place: int) -> str:
        """What the host at a place of the roster is called."""
        return self.roster.labels()[place]

    def link(self, link: Link) -> str:
        """As a verdict's subject: "h3 -> h1"."""
        labels = self.roster.labels()
        return f"{labels[link[0]]} -> {labels[link[1]]}"

    def say(
        self,
        subject: int | Link | str,
        *,
        measured: Figure,
        expected: Figure = None,
        unit: str = "",
        remedy: str = "",
        status: Status = Status.FAIL,
    ) -> Verdict:
        """About a host (its place), a link or, as a word, the group."""
        scope, name = Scope.GROUP, _ALL
        if isinstance(subject, int):
            scope, name = Scope.HOST, self.host(subject)
        elif isinstance(subject, tuple):
            scope, name = Scope.LINK, self.link(subject)
        else:
            name = subject
        return Reporter(self.check)(name, status, measured, expected, remedy, unit=unit, scope=scope)

    def passed(self, measured: Figure, *, expected: Figure = None, unit: str = "") -> Verdict:
        """All is well, in the whole group."""
        return self.say(_ALL, measured=measured, expected=expected, unit=unit, status=Status.PASS)

    def skipped(self, measured: str, *, remedy: str) -> Verdict:
        """Nothing is known, of the whole group."""
        return self.say(_ALL, measured=measured, remedy=remedy, status=Status.SKIP)


def late_blame(contacts: Mapping[Link, Contact], *, options: LinkOptions) -> LinkBlame:
    """Who is to blame for latency; figures are negative seconds."""

    def too_late(figure: float, typical: float) -> bool:
        return figure < options.late_factor * typical and figure < typical - options.late_floor_s

    return blame(
        {link: -contact.latency_s for link, contact in contacts.items() if contact.latency_s is not None},
        too_bad=too_late,
        directed=False,
    )


def suspicious_contacts(contacts: Mapping[Link, Contact], *, options: LinkOptions) -> list[Link]:
    """What is to be tried a second time before anybody is blamed."""
    late = late_blame(contacts, options=options)
    late_hosts, late_links = {culprit.host for culprit in late.hosts}, {bad.link for bad in late.links}
    return sorted(
        link
        for link, contact in contacts.items()
        if contact.blocked or contact.loses_large or contact.is_silent or link in late_links or late_hosts & set(link)
    )


def judge_reach(contacts: Mapping[Link, Contact], *, roster: Roster) -> list[Verdict]:
    """Check `reachable`: every port that was tried."""
    speaker = Speaker("reachable", roster)
    if not contacts:
        return [speaker.skipped("no link to try", remedy="start preflight on two hosts or more")]
    bad = {link: contact for link, contact in contacts.items() if contact.blocked}
    if not bad:
        return [speaker.passed(f"{len(contacts)} links", expected=f"{len(contacts)} links")]
    broken = find_broken(bad, tried=contacts)
    found = []
    if broken.everything:
        found.append(_reach_of_all(speaker, bad))
    for host, way in broken.hosts:
        links = [link for link in sorted(bad) if host in link]
        found.append(_reach_of_host(speaker, host, way, [bad[link] for link in links]))
    found += [_reach_of_link(speaker, bad[link]) for link in broken.links]
    return found


def _reach_of_all(speaker: Speaker, bad: Mapping[Link, Contact]) -> Verdict:
    one = next(iter(bad.values()))
    hosts = speaker.roster.hosts
    ports = sorted({port for contact in bad.values() for port, _ in contact.blocked})
    remedy = (
        f"choose another interface than {hosts[one.link[0]].interface} (`NCCL_SOCKET_IFNAME`, `GLOO_SOCKET_IFNAME`), or let "
        f"hosts reach each other on TCP ports {remedies.names([str(port) for port in ports])} in firewalls and security group"
    )
    return speaker.say(_ALL, measured=f"no host reaches another ({_why(one)})", expected="every link", remedy=remedy)


def _reach_of_host(speaker: Speaker, host: int, way: Way, bad: Sequence[Contact]) -> Verdict:
    hosts = speaker.roster.hosts
    strange = [contact for contact in bad if contact.link[1] == host and "answers" in _why(contact)]
    ports = sorted({port for contact in bad for port, _ in contact.blocked if host in contact.link})
    words = {Way.OUT: "reaches no other host", Way.IN: "cannot be reached", Way.BOTH: "cannot be reached and reaches no other"}
    device, label = hosts[host].interface, speaker.host(host)
    remedy = (
        f"on {label} look at the firewall (`iptables -S`, `nft list ruleset`), its security group and its address (`ip address "
        f"show dev {device}`): TCP ports {remedies.names([str(port) for port in ports])} must be open; or run without it"
    )
    if strange:
        remedy = remedies.reach_address(hosts[host], label=label)
    return speaker.say(host, measured=f"{words[way]} ({_why(bad[0])})", expected="every link", remedy=remedy)


def _reach_of_link(speaker: Speaker, contact: Contact) -> Verdict:
    source, target = (speaker.roster.hosts[place] for place in contact.link)
    label = speaker.host(contact.link[1])
    ports = [port for port, _ in contact.blocked]
    remedy = remedies.open_port(source, target, target_label=label, ports=ports, protocol="tcp")
    if "answers" in _why(contact):
        remedy = remedies.reach_address(target, label=label)
    return speaker.say(contact.link, measured=_why(contact), expected="a connection", remedy=remedy)


def _why(contact: Contact) -> str:
    by_reason: dict[str, list[str]] = {}
    for port, reason in contact.blocked:
        by_reason.setdefault(reason, []).append(str(port))
    return "; ".join(
        f"port{'s' if len(ports) > 1 else ''} {remedies.names(ports)}: {reason}" for reason, ports in by_reason.items()
    )


def judge_mtu(contacts: Mapping[Link, Contact], *, roster: Roster) -> list[Verdict]:
    """Check `mtu`: the largest frames that both interfaces would send arrive whole."""
    speaker = Speaker("mtu", roster)
    tried = {link: contact for link, contact in contacts.items() if contact.largest is not None}
    if not tried:
        return [speaker.skipped("nothing known of any link", remedy="see what check `reachable` says, and repeat")]
    found = [*_vanishing(speaker, tried), *_unanswered(speaker, tried)]
    sizes = sorted({contact.intended or 0 for contact in tried.values()})
    return found or [speaker.passed(sizes[0], expected=sizes[0], unit="bytes")]


def _vanishing(speaker: Speaker, tried: Mapping[Link, Contact]) -> Iterator[Verdict]:
    bad = {link: contact for link, contact in tried.items() if contact.loses_large}
    broken = find_broken(bad, tried={link for link, contact in tried.items() if not contact.is_silent})
    everybody = list(enumerate(speaker.roster.hosts))
    if broken.everything:
        yield _vanishing_above(speaker, _ALL, list(bad.values()), [place for place, _ in everybody])
    for host, way in broken.hosts:
        links = [bad[link] for link in sorted(bad) if host in link]
        ways = {Way.OUT: "that it sends ", Way.IN: "that it should receive ", Way.BOTH: ""}
        yield _vanishing_above(speaker, host, links, [host], what=ways[way])
    for link in broken.links:
        yield _vanishing_above(speaker, link, [bad[link]], list(link))


def _vanishing_above(
    speaker: Speaker, subject: int | Link | str, bad: Sequence[Contact], places: Sequence[int], *, what: str = ""
) -> Verdict:
    passing = min(contact.largest or 0 for contact in bad)
    intended = max(contact.intended or 0 for contact in bad)
    hosts = [(speaker.host(place), speaker.roster.hosts[place]) for place in places]
    return speaker.say(
        subject,
        measured=f"large frames {what}vanish above {passing} bytes",
        expected=f"{intended} bytes",
        remedy=remedies.lower_mtu(hosts, to=passing, intended=intended),
    )


def _unanswered(speaker: Speaker, tried: Mapping[Link, Contact]) -> Iterator[Verdict]:
    bad = [link for link, contact in tried.items() if contact.is_silent]
    broken = find_broken(bad, tried=tried)
    subjects: list[int | Link | str] = [host for host, _ in broken.hosts]
    subjects += broken.links
    if broken.everything:
        subjects.append(_ALL)
    for subject in subjects:
        yield speaker.say(
            subject,
            measured="no UDP frame was acknowledged, so nothing is known",
            expected="an answer",
            remedy="let hosts send each other UDP (any port), in firewalls and security group, and repeat; or "
            "preflight.checks.mtu=off",
            status=Status.WARN,
        )


def judge_latency(contacts: Mapping[Link, Contact], *, roster: Roster, options: LinkOptions) -> list[Verdict]:
    """Check `latency`: round trips against the median of all hosts' best ones."""
    speaker = Speaker("latency", roster)
    found = late_blame(contacts, options=options)
    if found.typical is None:
        return [speaker.skipped("nothing known of any link", remedy="see what check `reachable` says, and repeat")]
    typical = _milliseconds(found.typical)
    verdicts = []
    for culprit in found.hosts:
        remedy = remedies.look_at_host(roster.hosts[culprit.host], label=speaker.host(culprit.host), way=Way.OUT)
        remedy = f"place it near the others (same zone or rack); {remedy}"
        verdicts.append(
            speaker.say(culprit.host, measured=_milliseconds(culprit.score), expected=typical, unit="ms", remedy=remedy)
        )
    for bad in found.links:
        if bad.link[::-1] in {other.link for other in found.links} and bad.link[0] > bad.link[1]:
            continue  # a round trip is one of both directions
        source, target = (speaker.host(place) for place in bad.link)
        remedy = remedies.look_at_link(source, target)
        verdicts.append(
            speaker.say(
                bad.link,
                measured=_milliseconds(bad.value),
                expected=typical,
                unit="ms",
                remedy=remedy,
                status=Status.FAIL if len(roster.hosts) == 2 else Status.WARN,
            )
        )
    return verdicts or [speaker.passed(typical, unit="ms")]


def judge_clocks(contacts: Mapping[Link, Contact], *, roster: Roster, options: LinkOptions) -> list[Verdict]:
    """Check `clock`: against the median of the group; two hosts against each other."""
    speaker = Speaker("clock", roster)
    offsets = {link: contact.offset_s for link, contact in contacts.items() if contact.offset_s is not None}
    ahead = offsets_from_group(offsets, num_hosts=len(roster.hosts))
    if not ahead:
        return [speaker.skipped("nothing known of any link", remedy="see what check `reachable` says, and repeat")]
    found = []
    for place, offset_s in ahead.items():
        if abs(offset_s) <= options.clock_warn_s:
            continue
        label = speaker.host(place)
        pair = f"{speaker.host(min(ahead))}, {label}"
        found.append(
            speaker.say(
                place if len(ahead) > 2 else pair,
                measured=round(offset_s, 3),
                expected=f"within {options.clock_warn_s:g}",
                unit="s ahead of the group" if len(ahead) > 2 else f"s that {label} is ahead",
                remedy=remedies.set_clock(label if len(ahead) > 2 else "both hosts"),
                status=Status.FAIL if abs(offset_s) > options.clock_fail_s else Status.WARN,
            )
        )
    worst = max(ahead.values(), key=abs)
    return found or [speaker.passed(round(worst, 4), expected=f"within {options.clock_warn_s:g}", unit="s")]


def _milliseconds(negative_s: float) -> float:
    return float(f"{-1000 * negative_s:.3g}")


def offsets_from_group(offsets: Mapping[Link, float], *, num_hosts: int) -> dict[int, float]:
    """How far each host's clock is ahead of the group's, in seconds; hosts that nobody has asked are left out.

    `offsets`: by link, the second host's clock minus the first's. Along a chain of links they add up, so that not all ask the
    first host. Three hosts or more have their median as the time of the group, else the first host has it.
    """
    neighbours: dict[int, dict[int, float]] = {}
    for (source, target), offset in sorted(offsets.items()):
        neighbours.setdefault(source, {}).setdefault(target, offset)
        neighbours.setdefault(target, {}).setdefault(source, -offset)
    ahead = _from_first(neighbours)
    if len(ahead) < 2:
        return {}
    middle = statistics.median_low(ahead.values()) if len(ahead) > 2 else 0.0
    return {host: ahead[host] - middle for host in range(num_hosts) if host in ahead}


def _from_first(neighbours: Mapping[int, Mapping[int, float]]) -> dict[int, float]:
    if not neighbours:
        return {}
    start = min(neighbours)
    ahead, queue = {start: 0.0}, deque([start])
    while queue:
        host = queue.popleft()
        for other, offset in neighbours[host].items():
            if other not in ahead:
                ahead[other] = ahead[host] + offset
                queue.append(other)
    return ahead
