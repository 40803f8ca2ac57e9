"""Verdicts on hosts and links: who takes part, reachability, MTU and clocks. Pure."""

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from elastictrain.config.preflight import PreflightThresholds
from elastictrain.preflight.links.culprit import BrokenLinks, Direction, find_broken
from elastictrain.preflight.links.messages import Contact, HostIntroduction, Link, Roster
from elastictrain.preflight.verdict import Reporter, Scope, Status, Verdict

_MOST_NAMES = 8
_ON_ROSTER = Reporter("roster")
_TOGETHER = Reporter("roster", scope=Scope.GROUP)


@dataclass(frozen=True, slots=True)
class LinkReporter:
    """Makes one check's verdicts about a host (its place), a link ("h3 -> h1"), several hosts by name, or the group (None)."""

    check: str
    roster: Roster

    def label(self, place: int) -> str:
        return self.roster.hosts[place].name

    def __call__(self, subject: int | Link | str | None) -> Reporter:
        scope, name = Scope.GROUP, subject if isinstance(subject, str) else "all"
        if isinstance(subject, int):
            scope, name = Scope.HOST, self.label(subject)
        elif isinstance(subject, tuple):
            scope, name = Scope.LINK, " -> ".join(map(self.label, subject))
        return Reporter(self.check, name, scope)

    def nothing_known(self) -> list[Verdict]:
        return [self(None).skipped("nothing known of any link", remedy="see what check `reachable` says, and repeat")]


Silences = Mapping[int, tuple[str, float]]  # by place, hosts that stopped reporting: when, and seconds that they had


def judge_roster(roster: Roster, *, silences: Silences, names: Sequence[str]) -> list[Verdict]:
    """Check `roster`: hosts that did not come, and hosts that fell silent. `names`: of all hosts by node rank."""
    present, num_present = _listed([host.name for host in roster.hosts]), len(roster.hosts)
    verdicts = []
    for rank in roster.absent:
        measured, without = f"no word in {roster.waited_s:.3g} s", f"`torchrun --nnodes={num_present}:{len(names)}`"
        look = f"look there why it did not start (present: {present})"
        remedy = f"start the launcher on {names[rank]}, or {look}; or run without it, with a smaller minimum: {without}"
        verdicts.append(_ON_ROSTER(names[rank], Status.FAIL, measured, f"{len(names)} hosts", remedy))
    for place, (doing, waited_s) in silences.items():
        label, address = roster.hosts[place].name, roster.hosts[place].address
        look = f"look whether {label} ({address}) is up and its launcher runs (`ping`, `ssh {address}`)"
        remedy = f"{look}; restart it there, or run without this host"
        expected = f"word within {waited_s:.3g} s"
        verdicts.append(_ON_ROSTER(label, Status.FAIL, f"silent while {doing}", expected, remedy))
    everybody = f"{num_present} hosts"
    return verdicts or [_TOGETHER.passed(everybody, expected=everybody)]


def leaderless(label: str, *, waited_s: float, leader: str) -> Verdict:
    """The verdict of a host that receives nothing from the first host."""
    remedy = f"look whether the launcher runs on the host of node rank 0 ({leader}), and start it there"
    return _ON_ROSTER(leader, Status.FAIL, f"{label} heard nothing of it for {waited_s:.3g} s", "its word", remedy)


def claimed_twice(ours: HostIntroduction, theirs: HostIntroduction) -> Verdict:
    """Two launchers claim the same node rank."""
    measured = f"both say that they are node rank {ours.node_rank} ({ours.address}, {theirs.address})"
    remedy = f"give one of them another `--node-rank` than {ours.node_rank}, or end what is left of an earlier start"
    return _TOGETHER(f"{ours.name}, {theirs.name}", Status.FAIL, measured, "a node rank each", remedy)


