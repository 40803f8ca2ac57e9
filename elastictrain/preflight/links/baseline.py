"""What the links of a fleet could do in earlier preflights: where two hosts cannot outvote each other, or all became slow."""

import json
import math
import statistics
from dataclasses import asdict, dataclass, replace

from elastictrain.bounded_json import parse_json

KEPT = 20
"""So many of the latest healthy preflights count: a fleet that was made faster is known as such after half of them."""

_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """Medians over the links of a fleet, one of each healthy preflight, the oldest first. Latency is a round trip."""

    one_way_gbps: tuple[float, ...] = ()
    both_ways_gbps: tuple[float, ...] = ()
    latency_s: tuple[float, ...] = ()

    def typical_one_way_gbps(self) -> float | None:
        """None if there is no earlier preflight with bandwidth."""
        return statistics.median(self.one_way_gbps) if self.one_way_gbps else None

    def typical_both_ways_gbps(self) -> float | None:
        """As with one way."""
        return statistics.median(self.both_ways_gbps) if self.both_ways_gbps else None

    def typical_latency_s(self) -> float | None:
        """None if there is no earlier preflight."""
        return statistics.median(self.latency_s) if self.latency_s else None


def fold(
    baseline: Baseline | None, *, one_way_gbps: float | None, both_ways_gbps: float | None, latency_s: float | None
) -> Baseline:
    """With the medians of one more healthy preflight; None where it did not measure."""
    before = baseline or Baseline()
    return replace(
        before,
        one_way_gbps=_added(before.one_way_gbps, one_way_gbps),
        both_ways_gbps=_added(before.both_ways_gbps, both_ways_gbps),
        latency_s=_added(before.latency_s, latency_s),
    )


def encode_baseline(baseline: Baseline) -> bytes:
    """As JSON."""
    return json.dumps({"version": _VERSION, **asdict(baseline)}, indent=1).encode()


def decode_baseline(data: bytes) -> Baseline | None:
    """None if it is not what `encode_baseline` writes: without a baseline less is known, and nothing is wrong."""
    try:
        row = parse_json(data)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict) or row.get("version") != _VERSION:
        return None
    found = [_figures(row.get(name)) for name in ("one_way_gbps", "both_ways_gbps", "latency_s")]
    one_way, both_ways, latency = found
    if one_way is None or both_ways is None or latency is None:
        return None
    return Baseline(one_way_gbps=one_way, both_ways_gbps=both_ways, latency_s=latency)


def _figures(value: object) -> tuple[float, ...] | None:
    if not isinstance(value, list):
        return None
    good = [float(one) for one in value if isinstance(one, int | float) and not isinstance(one, bool)]
    if len(good) != len(value) or not all(math.isfinite(one) and one > 0 for one in good):
        return None
    return tuple(good[-KEPT:])


def _added(figures: tuple[float, ...], figure: float | None) -> tuple[float, ...]:
    return figures if figure is None or figure <= 0 else (*figures, figure)[-KEPT:]
