"""What the first host has the others do, one order after the other: make contact, measure in rounds, adopt the verdicts."""

import json
from dataclasses import dataclass

from elastictrain.preflight.links.measured import GarbledError, Link
from elastictrain.preflight.links.options import LinkOptions
from elastictrain.preflight.links.rounds import Round
from elastictrain.preflight.table import from_json, to_json
from elastictrain.preflight.verdict import Verdict


@dataclass(frozen=True, slots=True)
class MakeContact:
    """The source of each link looks at its target."""

    links: tuple[Link, ...]

    def limit_s(self, options: LinkOptions) -> float:
        """When all must be done."""
        return options.contact_s

    def concerns(self, place: int) -> bool:
        """Whether this host has something to do and to report."""
        return any(link[0] == place for link in self.links)

    doing = "contacts were made"


@dataclass(frozen=True, slots=True)
class Measure:
    """Bandwidth, in rounds; links whose ends have not met yet are looked at first."""

    rounds: tuple[Round, ...]
    met: tuple[Link, ...] = ()

    def limit_s(self, options: LinkOptions) -> float:
        """When all must be done: rounds have their ends on a common time table, so that a dead pair costs no other round."""
        return len(self.rounds) * self.round_s(options)

    def round_s(self, options: LinkOptions) -> float:
        """One round at the most."""
        pairs = {pair for pairs in self.rounds for pair in pairs}
        return options.round_s + (0.0 if pairs <= set(self.met) else options.contact_s)

    def concerns(self, place: int) -> bool:
        """Whether this host has something to do and to report."""
        return any(place in pair for pairs in self.rounds for pair in pairs)

    doing = "bandwidth was measured"


@dataclass(frozen=True, slots=True)
class Adopt:
    """The end."""

    verdicts: tuple[Verdict, ...]


Order = MakeContact | Measure | Adopt


def encode_order(order: Order) -> bytes:
    """As JSON."""
    row: dict[str, object]
    match order:
        case MakeContact(links):
            row = {"order": "contact", "links": links}
        case Measure(rounds, met):
            row = {"order": "measure", "rounds": rounds, "met": met}
        case Adopt(verdicts):
            row = {"order": "adopt", "verdicts": to_json(verdicts)}
    return json.dumps(row, separators=(",", ":")).encode()


def decode_order(data: bytes, *, num_hosts: int) -> Order:
    """Raises: GarbledError."""
    try:
        row = json.loads(data)
        match row["order"]:
            case "contact":
                return MakeContact(_links(row["links"], num_hosts))
            case "measure":
                return Measure(tuple(_links(pairs, num_hosts) for pairs in row["rounds"]), _links(row["met"], num_hosts))
            case "adopt":
                return Adopt(tuple(from_json(row["verdicts"])))
            case other:
                raise GarbledError(f"there is no order {other!r}")
    except GarbledError:
        raise
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise GarbledError(f"an order is garbled: {error!r}") from error


def _links(rows: list[list[int]], num_hosts: int) -> tuple[Link, ...]:
    found = []
    for a, b in rows:
        if not (isinstance(a, int) and isinstance(b, int) and 0 <= a < num_hosts and 0 <= b < num_hosts and a != b):
            raise GarbledError(f"there is no link from {a} to {b} among {num_hosts} hosts")
        found.append((a, b))
    return tuple(found)