def unheard(host: str, *, why: str) -> Verdict:
    """The verdict of a host that cannot exchange records with the others."""
    remedy = f"look whether {host} reaches the rendezvous endpoint (MASTER_ADDR and MASTER_PORT), and whether it is up"
    return _ON_ROSTER(host, Status.FAIL, why, "word from and to all hosts", remedy)


def judge_reach(contacts: Mapping[Link, Contact], *, roster: Roster) -> list[Verdict]:
    """Check `reachable`: hosts that cannot listen, and every port that was tried."""
    report, found = LinkReporter("reachable", roster), []
    for place, host in enumerate(roster.hosts):
        if host.trouble:
            remedy = f"see who has the address and the ports: `ip address show dev {host.interface}`, `ss -ltnp`; choose others"
            found.append(report(place).failed(host.trouble, expected=f"a listener on {host.address}", remedy=remedy))
    if not contacts:
        return found or [report(None).skipped("no link to try", remedy="start preflight on two hosts or more")]
    bad = {link: contact for link, contact in contacts.items() if contact.blocked}
    everything = f"{len(contacts)} links"
    found += [_unreachable(report, one, [bad[link] for link in one.links]) for one in find_broken(bad, tried=contacts)]
    return found or [report(None).passed(everything, expected=everything)]


def _unreachable(report: LinkReporter, broken: BrokenLinks, bad: Sequence[Contact]) -> Verdict:
    hosts, subject, why = report.roster.hosts, broken.subject, _why(bad[0])
    wanted = sorted({hosts[contact.link[1]].span_of(port) for contact in bad for port, _ in contact.blocked})
    ports = _listed(wanted).replace(":", "-")
    if subject is None:
        other = f"another interface than {hosts[bad[0].link[0]].interface} (`NCCL_SOCKET_IFNAME`, `GLOO_SOCKET_IFNAME`)"
        remedy = f"choose {other}, or let hosts reach each other on TCP ports {ports} in firewalls and security group"
        return report(None).failed(f"no host reaches another ({why})", expected="every link", remedy=remedy)
    if isinstance(subject, int):
        words = {Direction.OUT: "reaches no other host", Direction.IN: "cannot be reached"}
        measured = f"{words.get(broken.way, 'cannot be reached and reaches no other')} ({why})"
        walls = "the firewall (`iptables -S`, `nft list ruleset`), its security group"
        address = f"its address (`ip address show dev {hosts[subject].interface}`)"
        remedy = f"on {report.label(subject)} look at {walls} and {address}: TCP ports {ports} must be open; or run without it"
        target, expected = subject, "every link"
    else:
        source, target = hosts[subject[0]].address, subject[1]
        measured, expected = why, "a connection"
        rule = f"`iptables -I INPUT -p tcp -s {source} -m multiport --dports {','.join(wanted)} -j ACCEPT`"
        where = f"on {report.label(target)} {rule}, and in the security group or firewall between them"
        remedy = f"let {source} reach {hosts[target].address}, TCP ports {ports}: {where}"
    if any("answers" in _why(contact) for contact in bad if contact.link[1] == target):
        device = hosts[target].interface
        twice = f"{hosts[target].address} on {device} is used twice: `ip address show dev {device}`"
        other = "choose another interface there: `NCCL_SOCKET_IFNAME` and `GLOO_SOCKET_IFNAME`"
        remedy = f"give {report.label(target)} an address of its own ({twice}), or {other}"
    return report(subject).failed(measured, expected=expected, remedy=remedy)


def _why(contact: Contact) -> str:
    by_reason: dict[str, list[str]] = defaultdict(list)
    for port, reason in contact.blocked:
        by_reason[reason].append(str(port))
    return "; ".join(f"port{'s' if len(ports) > 1 else ''} {_listed(ports)}: {reason}" for reason, ports in by_reason.items())


