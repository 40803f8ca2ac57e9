"""What chaos prints: one line for each kind of fault, and how a run compares with another one. Pure; 80 columns."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from elastictrain.chaos.blame import Struck
from elastictrain.chaos.invariants import expected_culprit
from elastictrain.report.failures import FailureRecord
from elastictrain.report.ledger import TimeCause
from elastictrain.report.summary import HOUR_S, RunReport


@dataclass(frozen=True, slots=True)
class ComparedRun:
    """A run under the faults of a plan. Seconds are those of workers; `wall_s`: from the first start to the stop."""

    name: str
    useful_s: float
    whole_s: float  # of all workers, absent or not
    present_s: float
    steps: int
    lost_steps: int

    @classmethod
    def of(cls, name: str, report: RunReport, *, whole_s: float, present_s: float) -> "ComparedRun":
        useful_s = report.seconds.get(TimeCause.USEFUL, 0.0)
        return cls(name, useful_s, whole_s, present_s, report.new_steps, report.repeated_steps)


def kinds_table(struck: Sequence[Struck], failures: Mapping[int, FailureRecord]) -> list[str]:
    """`went on`: until all hosts train again; `lost`: steps that were done twice."""
    head = f"{'fault':<14} {'times':>5} {'went on after, s':>17} {'lost steps':>14} {'failed':>6} caused by"
    lines = [head, f"{'':<14} {'':>5} {'median':>9} {'most':>7} {'median':>8} {'most':>5}"]
    for kind in sorted({one.fault.kind for one in struck}):
        numbers = [number for number, one in enumerate(struck) if one.fault.kind is kind]
        waited = [one for number in numbers if (one := struck[number].recovered_s) is not None]
        followed = [failures[number] for number in numbers if number in failures]
        lost = [one.lost_steps or 0 for one in followed]
        seconds = f"{statistics.median(waited):9.1f} {max(waited):7.1f}" if waited else f"{'-':>9} {'-':>7}"
        steps = f"{statistics.median(lost):8g} {max(lost):5d}" if lost else f"{'-':>8} {'-':>5}"
        causes = ", ".join(sorted({one.cause for one in followed}))
        lines.append(f"{kind:<14} {len(numbers):5d} {seconds} {steps} {len(followed):6d} {causes}"[:80].rstrip())
    return lines


def culprits_line(struck: Sequence[Struck], failures: Mapping[int, FailureRecord], *, wrong: int) -> str:
    judged = [number for number in failures if expected_culprit(struck[number].fault, rank=struck[number].rank)]
    return f"{len(judged) - wrong} of {len(judged)} failures have the right culprit"


def comparison(runs: Sequence[ComparedRun], *, price: float | None) -> list[str]:
    """One column for each run. The price is that of an hour of a worker that is there."""
    rows: list[tuple[str, list[str]]] = [
        ("goodput, all workers", [f"{one.useful_s / one.whole_s:.1%}" for one in runs]),
        ("goodput, those there", [f"{one.useful_s / one.present_s:.1%}" for one in runs]),
        ("steps", [f"{one.steps}" for one in runs]),
        ("lost steps", [f"{one.lost_steps}" for one in runs]),
        ("worker-seconds there", [f"{one.present_s:.0f}" for one in runs]),
    ]
    if price is not None:
        costs = [one.present_s / HOUR_S * price for one in runs]
        rows.append(("cost", [f"{cost:.4f}" for cost in costs]))
        rows.append(
            ("per 1,000 steps", [f"{1000 * cost / max(1, one.steps):.4f}" for cost, one in zip(costs, runs, strict=True)])
        )
    lines = [f"{'':<22}" + "".join(f"{one.name:>18}" for one in runs)]
    return lines + [f"{name:<22}" + "".join(f"{value:>18}" for value in values) for name, values in rows]
