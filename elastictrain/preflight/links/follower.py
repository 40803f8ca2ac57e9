"""One host carries out the orders of the first one, and exchanges values with the others."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from elastictrain.preflight.exchange import Exchange
from elastictrain.preflight.links.messages import (
    Contact,
    Flow,
    HostIntroduction,
    LinkFindings,
    MakeContact,
    Measure,
    Order,
    Roster,
    decode_findings,
    decode_introduction,
    decode_order,
    decode_roster,
    encode,
    encode_order,
)
from elastictrain.preflight.links.options import LinkOptions
from elastictrain.preflight.links.probes import PeerProbe

T = TypeVar("T")

AT_ONCE_S = 0.02
"""Asking for what may be there already: an answer of the table itself takes that long at the most."""


class LinkExchange:
    """Keys begin with `prefix`, which must be new for each bring-up: nothing is ever removed."""

    def __init__(self, exchange: Exchange, *, prefix: str) -> None:
        self._exchange = exchange
        self._prefix = prefix

    def put_introduction(self, introduction: HostIntroduction) -> None:
        """This host is there. Raises: TransportError, as all that leaves word."""
        self._put(f"hello/{introduction.node_rank}", encode(introduction))

    def introduction(self, node_rank: int, *, limit_s: float) -> HostIntroduction | None:
        """Raises: GarbledError."""
        return self._get(f"hello/{node_rank}", decode_introduction, limit_s=limit_s)

    def put_roster(self, roster: Roster) -> None:
        """As the first host: who takes part."""
        self._put("roster", encode(roster))

    def roster(self, *, limit_s: float) -> Roster | None:
        """Raises: GarbledError."""
        return self._get("roster", decode_roster, limit_s=limit_s)

    def put_order(self, number: int, order: Order) -> None:
        """As the first host: what is to be done next; orders are numbered from 0."""
        self._put(f"order/{number}", encode_order(order))

    def order(self, number: int, *, num_hosts: int, limit_s: float) -> Order | None:
        """Raises: GarbledError."""
        return self._get(f"order/{number}", lambda data: decode_order(data, num_hosts=num_hosts), limit_s=limit_s)

    def take(self, number: int, place: int) -> None:
        """The host at `place` has order `number`."""
        self._put(f"taken/{number}/{place}", b"taken")

    def is_taken(self, number: int, place: int) -> bool:
        """Whether the host at `place` has it; does not wait."""
        return self._get(f"taken/{number}/{place}", bytes, limit_s=0.0) is not None

    def put_findings(self, number: int, place: int, findings: LinkFindings) -> None:
        """What the host at `place` found in carrying out order `number`."""
        self._put(f"found/{number}/{place}", encode(findings))

    def findings(self, number: int, place: int, *, num_hosts: int, limit_s: float) -> LinkFindings | None:
        """Raises: GarbledError."""
        return self._get(f"found/{number}/{place}", lambda data: decode_findings(data, num_hosts=num_hosts), limit_s=limit_s)

    def say_ready(self, number: int, round_number: int, place: int, *, willing: bool) -> None:
        """This host is in the round; `willing`: it can take bytes from its partner and send some."""
        self._put(f"ready/{number}/{round_number}/{place}", b"yes" if willing else b"no")

    def is_ready(self, number: int, round_number: int, place: int, *, limit_s: float) -> bool | None:
        """Whether the partner is willing; None if it did not come in time."""
        word = self._get(f"ready/{number}/{round_number}/{place}", bytes, limit_s=limit_s)
        return None if word is None else word == b"yes"

    def say_done(self, number: int, round_number: int, place: int) -> None:
        """The pair of this host, which asked, is through."""
        self._put(f"done/{number}/{round_number}/{place}", b"done")

    def wait_done(self, number: int, round_number: int, place: int, *, limit_s: float) -> None:
        """Until the partner is through, or for `limit_s`."""
        self._get(f"done/{number}/{round_number}/{place}", bytes, limit_s=limit_s)

    def _put(self, key: str, value: bytes) -> None:
        self._exchange.put(f"{self._prefix}/{key}", value)

    def _get(self, key: str, decode: Callable[[bytes], T], *, limit_s: float) -> T | None:
        data = self._exchange.get(f"{self._prefix}/{key}", limit_s=max(limit_s, AT_ONCE_S))
        return None if data is None else decode(data)


_TURN_S = 0.5
"""After this long it is worth a look whether a partner is still there."""

_AT_A_TIME = 16
"""Peers that one host looks at side by side: dead ones only cost time."""


class Actor:
    """The host at `place` of the roster."""

    def __init__(
        self,
        place: int,
        *,
        roster: Roster,
        board: LinkExchange,
        options: LinkOptions,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._place = place
        self._roster = roster
        self._board = board
        self._options = options
        self._clock = clock
        self._wall = wall
        self._probes: dict[int, PeerProbe] = {}
        self._contacts: dict[int, Contact] = {}

    def carry_out(self, number: int, order: MakeContact | Measure) -> None:
        """Do what concerns this host in order `number`, and leave word of what was found. Raises: TransportError."""
        if not order.concerns(self._place):
            return
        self._board.take(number, self._place)
        found = self._make_contact(order) if isinstance(order, MakeContact) else self._measure(number, order)
        self._board.put_findings(number, self._place, found)

    def has_ignored(self, number: int, place: int, *, since: float) -> bool:
        """Whether a host has not taken up order `number`, given at `since`, in all the time that there was for that."""
        # One that could never be reached from here may well do its part: it is known by its words alone.
        return self._clock() - since >= self._options.take_s and not self._board.is_taken(number, place)

    def has_fallen_silent(self, place: int) -> bool:
        """Whether a host that answered this one before does not any more. Takes as long as a contact."""
        before = self._contacts.get(place)
        return before is not None and before.latency_s is not None and self._probe(place).contact().latency_s is None

    def _make_contact(self, order: MakeContact) -> LinkFindings:
        targets = [target for source, target in order.links if source == self._place]
        return LinkFindings(contacts=self._look_at(targets))

    def _look_at(self, targets: Sequence[int]) -> tuple[Contact, ...]:
        probes = [self._probe(target) for target in targets]
        with ThreadPoolExecutor(min(_AT_A_TIME, len(probes)), thread_name_prefix="link-contact") as threads:
            found = tuple(threads.map(PeerProbe.contact, probes))
        self._contacts.update(zip(targets, found, strict=True))
        return found

    def _measure(self, number: int, order: Measure) -> LinkFindings:
        contacts: list[Contact] = []
        flows: list[Flow] = []
        began, round_s = self._clock(), order.round_s(self._options)
        for round_number, pairs in enumerate(order.rounds):
            pair = next((pair for pair in pairs if self._place in pair), None)
            if pair is None:
                continue
            partner = pair[0] + pair[1] - self._place
            if partner not in self._contacts:
                contacts += self._look_at([partner])
            # All go by the same time table: who waited in vain for a dead partner is in time for the next one.
            until = began + (round_number + 1) * round_s
            flows += self._stream(number, round_number, partner, since=began, until=until)
        return LinkFindings(tuple(contacts), tuple(flows))

    def _stream(self, number: int, round_number: int, partner: int, *, since: float, until: float) -> tuple[Flow, ...]:
        contact = self._contacts[partner]
        probe = self._probe(partner)
        willing = contact.latency_s is not None and not contact.loses_large
        self._board.say_ready(number, round_number, self._place, willing=willing)
        latest, ready, looked = until - self._options.stream_round_s(), None, False
        while ready is None:
            ready = self._board.is_ready(number, round_number, partner, limit_s=min(latest - self._clock(), _TURN_S))
            if ready is None and (self._clock() >= latest or self.has_ignored(number, partner, since=since)):
                return ()
            # Once is enough: of a partner that is far away a look takes longer than a turn.
            if ready is None and not looked and self.has_fallen_silent(partner):
                return ()
            looked = True
        if not ready or not willing:
            return ()
        if self._place > partner:
            self._board.wait_done(number, round_number, partner, limit_s=until - self._clock())
            return ()
        found = probe.flows()
        self._board.say_done(number, round_number, self._place)
        return found

    def _probe(self, target: int) -> PeerProbe:
        if target not in self._probes:
            hosts = self._roster.hosts
            self._probes[target] = PeerProbe(
                hosts[self._place],
                hosts[target],
                places=(self._place, target),
                token=bytes.fromhex(self._roster.token),
                options=self._options,
                wall=self._wall,
            )
        return self._probes[target]
