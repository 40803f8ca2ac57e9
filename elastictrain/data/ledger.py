"""Which sample each rank consumed at each step, and whether each position was consumed exactly once.

Each incarnation of the run writes a log per rank, `ledger/<incarnation>-r<rank>.jsonl`. Incarnation ids sort by time; a later
incarnation that repeats a step supersedes the earlier ones, as its update does in the model.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from elastictrain.bounded_json import as_record, parse_json
from elastictrain.data.assignment import MixedOrder, Portion, sample_at
from elastictrain.events import AppendLog
from elastictrain.storage.store import Store

_NAME = re.compile(r"(?P<incarnation>.+)-r(?P<rank>\d{5,})(\.part-\d+)?\.jsonl")


@dataclass(frozen=True, slots=True)
class Row:
    """The samples that one rank of one incarnation consumed at `step` (optimizer steps committed, from 1)."""

    incarnation: str
    rank: int
    step: int
    positions: tuple[tuple[int, int], ...]  # half-open ranges [first, end)
    samples: tuple[int, ...]  # the sample at each position, in the order of `positions`
    skipped: bool = False  # whether they were passed over: see `fault.on_poisoned`

    @property
    def each_position(self) -> list[int]:
        return [position for first, end in self.positions for position in range(first, end)]


@dataclass(frozen=True, slots=True)
class Ledger:
    log: AppendLog

    def record(self, step: int, *, consumed: Sequence[tuple[Portion, Sequence[int]]], skipped: bool = False) -> None:
        """Append the portions consumed for `step` (from 1) with their sample ids; only those that count are written. `skipped`:
        the step takes them, but they are not read."""
        counting = [(portion, sample_ids) for portion, sample_ids in consumed if portion.counts]
        row = {
            "step": step,
            "positions": [[portion.first, portion.end] for portion, _ in counting],
            "samples": [sample_id for _, sample_ids in counting for sample_id in sample_ids],
            **({"skipped": True} if skipped else {}),
        }
        self.log.append(json.dumps(row).encode() + b"\n")


def read_ledger(store: Store) -> Iterator[Row]:
    """Every row below `ledger/` of a run folder; unfinished lines are skipped."""
    for info in store.list("ledger"):
        name = _NAME.fullmatch(info.key.rpartition("/")[2])
        if name is None:
            continue
        for line in store.read(info.key).splitlines():
            try:
                yield as_record({**parse_json(line), "incarnation": name["incarnation"], "rank": int(name["rank"])}, Row)
            except (ValueError, TypeError):
                continue


def effective(rows: Sequence[Row]) -> dict[int, list[Row]]:
    """For each step, in order, the rows of the newest incarnation that did it."""
    kept: dict[int, list[Row]] = {}
    for row in sorted(rows, key=lambda row: row.step):
        before = kept.get(row.step, [row])[0].incarnation
        if row.incarnation > before or row.step not in kept:
            kept[row.step] = [row]
        elif row.incarnation == before:
            kept[row.step].append(row)
    return kept


def fold(rows: Sequence[Row]) -> dict[int, dict[int, int]]:
    """For each step, in order: position -> sample, in order of positions."""
    return {
        step: dict(sorted(pair for row in found for pair in zip(row.each_position, row.samples, strict=False)))
        for step, found in effective(rows).items()
    }


def check_exactly_once(
    rows: Sequence[Row],
    *,
    steps: int,
    global_batch: int,
    num_samples: int,
    seed: int,
    shuffle: bool,
    mixture: MixedOrder | None = None,
) -> tuple[str, ...]:
    """Problems, a sentence each; none if steps 1 to `steps` consumed every position once, in order, with the right sample."""
    problems = []
    kept = effective(rows)
    at = partial(sample_at, num_samples=num_samples) if mixture is None else mixture.sample_at
    for step in range(1, steps + 1):
        consumed = Counter(position for row in kept.get(step, ()) for position in row.each_position)
        wanted = range((step - 1) * global_batch, step * global_batch)
        missing, foreign = sorted(set(wanted) - set(consumed)), sorted(set(consumed) - set(wanted))
        twice = sorted(position for position, times in consumed.items() if times > 1)
        if missing or foreign or twice:
            problems.append(
                f"step {step} must consume positions [{wanted.start}, {wanted.stop}) once each, "
                f"but misses {missing}, repeats {twice}, and has {foreign} besides"
            )
        for row in kept.get(step, ()):
            right = [at(position, seed=seed, shuffle=shuffle) for position in row.each_position]
            if list(row.samples) != right:
                problems.append(f"step {step}, rank {row.rank} must consume samples {right}, but consumed {list(row.samples)}")
    if later := [step for step in kept if step > steps]:
        problems.append(f"the run must have {steps} steps, but the ledger continues to step {max(later)}")
    return tuple(problems)
