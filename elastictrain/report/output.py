"""A report as JSON, and as lines of at most 80 columns."""

import textwrap
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, cast

import msgspec
from msgspec import structs

from elastictrain.report.failures import FailureRecord
from elastictrain.report.ledger import TimeCause
from elastictrain.report.summary import Price, RunReport

WIDTH = 80
_BAR = 24
_SHOWN_FAILURES, _SHOWN_PARTS, _SHORTEST_S = 20, 2, 0.001
_INDENT = "    "
_FIGURES = (  # of a report, in its JSON
    *("url", "begin", "end", "duration_s", "worker_s", "goodput", "goodput_present", "attributed", "seconds", "steps"),
    *("new_steps", "repeated_steps", "step_s", "first_step_s", "samples", "tokens", "mfu", "mtbf_s"),
)
_IN_HEADING = ("goodput", "attributed", "time")
_OF_GENERATION = ("number", "begin", "end", "hosts", "workers", "outcome", "reason")


def as_json(report: RunReport, *, price: Price | None) -> dict[str, object]:
    """All figures, for a script. Seconds are those of workers, except `recover_s`, `mtbf_s`, `duration_s`, `step_s` and
    `first_step_s`."""
    found: dict[str, Any] = {name: getattr(report, name) for name in _FIGURES}
    found |= {
        "rate": None if report.rate is None else dict(zip(("value", "unit"), report.rate, strict=True)),
        "recoveries": report.rungs,
        "failures": [
            {**asdict(one), "collective": one.collective and structs.asdict(one.collective)} for one in report.failures
        ],
        "generations": [{name: getattr(one, name) for name in _OF_GENERATION} for one in report.generations],
        "garbled_lines": report.garbled,
    }
    if price is not None:
        found["cost"] = {"price_per_hour": price, **asdict(report.costs(price))}
    return cast(dict[str, object], msgspec.to_builtins(found))


def summary_line(report: RunReport) -> str:
    """The most important figures."""
    parts = [f"goodput {report.goodput:.1%} of {show_s(report.duration_s)}", f"{report.new_steps} steps"]
    if report.repeated_steps:
        parts.append(f"{report.repeated_steps} repeated")
    if report.failures:
        parts.append(f"{len(report.failures)} failure(s)")
    return ", ".join(parts)


def as_text(report: RunReport, *, price: Price | None) -> list[str]:
    """What a person wants to know first."""
    if not report.worker_s:
        return [f"{report.url}: no generation has begun here yet"]
    size = max((one.workers for one in report.generations), default=0)
    ran = f"{show_s(report.duration_s)} since the first start, {len(report.generations)} generation(s)"
    lines = [
        _cut(report.url),
        f"step {report.steps}, {ran} of up to {size} worker(s)",
        "",
        f"goodput {report.goodput:.1%} of {show_s(report.worker_s)} of workers; {report.attributed:.2%} attributed",
        "",
    ]
    for cause in TimeCause:
        if seconds := report.seconds.get(cause):
            share = seconds / report.worker_s
            bar = "█" * round(share * _BAR) or "▏"
            lines.append(f"  {cause:<22}{show_s(seconds):>12}{share:>9.2%}  {bar}")
    found = {name: value for name, value in figures(report, price=price).items() if name not in _IN_HEADING}
    if report.first_step_s:
        found["to the first step"] = show_parts(report.first_step_s, most=_SHOWN_PARTS)
    for rung, one in report.rungs.items():
        found[f"recovery, {rung}"] = f"{show_s(one.median_s)} usually, {show_s(one.worst_s)} at worst, of {one.count}"
    lines += ["", *(f"  {name:<24}{value}" for name, value in found.items())]
    if report.failures:
        lines += ["", f"  {'failure at':<20}{'culprit':<20}{'cause':<19}{'lost':>5}{'recovered':>12}"]
    hidden = len(report.failures) - _SHOWN_FAILURES
    if hidden > 0:
        lines.append(f"  ({hidden} earlier ones: --json and --html have them)")
    for failure in report.failures[-_SHOWN_FAILURES:]:
        lines.append(_failure_line(failure))
        if failure.collective is not None:
            lines += textwrap.wrap(failure.collective.text, WIDTH, initial_indent=_INDENT, subsequent_indent=_INDENT)
    if report.garbled:
        lines += ["", f"  {report.garbled} line(s) are torn or garbled, and left out"]
    return lines


def figures(report: RunReport, *, price: Price | None) -> dict[str, str]:
    """Those that are known, by name; the names of costs begin with `cost`."""
    found = {
        "goodput": f"{report.goodput:.1%}",
        "attributed": f"{report.attributed:.2%}",
        "time": show_s(report.duration_s),
        "new steps": f"{report.new_steps:,}",
        "repeated steps": f"{report.repeated_steps:,}",
        "failures": f"{len(report.failures):,}",
    }
    if report.mtbf_s is not None:
        found["time between failures"] = show_s(report.mtbf_s)
    if report.rate is not None:
        found["speed, pauses included"] = f"{show_number(report.rate[0])} {report.rate[1]}"
    if report.step_s is not None:
        found["usual step"] = show_s(report.step_s)
    if report.mfu is not None:
        found["usual MFU"] = f"{report.mfu:.1%}"
    if price is not None:
        costs = report.costs(price)
        found |= {"cost": f"{costs.total:,.2f}", "cost without progress": f"{costs.wasted:,.2f}"}
        if costs.per_step is not None:
            found["cost per useful step"] = f"{costs.per_step:,.4g}"
        if costs.per_billion_tokens is not None:
            found["cost per 1e9 tokens"] = f"{costs.per_billion_tokens:,.2f}"
    return found


def show_parts(seconds: Mapping[str, float], *, most: int) -> str:
    """The sum, and the longest parts that take time."""
    longest = sorted((name for name in seconds if seconds[name] >= _SHORTEST_S), key=lambda name: -seconds[name])[:most]
    return f"{show_s(sum(seconds.values()))}: {', '.join(f'{name} {show_s(seconds[name])}' for name in longest)}"


def _failure_line(one: FailureRecord) -> str:
    lost = "" if one.lost_steps is None else str(one.lost_steps)
    recovered = "not yet" if one.recover_s is None else show_s(one.recover_s)
    culprit = one.culprit or "nobody named"
    return f"  {show_time(one.time):<20}{_cut(culprit, 19):<20}{_cut(one.cause, 18):<19}{lost:>5}{recovered:>12}"


def show_time(time_s: float) -> str:
    """Unix seconds as local time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time_s))


def show_number(value: float) -> str:
    """With about four digits, and no exponent where it is large."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def show_s(seconds: float) -> str:
    """A duration, with about three digits."""
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    if seconds < 7200:
        return f"{seconds / 60:.3g} min"
    return f"{seconds / 3600:,.4g} h"


def _cut(text: str, width: int = WIDTH) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"
