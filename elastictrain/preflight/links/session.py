"""The link checks as one host of the group runs them. Each host introduces itself. The first host publishes the roster, gives
one order after another, waits for the reports, and judges them. A dead host costs the others the time of one order at most."""

import logging
import random
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial

from elastictrain.bounded_json import MalformedJsonError
from elastictrain.distributed.bounded import each_within
from elastictrain.distributed.exchange import Exchange, get_record, put_record
from elastictrain.errors import HostUnfitError, TransportError
from elastictrain.net.listening import read_port_range
from elastictrain.net.server import ChannelServer
from elastictrain.preflight.links.judge import judge_links, suspect_rounds, suspicious_contacts
from elastictrain.preflight.links.judge_contacts import claimed_twice, judge_roster, leaderless, unheard
from elastictrain.preflight.links.messages import Contact, Flow, HostIntroduction, Link, LinkFindings, Order, Roster, merged
from elastictrain.preflight.links.probes import LinkOptions, PeerProbe
from elastictrain.preflight.links.responder import responder_secret, start_responder
from elastictrain.preflight.links.rounds import Pair, Round, contact_links, first_rounds
from elastictrain.preflight.verdict import Verdict

logger = logging.getLogger(__name__)

_CLOSE_S = 2.0
_TURN_S = 0.5  # the first host waits this long for one report before it looks for another
_ALL_PAIRS_UP_TO = 16  # a full check contacts every pair up to this many hosts; above, distances 1, 2, 4, 8 ... along the ring


@dataclass(frozen=True, slots=True)
class LinkReport:
    """Verdicts: on the first host all; on another host why it left early, if so. `roster` None: unknown to this host."""

    verdicts: tuple[Verdict, ...]
    roster: Roster | None = None


