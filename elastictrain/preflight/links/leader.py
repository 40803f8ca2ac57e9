"""The first host: gathers the roster, gives the orders, and judges what comes back."""

import logging
import random
import secrets
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from elastictrain.preflight.links.follower import Actor, LinkExchange
from elastictrain.preflight.links.judge import Evidence, Silence, judge
from elastictrain.preflight.links.judge_contacts import suspicious_contacts
from elastictrain.preflight.links.judge_flows import suspect_rounds
from elastictrain.preflight.links.messages import (
    Adopt,
    Contact,
    GarbledError,
    HostIntroduction,
    Link,
    LinkFindings,
    MakeContact,
    Measure,
    Roster,
    merged,
)
from elastictrain.preflight.links.options import LinkOptions
from elastictrain.preflight.links.rounds import Round, contacts, first_rounds
from elastictrain.preflight.verdict import Verdict

logger = logging.getLogger(__name__)

_TOKEN_BYTES = 32
_TURN_S = 0.5


def gather_roster(
    board: LinkExchange, *, own: HostIntroduction, num_hosts: int, limit_s: float, clock: Callable[[], float] = time.monotonic
) -> Roster:
    """Wait for all, publish who came. Raises: TransportError."""
    began = clock()
    found: dict[int, HostIntroduction] = {own.node_rank: own}
    for rank in range(num_hosts):
        if rank in found:
            continue
        try:
            introduction = board.introduction(rank, limit_s=began + limit_s - clock())
        except GarbledError as error:
            logger.warning("node rank %d does not introduce itself as this release does: %s", rank, error)
            continue
        if introduction is not None:
            found[rank] = introduction
    roster = Roster(
        hosts=tuple(found[rank] for rank in sorted(found)),
        absent=tuple(rank for rank in range(num_hosts) if rank not in found),
        waited_s=round(clock() - began, 3),
        token=secrets.token_hex(_TOKEN_BYTES),
    )
    board.put_roster(roster)
    return roster


@dataclass(frozen=True, slots=True, kw_only=True)
class Conclusion:
    """What the first host found. `num_rounds`: of disjoint pairs, those of suspects included."""

    verdicts: tuple[Verdict, ...]
    num_rounds: int


class Leader:
    """Leads the hosts of one roster through the link checks; `actor` is this host's own part in them."""

    def __init__(
        self,
        actor: Actor,
        *,
        roster: Roster,
        board: LinkExchange,
        options: LinkOptions,
        full: bool,
        names: Mapping[int, str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._actor = actor
        self._roster = roster
        self._board = board
        self._options = options
        self._full = full
        self._names = names
        self._clock = clock
        self._orders = 0
        self._num_rounds = 0
        self._silences: list[Silence] = []

    def lead(self) -> Conclusion:
        """From the first order to the last. Raises: TransportError."""
        num = len(self._roster.hosts)
        few = num <= self._options.all_pairs_up_to
        links = contacts(num, all_pairs=self._full and few, num_distances=None if self._full else 2)
        found = self._order(MakeContact(links))
        met = merged(found.contacts)
        if again := self._alive_links(suspicious_contacts(self._heard(met), options=self._options)):
            met = merged([*met.values(), *self._order(MakeContact(again)).contacts])
        first, second = LinkFindings(), LinkFindings()
        if self._full:
            first = self._measure(self._first_rounds(met), met)
            met = merged([*met.values(), *first.contacts])
            rounds = suspect_rounds(first.flows, num_hosts=num, options=self._options)
            second = self._measure(rounds, met)
            met = merged([*met.values(), *second.contacts])
        evidence = Evidence(
            roster=self._roster,
            contacts=met,
            flows=first.flows,
            flows_again=second.flows,
            silences=tuple(self._silences),
            full=self._full,
        )
        verdicts = judge(evidence, options=self._options, names=self._names)
        self._board.put_order(self._orders, Adopt(tuple(verdicts)))
        return Conclusion(verdicts=tuple(verdicts), num_rounds=self._num_rounds)

    def _first_rounds(self, met: Mapping[Link, Contact]) -> tuple[Round, ...]:
        """Among those who are still heard, without pairs of which a direction is known not to carry large frames or any."""
        alive = [place for place in range(len(self._roster.hosts)) if place not in self._silent()]
        bad = {link for link, contact in met.items() if contact.latency_s is None or contact.loses_large}
        # Restarts measure other links than earlier starts did; all hosts go by what the first one drew.
        plan = first_rounds(len(alive), seed=random.SystemRandom().getrandbits(32))
        named = ([tuple(sorted((alive[a], alive[b]))) for a, b in pairs] for pairs in plan)
        usable = (tuple((a, b) for a, b in pairs if not {(a, b), (b, a)} & bad) for pairs in named)
        return tuple(pairs for pairs in usable if pairs)

    def _measure(self, rounds: tuple[Round, ...], met: Mapping[Link, Contact]) -> LinkFindings:
        silent = self._silent()
        rounds = tuple(tuple(pair for pair in pairs if not silent & set(pair)) for pairs in rounds)
        rounds = tuple(pairs for pairs in rounds if pairs)
        if not rounds:
            return LinkFindings()
        self._num_rounds += len(rounds)
        pairs = {pair for pairs in rounds for pair in pairs}
        return self._order(Measure(rounds, tuple(sorted(pair for pair in pairs if pair in met and pair[::-1] in met))))

    def _order(self, order: MakeContact | Measure) -> LinkFindings:
        """Have it carried out by all whom it concerns, and gather what they found; who does not report counts as silent."""
        number = self._orders
        self._orders += 1
        began = self._clock()
        limit_s = order.limit_s(self._options) + self._options.grace_s
        self._board.put_order(number, order)
        self._actor.carry_out(number, order)
        return self._gather(number, order, since=began, until=began + limit_s)

    def _gather(self, number: int, order: MakeContact | Measure, *, since: float, until: float) -> LinkFindings:
        """Wait for each for a while, in turn: one that has not even taken up the order, or does not answer any more, the second
        time round, is not waited for any longer. Others are given all the time that there is."""
        began, found = self._clock(), LinkFindings()
        silent = self._silent()
        waiting = deque(place for place in range(len(self._roster.hosts)) if order.concerns(place) and place not in silent)
        misses: Counter[int] = Counter()
        while waiting:
            place = waiting.popleft()
            heard = self._hear(number, place, limit_s=min(_TURN_S, until - self._clock()))
            if heard is not None:
                found += heard
                continue
            misses[place] += 1
            if self._clock() >= until or (misses[place] > 1 and self._is_gone(number, place, since=since)):
                self._silences.append(Silence(place, order.doing, self._clock() - began))
            else:
                waiting.append(place)
        return found

    def _is_gone(self, number: int, place: int, *, since: float) -> bool:
        return self._actor.has_ignored(number, place, since=since) or self._actor.has_fallen_silent(place)

    def _hear(self, number: int, place: int, *, limit_s: float) -> LinkFindings | None:
        try:
            return self._board.findings(number, place, num_hosts=len(self._roster.hosts), limit_s=limit_s)
        except GarbledError as error:
            logger.warning("%s: %s", self._roster.hosts[place].name, error)
            return None

    def _silent(self) -> set[int]:
        return {silence.place for silence in self._silences}

    def _heard(self, met: Mapping[Link, Contact]) -> dict[Link, Contact]:
        return {link: contact for link, contact in met.items() if not self._silent() & set(link)}

    def _alive_links(self, links: list[Link]) -> tuple[Link, ...]:
        return tuple(link for link in links if not self._silent() & set(link))
