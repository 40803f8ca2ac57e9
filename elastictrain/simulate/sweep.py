"""The same faults under several settings: a table of 80 columns, and a plot."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any
from xml.sax.saxutils import escape

from elastictrain.errors import UsageError
from elastictrain.simulate.run import Result
from elastictrain.simulate.scenario import Scenario

SWEPT = ("every_s", "hosts", "min_hosts", "max_hosts", "standbys", "replicas")
_COLORS = ("#1f6feb", "#d1680a", "#2b8a3e", "#a61e8f", "#6b7280", "#b91c1c")
_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 720, 400, 70, 40, 60

Setting = Mapping[str, float]


def parse_sweep(texts: Sequence[str]) -> list[dict[str, float]]:
    """All combinations of `NAME=VALUE,VALUE,...`. Raises: UsageError."""
    values: dict[str, list[float]] = {}
    for text in texts:
        name, _, given = text.partition("=")
        if name not in SWEPT:
            raise UsageError(f"--sweep must be NAME=VALUE,... with one of {', '.join(SWEPT)}, but is {text!r}")
        try:
            values[name] = [float(one) if name == "every_s" else int(one) for one in given.split(",")]
        except ValueError:
            kind = "numbers" if name == "every_s" else "whole numbers"
            raise UsageError(f"--sweep {name} must have {kind} with commas between, but has {given!r}") from None
    return [dict(zip(values, chosen, strict=True)) for chosen in product(*values.values())]


def with_setting(scenario: Scenario, setting: Setting) -> Scenario:
    launch: dict[str, Any] = {name: value for name, value in setting.items() if name in ("min_hosts", "max_hosts")}
    others: dict[str, Any] = {name: value for name, value in setting.items() if name not in launch}
    return replace(scenario, launch=replace(scenario.launch, **launch), **others)


def table(settings: Sequence[Setting], results: Sequence[Result]) -> list[str]:
    """One line for each setting; the best goodput has a star."""
    best, width = max(result.goodput for result in results), 80 - 10 * len(settings[0])
    heads = f"{'goodput':>10}{'per host':>10}{'repeated':>10}{'idle h':>8}{'writes':>10}{'cost':>12}"
    lines = ["".join(f"{name:>10}" for name in settings[0]) + heads[:width]]
    for setting, result in zip(settings, results, strict=True):
        figures = (
            f"{result.goodput:>9.2%}{'*' if result.goodput == best else ' '}{result.efficiency:>10.2%}"
            f"{result.totals.lost_steps:>10.0f}{result.idle_hours:>8.2f}{result.requests['writes']:>10.2g}{result.cost:>12,.0f}"
        )
        lines.append("".join(f"{value:>10g}" for value in setting.values()) + figures[:width])
    return lines


def plot(settings: Sequence[Setting], results: Sequence[Result]) -> str:
    """An SVG: the goodput over the first swept option, a line for each combination of the others."""
    name = next(iter(settings[0]))
    places = {value: number for number, value in enumerate(dict.fromkeys(setting[name] for setting in settings))}
    lines: dict[str, list[tuple[float, float]]] = {}
    for setting, result in zip(settings, results, strict=True):
        label = ", ".join(f"{key}={value:g}" for key, value in setting.items() if key != name)
        lines.setdefault(label, []).append((setting[name], result.goodput))
    low, high = min(result.goodput for result in results), max(result.goodput for result in results)
    low, high = (low, high) if high > low else (low - 0.01, high + 0.01)

    def x(value: float) -> float:
        return _LEFT + (places[value] + 0.5) * (_WIDTH - _LEFT) / len(places)

    def y(goodput: float) -> float:
        return _TOP + (high - goodput) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" font-size="13">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT}" y="20">goodput over {escape(name)}</text>',
    ]
    for share in (low, (low + high) / 2, high):
        parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH}" y1="{y(share):.1f}" y2="{y(share):.1f}" stroke="#dddddd"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y(share) + 4:.1f}" text-anchor="end">{share:.2%}</text>')
    for value in places:
        parts.append(f'<text x="{x(value):.1f}" y="{_HEIGHT - _BOTTOM + 24}" text-anchor="middle">{value:g}</text>')
    for number, (label, points) in enumerate(lines.items()):
        color = _COLORS[number % len(_COLORS)]
        path = " ".join(f"{x(value):.1f},{y(goodput):.1f}" for value, goodput in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        parts += [f'<circle cx="{x(value):.1f}" cy="{y(goodput):.1f}" r="4" fill="{color}"/>' for value, goodput in points]
        parts.append(f'<text x="{_LEFT + 110 * number}" y="{_HEIGHT - 10}" fill="{color}">{escape(label)}</text>')
    return "\n".join([*parts, "</svg>", ""])
