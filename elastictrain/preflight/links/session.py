"""The link checks of one host among all.

Each host introduces itself. The first host publishes who takes part, gives one order after another, waits for what all report,
and judges it; one that is gone costs the others one order's time at the most. All hosts adopt the same verdicts.
"""

import logging
import random
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TypeVar

from elastictrain.bounded_json import DOCUMENT, MalformedJsonError, encode_record, parse_record
from elastictrain.errors import HostUnfitError, TransportError
from elastictrain.preflight.links.judge import judge, suspect_rounds, suspicious_contacts
from elastictrain.preflight.links.judge_contacts import Silence, claimed_twice, leaderless, no_port, unheard
from elastictrain.preflight.links.messages import (
    Contact,
    Flow,
    HostIntroduction,
    Link,
    LinkFindings,
    LinkTask,
    Order,
    Roster,
    merged,
)
from elastictrain.preflight.links.probes import LinkOptions, PeerProbe
from elastictrain.preflight.links.responder import Responder
from elastictrain.preflight.links.rounds import Pair, Round, contact_links, first_rounds
from elastictrain.preflight.surroundings import Exchange
from elastictrain.preflight.verdict import Verdict

logger = logging.getLogger(__name__)

T = TypeVar("T")

_PREFIX = "links"
_TOKEN_BYTES = 32

_AT_ONCE_S = 0.02
"""Asking for what may be there already: an answer of the table itself takes that long at the most."""

_TURN_S = 0.5
"""How long the first host waits for one report before it looks whether another has come."""

_AT_A_TIME = 16
"""Peers that one host probes side by side: dead ones only cost time."""

_ALL_PAIRS_UP_TO = 16
"""Up to so many hosts a full check contacts every pair; above, distances of 1, 2, 4, 8 and so on along the ring."""

_DOING = {LinkTask.CONTACT: "contacts were made", LinkTask.MEASURE: "bandwidth was measured"}


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkReport:
    """What all hosts go by. `roster` is None if there was none. `num_rounds` is known to the first host.

    `seconds`: from the roster to the verdicts, without waiting for hosts to come.
    """

    verdicts: tuple[Verdict, ...]
    roster: Roster | None = None
    num_rounds: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class LinkSession:
    """`host`: this one, with the TCP ports that training will use, as far as they are known and free; 0 is any.

    `exchange` must be new for each bring-up: nothing is ever removed. `full` measures bandwidth. `names`: of all hosts
    by node rank, each another one. `wall`: the clock that the hosts compare.
    """

    host: HostIntroduction
    names: tuple[str, ...]
    exchange: Exchange
    full: bool = False
    options: LinkOptions = field(default_factory=LinkOptions)
    wall: Callable[[], float] = time.time

    def run(self) -> LinkReport:
        """Never raises for what hosts or the network do, and every wait in it has a limit."""
        responder = Responder(self.host.address, ports=self.host.tcp_ports, wall=self.wall)
        try:
            responder.start()
            return self._run(responder)
        except HostUnfitError as error:
            return LinkReport(verdicts=(no_port(self.host, why=str(error)),))
        except (TransportError, MalformedJsonError) as error:
            return LinkReport(verdicts=(unheard(self.host.name, why=str(error)),))
        finally:
            responder.close()

    def put(self, key: str, record: object) -> None:
        """Leave a record for all. Raises: TransportError."""
        self.exchange.put(f"{_PREFIX}/{key}", encode_record(record))

    def get(self, key: str, kind: type[T], *, limit_s: float) -> T | None:
        """Wait for a record. Raises: TransportError; MalformedJsonError for what another release writes."""
        data = self.exchange.get(f"{_PREFIX}/{key}", limit_s=max(limit_s, _AT_ONCE_S))
        try:
            return None if data is None else parse_record(data, kind, limits=DOCUMENT)
        except MalformedJsonError as error:
            raise MalformedJsonError(f"{key} {error}") from error

    def _run(self, responder: Responder) -> LinkReport:
        began = time.monotonic()
        own = replace(self.host, tcp_ports=responder.tcp_ports, udp_port=responder.udp_port, nonce=responder.nonce.hex())
        leads = own.node_rank == 0
        self.put(f"hello/{own.node_rank}", own)
        # The first host may have begun a whole limit after us.
        late_s = 2 * self.options.roster_s + self.options.grace_s
        roster = self._gather_roster(own) if leads else self.get("roster", Roster, limit_s=late_s)
        if roster is None:
            waited_s = time.monotonic() - began
            return LinkReport(verdicts=(leaderless(self.host.name, waited_s=waited_s, leader=self.names[0]),))
        listed = next((host for host in roster.hosts if host.node_rank == own.node_rank), None)
        if listed is None:
            return LinkReport(verdicts=(unheard(own.name, why="it came too late"),), roster=roster)
        if listed != own:
            return LinkReport(verdicts=(claimed_twice(own, listed),), roster=roster)
        complete = time.monotonic()
        responder.set_token(bytes.fromhex(roster.token))
        part = _LinkMember(self, roster, roster.hosts.index(own))
        verdicts = part.lead() if leads else part.follow()
        seconds = round(time.monotonic() - complete, 4)
        return LinkReport(verdicts=verdicts, roster=roster, num_rounds=part.num_rounds, seconds=seconds)

    def _gather_roster(self, own: HostIntroduction) -> Roster:
        """As the first host: wait for all, publish who came."""
        began, num_hosts = time.monotonic(), len(self.names)
        found = {own.node_rank: own}
        for rank in range(1, num_hosts):
            try:
                left_s = began + self.options.roster_s - time.monotonic()
                introduction = self.get(f"hello/{rank}", HostIntroduction, limit_s=left_s)
            except MalformedJsonError as error:
                logger.warning("node rank %d does not introduce itself as this release does: %s", rank, error)
                continue
            if introduction is not None:
                found[rank] = introduction
        roster = Roster(
            hosts=tuple(found[rank] for rank in sorted(found)),
            absent=tuple(rank for rank in range(num_hosts) if rank not in found),
            waited_s=round(time.monotonic() - began, 3),
            token=secrets.token_hex(_TOKEN_BYTES),
        )
        self.put("roster", roster)
        return roster


