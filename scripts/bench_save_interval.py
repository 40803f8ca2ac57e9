"""What `checkpoint.every_steps=auto` is worth on histories of losses, beside the best fixed interval in hindsight.

    python scripts/bench_save_interval.py                       (made-up histories)
    python scripts/bench_save_interval.py TRACE... --save 5 60  (recorded ones: every drop of the number of hosts is a loss)

Prints, for each history and cost of a save, the share of time that is training and is not lost with the best fixed interval,
and by how many percentage points the learned one is below it (above: with a minus).
"""

import argparse
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from elastictrain.checkpoint.save_interval import FailureCounts, SaveCosts, decide_save_interval
from elastictrain.simulate.faults import read_trace

HOUR_S = 3600.0
FIXED_S = tuple(10 * 2 ** (power / 2) for power in range(25))
KINDS = ("random", "rare", "bursts", "more", "late", "regular")
DRAWS = 8
"""Histories of a kind whose mean counts: in a single one some interval is lucky."""


@dataclass(frozen=True, slots=True)
class LossHistory:
    """Times at which state was lost, in seconds of training, and the length."""

    losses_s: tuple[float, ...]
    total_s: float


def made_up(kind: str, *, hours: float, seed: int) -> LossHistory:
    """At random, rarely, in bursts, ever more often, none in the first half, or about every three hours."""
    chance, now_s, found = random.Random(f"{kind} {seed}"), 0.0, list[float]()
    mean_h = {"random": 2.0, "rare": 12.0, "bursts": 4.0, "more": 4.0, "late": 1.0}
    total_s = hours * HOUR_S
    while now_s < total_s:
        if kind == "regular":
            now_s += chance.uniform(2.8, 3.2) * HOUR_S
        else:
            now_s += chance.expovariate(1 / (mean_h[kind] * HOUR_S)) * (
                1.0 - 0.875 * now_s / total_s if kind == "more" else 1.0
            )
        if kind == "late" and now_s < total_s / 2:
            continue
        found += [now_s + number * chance.uniform(100.0, 1500.0) for number in range(3 if kind == "bursts" else 1)]
    return LossHistory(tuple(sorted(one for one in found if one < total_s)), total_s)


def recorded(path: Path, *, within_s: float, seed: int) -> LossHistory:
    """Time in which no host is there does not count. Losses are drawn within the time before they were seen."""
    chance, counts, found, trained_s = random.Random(seed), read_trace(path), list[float](), 0.0
    for (begin_s, before), (end_s, after) in pairwise(counts):
        trained_s += end_s - begin_s if before else 0.0
        if after < before:
            found.append(max(0.0, trained_s - chance.uniform(0.0, within_s)))
    return LossHistory(tuple(sorted(found)), trained_s)


def useful_share(history: LossHistory, costs: SaveCosts, *, interval_s: float | None) -> float:
    """The share of time that is training and is not lost; with `interval_s` None the interval is decided as it goes. A save
    counts once it is written."""
    counts, known = FailureCounts(), SaveCosts(recover_s=costs.recover_s)
    now_s = done_s = kept_s = 0.0
    writing: list[tuple[float, float]] = []  # when a save is durable, and what it holds
    for loss_s in (*history.losses_s, history.total_s):
        end_s = min(loss_s, history.total_s)
        while now_s < end_s:
            pause_s = interval_s or decide_save_interval(known, counts, max_lost_s=1e9).seconds
            worked_s = min(pause_s, end_s - now_s)
            done_s, now_s = done_s + worked_s, now_s + worked_s
            if interval_s is None:
                counts = counts.trained(worked_s)
            if now_s + costs.save_s > end_s:
                break
            writing.append((now_s + costs.write_s, done_s))
            now_s, known = now_s + costs.save_s, costs
        if loss_s < history.total_s:
            kept_s = max([held for durable_s, held in writing if durable_s <= loss_s], default=kept_s)
            done_s, counts, writing = kept_s, counts.failed(lost=True), []
            now_s = max(now_s, loss_s) + costs.recover_s
    return done_s / history.total_s


def compare(histories: Sequence[LossHistory], costs: SaveCosts) -> tuple[float, float, float]:
    """Means: the share with the best fixed interval, that interval, and the share with the learned one."""

    def mean(interval_s: float | None) -> float:
        return sum(useful_share(one, costs, interval_s=interval_s) for one in histories) / len(histories)

    best, at_s = max((mean(one), one) for one in FIXED_S if one >= costs.write_s)
    return best, at_s, mean(None)


def main() -> int:
    """Print the table; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="*", type=Path, metavar="TRACE")
    parser.add_argument(
        "--save", nargs="+", type=float, default=(0.5, 5.0, 20.0, 60.0), metavar="S", help="training that a save takes"
    )
    parser.add_argument("--recover", type=float, default=60.0, metavar="S", help="from a loss to the next step")
    parser.add_argument(
        "--within", type=float, default=0.0, metavar="S", help="how long before it was seen a loss may have been"
    )
    parser.add_argument("--draws", type=int, default=DRAWS, metavar="N", help="histories whose mean counts")
    parsed = parser.parse_args()
    seeds = range(parsed.draws)
    rows = [(one.name, [recorded(one, within_s=parsed.within, seed=seed) for seed in seeds]) for one in parsed.traces]
    rows = rows or [(kind, [made_up(kind, hours=48.0, seed=seed) for seed in seeds]) for kind in KINDS]
    worst = 0.0
    sys.stdout.write(f"{'history':34}{'losses':>7}{'save s':>8}{'best':>9}{'at s':>7}{'learned below, points':>23}\n")
    for name, histories in rows:
        for save_s in parsed.save:
            best, at_s, learned = compare(histories, SaveCosts(save_s, 0.0, parsed.recover))
            below = 100 * (best - learned)
            worst = max(worst, below)
            losses = sum(len(one.losses_s) for one in histories) / len(histories)
            sys.stdout.write(f"{name[:33]:34}{losses:7.0f}{save_s:8g}{best:9.2%}{at_s:7.0f}{below:23.2f}\n")
    sys.stdout.write(f"at worst {worst:.2f} points below\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
