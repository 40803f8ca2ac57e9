"""The shared table, as the hosts of one preflight use it: who leaves which word where."""

from collections.abc import Callable
from typing import TypeVar

from elastictrain.preflight.exchange import Exchange
from elastictrain.preflight.links.measured import (
    HostIntroduction,
    LinkFindings,
    Roster,
    decode_findings,
    decode_introduction,
    decode_roster,
    encode,
)
from elastictrain.preflight.links.orders import Order, decode_order, encode_order

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