def judge_mtu(contacts: Mapping[Link, Contact], *, roster: Roster) -> list[Verdict]:
    """Check `mtu`: the largest frames that both interfaces would send arrive whole."""
    report = LinkReporter("mtu", roster)
    tried = {link: contact for link, contact in contacts.items() if contact.largest is not None}
    if not tried:
        return report.nothing_known()
    found, hosts = [], roster.hosts
    bad = {link: contact for link, contact in tried.items() if contact.loses_large}
    for one in find_broken(bad, tried=tried):
        passing = min(bad[link].largest or 0 for link in one.links)
        intended = max(bad[link].intended or 0 for link in one.links)
        whose = range(len(hosts)) if one.subject is None else (one.subject,) if isinstance(one.subject, int) else one.subject
        by_interface: dict[str, list[str]] = defaultdict(list)
        for place in whose:
            by_interface[f"`ip link set dev {hosts[place].interface} mtu {passing}`"].append(report.label(place))
        commands = "; ".join(f"{command} on {_listed(labels)}" for command, labels in sorted(by_interface.items()))
        between = f"that of the switch or bridge between them to {intended}"
        remedy = f"set the interface's MTU to {passing} ({commands}), or {between}"
        which = {Direction.OUT: "that it sends ", Direction.IN: "that it should receive "}.get(one.way, "")
        measured = f"large frames {which}vanish above {passing} bytes"
        found.append(report(one.subject).failed(measured, expected=f"{intended} bytes", remedy=remedy))
    least = min(contact.intended or 0 for contact in tried.values())
    return found or [report(None).passed(least, expected=least, unit="bytes")]


def judge_clocks(contacts: Mapping[Link, Contact], *, roster: Roster, thresholds: PreflightThresholds) -> list[Verdict]:
    """Check `clock`: against the median of the group; two hosts against each other."""
    report = LinkReporter("clock", roster)
    ahead = offsets_from_group({link: one.offset_s for link, one in contacts.items() if one.offset_s is not None})
    if not ahead:
        return report.nothing_known()
    warn_s, fail_s, is_pair = thresholds.clock_warn_s, thresholds.clock_fail_s, len(ahead) == 2
    expected = f"within {warn_s:g}"
    found = []
    for place, offset_s in ahead.items():
        if abs(offset_s) <= warn_s:
            continue
        label = report.label(place)
        subject = f"{report.label(min(ahead))}, {label}" if is_pair else place
        unit = f"s that {label} is ahead" if is_pair else "s ahead of the group"
        setting = "`chronyc makestep`, or `timedatectl set-ntp true` and `systemctl restart systemd-timesyncd`"
        remedy, fatal = f"on {'both hosts' if is_pair else label} set the clock: {setting}", abs(offset_s) > fail_s
        found.append(report(subject).failed(round(offset_s, 3), fatal=fatal, expected=expected, remedy=remedy, unit=unit))
    worst = max(ahead.values(), key=abs)
    return found or [report(None).passed(round(worst, 4), expected=expected, unit="s")]


def offsets_from_group(offsets: Mapping[Link, float]) -> dict[int, float]:
    """How far each host's clock is ahead of the group's, in seconds; hosts without a measurement are left out. `offsets`: by
    link, the second host's clock minus the first's. Offsets add up along a chain of links, so not all hosts ask the first one.
    The group's time is the median of three or more hosts, else the first host's."""
    neighbours: dict[int, list[tuple[int, float]]] = defaultdict(list)
    for (source, target), offset in sorted(offsets.items()):
        neighbours[source].append((target, offset))
        neighbours[target].append((source, -offset))
    if not neighbours:
        return {}
    reached = [min(neighbours)]
    ahead = {reached[0]: 0.0}
    for host in reached:
        for other, offset in neighbours[host]:
            if other not in ahead:
                ahead[other] = ahead[host] + offset
                reached.append(other)
    middle = statistics.median_low(ahead.values()) if len(ahead) > 2 else 0.0
    return {host: ahead[host] - middle for host in sorted(ahead)}


def _listed(found: Sequence[str]) -> str:
    rest = len(found) - _MOST_NAMES
    return ", ".join(found[:_MOST_NAMES]) + (f" and {rest} more" if rest > 0 else "")
