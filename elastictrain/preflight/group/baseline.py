"""What collectives reached in earlier preflights of a group like this one. Pure."""

import json
import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from elastictrain.bounded_json import parse_json
from elastictrain.preflight.group.bandwidth import Point

KEPT = 20
"""So many of the latest preflights count: a group that was made faster is known as such after half of them."""

_VERSION = 1


@dataclass(frozen=True, slots=True)
class BusBaseline:
    """Bus bandwidths in GB/s, the oldest first, by what `key` makes of them."""

    figures: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    def typical_gbs(self, point: Point, *, device: str, num_hosts: int) -> float | None:
        """None if it was never measured in a group of this size on such devices."""
        known = self.figures.get(key(point, device=device, num_hosts=num_hosts))
        return statistics.median(known) if known else None


def key(point: Point, *, device: str, num_hosts: int) -> str:
    """Figures of groups with the same key can be compared. `device`: the GPU's name, or `cpu`."""
    return f"{device} | {point.world_size} ranks on {num_hosts} hosts | {point.collective} {point.num_bytes}"


def fold_bus(baseline: BusBaseline | None, points: Iterable[Point], *, device: str, num_hosts: int) -> BusBaseline:
    """With the figures of one more preflight, in which nothing failed."""
    figures = dict(baseline.figures) if baseline else {}
    for point in points:
        name = key(point, device=device, num_hosts=num_hosts)
        figures[name] = (*figures.get(name, ()), round(point.bus_gbs, 4))[-KEPT:]
    return BusBaseline(figures)


def encode_bus(baseline: BusBaseline) -> bytes:
    """As JSON."""
    return json.dumps({"version": _VERSION, "bus_gbs": baseline.figures}, indent=1).encode()


def decode_bus(data: bytes) -> BusBaseline | None:
    """None if it is not what `encode_bus` writes: without a baseline less is known, and nothing is wrong."""
    try:
        row = parse_json(data)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict) or row.get("version") != _VERSION or not isinstance(row.get("bus_gbs"), dict):
        return None
    figures = {name: tuple(known) for name, known in row["bus_gbs"].items() if isinstance(known, list)}
    good = len(figures) == len(row["bus_gbs"]) and all(_is_figure(one) for known in figures.values() for one in known)
    return BusBaseline({name: known[-KEPT:] for name, known in figures.items()}) if good else None


def _is_figure(one: object) -> bool:
    return isinstance(one, int | float) and not isinstance(one, bool) and math.isfinite(one) and one > 0
