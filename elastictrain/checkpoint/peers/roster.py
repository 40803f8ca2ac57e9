"""Who keeps snapshots for the run: one peer per host, as all ranks of an incarnation know them alike. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from elastictrain.checkpoint.manifest import JsonValue

_FIELDS = {"host", "address", "port", "ranks", "number"}
_LAST_PORT = 65535
_LONGEST = 255


@dataclass(frozen=True, slots=True)
class Peer:
    """One saver. Two of the same `host` are on the same machine, and are lost together."""

    host: str
    address: str
    """An IP address or a name, without the port."""

    port: int
    ranks: tuple[int, ...]
    """Whose snapshots it has."""

    number: int
    """Its place among the peers; no two have the same."""

    @property
    def place(self) -> str:
        """For messages."""
        return f"{self.host} ({f'[{self.address}]' if ':' in self.address else self.address}:{self.port})"


def roster_to_json(roster: Sequence[Peer]) -> JsonValue:
    """For the other ranks."""
    return [
        {"host": peer.host, "address": peer.address, "port": peer.port, "ranks": list(peer.ranks), "number": peer.number}
        for peer in roster
    ]


def roster_from_json(value: JsonValue) -> tuple[Peer, ...]:
    """The inverse of `roster_to_json`. Raises: ValueError naming the peer and what is wrong with it."""
    if not isinstance(value, list) or not value:
        raise ValueError(f"a roster must be a list of peers, but is {value!r:.200}")
    roster = tuple(_peer(one, where=f"peer {place} of the roster") for place, one in enumerate(value))
    numbers = [peer.number for peer in roster]
    if len(set(numbers)) != len(numbers):
        raise ValueError(f"the peers of a roster must have different numbers, but have {sorted(numbers)}")
    ranks = [rank for peer in roster for rank in peer.ranks]
    if len(set(ranks)) != len(ranks):
        twice = sorted(rank for rank in set(ranks) if ranks.count(rank) > 1)
        raise ValueError(f"each rank must be at one peer of a roster, but these are at several: {twice}")
    return roster


def _peer(value: JsonValue, *, where: str) -> Peer:
    if not isinstance(value, dict) or value.keys() != _FIELDS:
        raise ValueError(f"{where} must have the fields {sorted(_FIELDS)}, but is {value!r:.200}")
    ranks = value["ranks"]
    if not isinstance(ranks, list):
        raise ValueError(f"{where}: `ranks` must be a list, but is {ranks!r:.200}")
    return Peer(
        _name(value, "host", where=where),
        _name(value, "address", where=where),
        _count(value["port"], "port", where=where, least=1, most=_LAST_PORT),
        tuple(_count(rank, "ranks", where=where) for rank in ranks),
        _count(value["number"], "number", where=where),
    )


def _name(value: dict[str, JsonValue], field: str, *, where: str) -> str:
    found = value[field]
    if not isinstance(found, str) or not found or len(found) > _LONGEST or not found.isprintable():
        raise ValueError(f"{where}: `{field}` must be a name of 1 to {_LONGEST} characters, but is {found!r:.200}")
    return found


def _count(value: JsonValue, field: str, *, where: str, least: int = 0, most: int = 2**31) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ValueError(f"{where}: `{field}` must be a number from {least} to {most}, but is {value!r:.200}")
    return value