@dataclass(slots=True)
class LinkSession:
    """Runs the link checks of this host; all hosts of the group run one."""

    host: HostIntroduction  # this host, with the TCP ports that training will use, if known and free; 0 is any
    names: tuple[str, ...]  # of all hosts by node rank, all different
    exchange: Exchange  # new for each bring-up: no key is ever removed
    full: bool = False  # measure bandwidth, too
    options: LinkOptions = field(default_factory=LinkOptions)
    wall: Callable[[], float] = time.time  # the clock that the hosts compare
    _roster: Roster = field(default=Roster(hosts=(), absent=(), waited_s=0.0, token=""), init=False)
    _server: ChannelServer | None = field(default=None, init=False)
    _twice: HostIntroduction | None = field(default=None, init=False)  # of a host whose node rank another one has
    _place: int = field(default=0, init=False)
    _num_orders: int = field(default=0, init=False)
    _probes: dict[int, PeerProbe] = field(default_factory=dict, init=False)
    _contacts: dict[Link, Contact] = field(default_factory=dict, init=False)
    _silences: dict[int, tuple[str, float]] = field(default_factory=dict, init=False)

    def run(self) -> LinkReport:
        """Never raises for failures of hosts or the network; every wait in it has a limit."""
        try:
            verdicts = self._take_part()
        except (TransportError, MalformedJsonError) as error:
            verdicts = [unheard(self.host.name, why=str(error))]
        finally:
            if self._server is not None:
                self._server.close(_CLOSE_S)
        return LinkReport(tuple(verdicts), self._roster if self._roster.hosts else None)

    def _take_part(self) -> list[Verdict]:
        began, own = time.monotonic(), replace(self.host, nonce=secrets.token_hex(16))
        try:
            self._server = start_responder(own.address, own.tcp_ports, wall=self.wall)
            ports = tuple(listener.getsockname()[1] for listener in self._server.listeners)
            spans = tuple(str(port) if port else "{}:{}".format(*read_port_range()) for port in own.tcp_ports)
            own = replace(own, tcp_ports=ports, port_spans=spans)
        except HostUnfitError as error:
            own = replace(own, trouble=str(error))
        if other := get_record(self.exchange, f"links/hello/{own.node_rank}", HostIntroduction, limit_s=0.0):
            put_record(self.exchange, "links/twice", own)
            return [claimed_twice(own, other)]
        put_record(self.exchange, f"links/hello/{own.node_rank}", own)
        # The first host may start a whole limit later than this one.
        late_s = 2 * self.options.roster_s + self.options.grace_s
        leads = own.node_rank == 0
        roster = self._gather_roster(own) if leads else get_record(self.exchange, "links/roster", Roster, limit_s=late_s)
        if roster is None:
            return [leaderless(own.name, waited_s=time.monotonic() - began, leader=self.names[0])]
        self._roster = roster
        listed = next((host for host in roster.hosts if host.node_rank == own.node_rank), None)
        if listed is None:
            return [unheard(own.name, why="it came too late")]
        if listed != own:
            return [claimed_twice(own, listed)]
        if self._server is not None:
            self._server.set_secret(responder_secret(bytes.fromhex(roster.token), bytes.fromhex(own.nonce)))
        self._place = roster.hosts.index(own)
        return self._lead() if leads else self._follow()

    def _gather_roster(self, own: HostIntroduction) -> Roster:
        """As the first host: wait for all, publish the roster."""
        began, num_hosts = time.monotonic(), len(self.names)
        found = {own.node_rank: own}
        waiting = deque(range(1, num_hosts))
        while waiting and self._twice is None:
            rank, left_s = waiting.popleft(), began + self.options.roster_s - time.monotonic()
            try:
                limit_s = min(_TURN_S, left_s)
                introduction = get_record(self.exchange, f"links/hello/{rank}", HostIntroduction, limit_s=limit_s)
            except MalformedJsonError as error:
                logger.warning("node rank %d does not introduce itself as this release does: %s", rank, error)
                continue
            if introduction is not None:
                found[rank] = introduction
            elif left_s > 0:
                waiting.append(rank)
            self._twice = get_record(self.exchange, "links/twice", HostIntroduction, limit_s=0.0)
        roster = Roster(
            hosts=tuple(found[rank] for rank in sorted(found)),
            absent=tuple(rank for rank in range(num_hosts) if rank not in found),
            waited_s=round(time.monotonic() - began, 3),
            token=secrets.token_hex(32),
        )
        put_record(self.exchange, "links/roster", roster)
        return roster

    def _follow(self) -> list[Verdict]:
        """Carry out the orders of the first host, until the last one."""
        # The next order may come as late as the slowest host's report on this one, and a little more for the judgement.
        limit_s = self.options.limits.contact_s
        while True:
            patience_s = limit_s + 2 * self.options.grace_s
            order = get_record(self.exchange, f"links/order/{self._num_orders}", Order, limit_s=patience_s)
            if order is None:
                return [leaderless(self.host.name, waited_s=patience_s, leader=self.names[0])]
            if not order.links:
                return []
            self._check_places(order.links)
            self._carry_out(order)
            limit_s = self.options.limit_s(measure=order.measure)
            self._num_orders += 1

    def _carry_out(self, order: Order) -> None:
        """Do this host's part of an order and report the result."""
        if not order.concerns(self._place):
            return
        put_record(self.exchange, f"links/taken/{self._num_orders}/{self._place}", True)
        hosts, token = self._roster.hosts, bytes.fromhex(self._roster.token)
        probes, limit_s = [], self.options.limit_s(measure=order.measure)
        for link in (link for link in order.links if link[0] == self._place):
            source, target = (hosts[place] for place in link)
            probe = PeerProbe(source, target, link, token=token, options=self.options, wall=self.wall)
            # One per target: it knows which port of the other host is open.
            probes.append(self._probes.setdefault(link[1], probe))
        # Report in time, whatever a peer does: a host that does not report counts as silent.
        if order.measure:
            measured = each_within([(limit_s, probe.flows) for probe in probes])
            flows = (flow for probe, some in zip(probes, measured, strict=True) for flow in some or probe.no_flows())
            found = LinkFindings((), tuple(flows))
        else:
            made = each_within([(limit_s, probe.contact) for probe in probes])
            contacts = (one or probe.no_contact(limit_s) for probe, one in zip(probes, made, strict=True))
            found = LinkFindings(tuple(contacts), ())
        put_record(self.exchange, f"links/found/{self._num_orders}/{self._place}", found)

    def _lead(self) -> list[Verdict]:
        """As the first host: give the orders, gather the reports, and judge them."""
        if self._twice is not None:
            known = next(host for host in self._roster.hosts if host.node_rank == self._twice.node_rank)
            put_record(self.exchange, "links/order/0", Order(()))
            return [claimed_twice(known, self._twice), *judge_roster(self._roster, silences={}, names=self.names)]
        thresholds, num, full = self.options.thresholds, len(self._roster.hosts), self.full
        self._make_contact(contact_links(num, all_pairs=full and num <= _ALL_PAIRS_UP_TO, num_distances=None if full else 2))
        flows: tuple[tuple[Flow, ...], tuple[Flow, ...]] | None = None
        if full:
            alive = [place for place in range(num) if self._is_there((place,))]
            # The seed is new each time: restarts measure other links.
            plan = first_rounds(len(alive), seed=random.SystemRandom().getrandbits(32))
            first = self._measure(tuple(tuple((alive[a], alive[b]) for a, b in pairs) for pairs in plan))
            flows = first, self._measure(suspect_rounds(first, num_hosts=num, thresholds=thresholds))
        put_record(self.exchange, f"links/order/{self._num_orders}", Order(()))
        judge = partial(judge_links, self._roster, thresholds=thresholds, names=self.names)
        return judge(contacts=self._contacts, flows=flows, silences=self._silences)

    def _is_there(self, places: Iterable[int]) -> bool:
        """Whether all of these hosts listen, and have reported so far."""
        return not any(place in self._silences or self._roster.hosts[place].trouble for place in places)

    def _make_contact(self, links: Iterable[Link]) -> None:
        """Contact all links, and the bad ones a second time; the better result counts."""
        for _ in range(2):
            links = tuple(filter(self._is_there, links))
            if not links:
                return
            found = self._order(Order(links))
            self._contacts = merged([*self._contacts.values(), *(one for report in found for one in report.contacts)])
            heard = {link: one for link, one in self._contacts.items() if self._is_there(link)}
            links = sorted(suspicious_contacts(heard, thresholds=self.options.thresholds) & set(links))

    def _measure(self, rounds: tuple[Round, ...]) -> tuple[Flow, ...]:
        links = {link for pairs in rounds for a, b in pairs for link in ((a, b), (b, a))}
        self._make_contact(sorted(links - self._contacts.keys()))
        flows: list[Flow] = []
        for pairs in rounds:
            if usable := tuple(filter(self._is_usable, pairs)):
                flows += (flow for report in self._order(Order(usable, measure=True)) for flow in report.flows)
        return tuple(flows)

    def _is_usable(self, pair: Pair) -> bool:
        """Whether both hosts take part, and large frames pass in both directions as far as is known."""
        contacts = [self._contacts.get(link) for link in (pair, pair[::-1])]
        passing = all(one is not None and one.latency_s is not None and not one.loses_large for one in contacts)
        return passing and self._is_there(pair)

    def _order(self, order: Order) -> list[LinkFindings]:
        """Publish an order, do this host's part, and gather the reports. A host that does not report in time is silent."""
        number, began = self._num_orders, time.monotonic()
        put_record(self.exchange, f"links/order/{number}", order)
        self._carry_out(order)
        self._num_orders += 1
        until = began + self.options.limit_s(measure=order.measure) + self.options.grace_s
        found: list[LinkFindings] = []
        waiting = deque(place for place in range(len(self._roster.hosts)) if order.concerns(place))
        while waiting:
            place, is_lost = waiting.popleft(), False
            limit_s = min(_TURN_S, until - time.monotonic())
            try:
                report = get_record(self.exchange, f"links/found/{number}/{place}", LinkFindings, limit_s=limit_s)
                if report is not None:
                    self._check_places([*(one.link for one in report.contacts), *(one.link for one in report.flows)])
            except MalformedJsonError as error:
                logger.warning("%s: %s", self._roster.hosts[place].name, error)
                report, is_lost = None, True
            waited_s = time.monotonic() - began
            if report is not None:
                found.append(report)
            elif is_lost or began + waited_s >= until or self._is_ignored(number, place, waited_s):
                self._silences[place] = "bandwidth was measured" if order.measure else "contacts were made", waited_s
            else:
                waiting.append(place)
        return found

    def _is_ignored(self, number: int, place: int, waited_s: float) -> bool:
        """Whether the host has not taken up the order in the time that it had for that."""
        # A host that cannot be reached from here may still do its part: only its records count.
        taken = f"links/taken/{number}/{place}"
        return waited_s >= self.options.take_s and get_record(self.exchange, taken, bool, limit_s=0.0) is None

    def _check_places(self, links: Iterable[Link]) -> None:
        wrong = [(a, b) for a, b in links if a == b or max(a, b) >= len(self._roster.hosts)]
        if wrong:
            raise MalformedJsonError(f"there is no link {wrong[0]} among {len(self._roster.hosts)} hosts")