class _LinkMember:
    """What the host at `place` of the roster does in a session. All methods raise TransportError."""

    def __init__(self, session: LinkSession, roster: Roster, place: int) -> None:
        self.num_rounds = 0
        self._session = session
        self._options = session.options
        self._roster = roster
        self._place = place
        self._probes: dict[int, PeerProbe] = {}
        self._num_orders = 0
        self._contacts: dict[Link, Contact] = {}
        self._silences: dict[int, Silence] = {}

    def follow(self) -> tuple[Verdict, ...]:
        """Carry out what the first host orders, until it publishes the verdicts."""
        # For the next order the first host may take as long as everybody may take for this one, and judge a little.
        limit_s, number = self._options.limits.contact_s, 0
        while True:
            patience_s = limit_s + 2 * self._options.grace_s
            order = self._session.get(f"order/{number}", Order, limit_s=patience_s)
            if order is None:
                return (leaderless(self._session.host.name, waited_s=patience_s, leader=self._session.names[0]),)
            if order.task is LinkTask.END:
                return order.verdicts
            self._check_places(order.links)
            self._carry_out(number, order)
            limit_s = self._limit_s(order)
            number += 1

    def _limit_s(self, order: Order) -> float:
        """When all must have carried it out."""
        return self._options.limits.contact_s if order.task is LinkTask.CONTACT else self._options.measure_s()

    def _carry_out(self, number: int, order: Order) -> None:
        """Do what concerns this host, and report what it found."""
        if not order.concerns(self._place):
            return
        self._session.put(f"taken/{number}/{self._place}", True)
        probes = [self._probe(target) for source, target in order.links if source == self._place]
        if order.task is LinkTask.MEASURE:
            found = LinkFindings((), tuple(flow for probe in probes for flow in probe.flows()))
        else:
            with ThreadPoolExecutor(_AT_A_TIME, thread_name_prefix="link-contact") as threads:
                found = LinkFindings(tuple(threads.map(PeerProbe.contact, probes)), ())
        self._session.put(f"found/{number}/{self._place}", found)

    def _probe(self, target: int) -> PeerProbe:
        """The same one each time: it knows which port of the other host can be used."""
        if target not in self._probes:
            hosts = self._roster.hosts
            self._probes[target] = PeerProbe(
                hosts[self._place],
                hosts[target],
                link=(self._place, target),
                token=bytes.fromhex(self._roster.token),
                options=self._options,
                wall=self._session.wall,
            )
        return self._probes[target]

    def lead(self) -> tuple[Verdict, ...]:
        """As the first host: give the orders, gather what hosts report, judge it, and publish the verdicts."""
        thresholds = self._options.thresholds
        num, full = len(self._roster.hosts), self._session.full
        self._make_contact(contact_links(num, all_pairs=full and num <= _ALL_PAIRS_UP_TO, num_distances=None if full else 2))
        first: tuple[Flow, ...] = ()
        again: tuple[Flow, ...] = ()
        if full:
            first = self._measure(self._first_rounds())
            again = self._measure(suspect_rounds(first, num_hosts=num, thresholds=thresholds))
        verdicts = tuple(
            judge(
                self._roster,
                contacts=self._contacts,
                flows=(first, again) if full else None,
                silences=tuple(self._silences.values()),
                thresholds=thresholds,
                names=self._session.names,
            )
        )
        self._session.put(f"order/{self._num_orders}", Order(LinkTask.END, verdicts=verdicts))
        return verdicts

    def _make_contact(self, links: Iterable[Link]) -> None:
        """What looks bad is tried a second time, and the better result counts."""
        for _ in range(2):
            links = tuple(link for link in links if not self._silences.keys() & set(link))
            if not links:
                return
            found = self._order(Order(LinkTask.CONTACT, links))
            self._contacts = merged([*self._contacts.values(), *(one for report in found for one in report.contacts)])
            heard = {link: one for link, one in self._contacts.items() if not self._silences.keys() & set(link)}
            links = sorted(suspicious_contacts(heard, thresholds=self._options.thresholds) & set(links))

    def _first_rounds(self) -> tuple[Round, ...]:
        """Among those who are still heard."""
        alive = [place for place in range(len(self._roster.hosts)) if place not in self._silences]
        # Restarts measure other links than earlier starts did.
        plan = first_rounds(len(alive), seed=random.SystemRandom().getrandbits(32))
        return tuple(tuple((alive[a], alive[b]) for a, b in pairs) for pairs in plan)

    def _measure(self, rounds: tuple[Round, ...]) -> tuple[Flow, ...]:
        links = {link for pairs in rounds for a, b in pairs for link in ((a, b), (b, a))}
        self._make_contact(sorted(links - self._contacts.keys()))
        flows: list[Flow] = []
        for pairs in rounds:
            usable = tuple(pair for pair in pairs if self._is_usable(pair))
            if usable:
                self.num_rounds += 1
                flows += (flow for report in self._order(Order(LinkTask.MEASURE, usable)) for flow in report.flows)
        return tuple(flows)

    def _is_usable(self, pair: Pair) -> bool:
        """Both hosts are heard, and large frames pass in both directions as far as is known."""
        contacts = [self._contacts.get(link) for link in (pair, pair[::-1])]
        passing = all(one is not None and one.latency_s is not None and not one.loses_large for one in contacts)
        return passing and not self._silences.keys() & set(pair)

    def _order(self, order: Order) -> list[LinkFindings]:
        """Have it carried out; the reports of all whom it concerns. Who does not report in time counts as silent."""
        number, began = self._num_orders, time.monotonic()
        self._num_orders += 1
        self._session.put(f"order/{number}", order)
        self._carry_out(number, order)
        until = began + self._limit_s(order) + self._options.grace_s
        found: list[LinkFindings] = []
        waiting = deque(place for place in range(len(self._roster.hosts)) if order.concerns(place))
        while waiting:
            place = waiting.popleft()
            is_lost = False
            try:
                report = self._report(number, place, limit_s=min(_TURN_S, until - time.monotonic()))
            except MalformedJsonError as error:
                logger.warning("%s: %s", self._roster.hosts[place].name, error)
                report, is_lost = None, True
            waited_s = time.monotonic() - began
            if report is not None:
                found.append(report)
            elif is_lost or began + waited_s >= until or self._is_ignored(number, place, waited_s):
                self._silences[place] = Silence(place, _DOING[order.task], waited_s)
            else:
                waiting.append(place)
        return found

    def _report(self, number: int, place: int, *, limit_s: float) -> LinkFindings | None:
        found = self._session.get(f"found/{number}/{place}", LinkFindings, limit_s=limit_s)
        if found is not None:
            self._check_places(found.links())
        return found

    def _is_ignored(self, number: int, place: int, waited_s: float) -> bool:
        """Whether the host has not taken up the order in all the time that there was for that."""
        # One that cannot be reached from here may well do its part: it is known by its records alone.
        return waited_s >= self._options.take_s and self._session.get(f"taken/{number}/{place}", bool, limit_s=0.0) is None

    def _check_places(self, links: Iterable[Link]) -> None:
        num_hosts = len(self._roster.hosts)
        wrong = [(a, b) for a, b in links if a == b or max(a, b) >= num_hosts]
        if wrong:
            raise MalformedJsonError(f"there is no link {wrong[0]} among {num_hosts} hosts")
