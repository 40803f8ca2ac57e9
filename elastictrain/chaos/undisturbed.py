"""What the undisturbed run adds to the facts of a run."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from math import isnan
from pathlib import Path

from elastictrain.chaos.damage import generation_of
from elastictrain.chaos.invariants import ChaosFacts
from elastictrain.chaos.run_events import EventRow, RunEvents, steps_of
from elastictrain.data.ledger import read_ledger
from elastictrain.storage.opening import open_store

CHANGING_WORLD = 1e-5
"""Relative: worlds of other sizes add in another order."""


def with_undisturbed(
    facts: ChaosFacts, *, run_dir: Path, undisturbed: Path, tolerance: float, spoilt: Collection[int] = ()
) -> ChaosFacts:
    """Losses and ledgers of both. `spoilt`: generations in which a gradient was damaged, until somebody noticed."""
    right = {row["step"]: float(row["loss"]) for row in steps_of(RunEvents(undisturbed).update())}
    ledgers = [list(read_ledger(open_store(str(folder)))) for folder in (run_dir, undisturbed)]
    return replace(
        facts,
        losses=farthest(steps_of(RunEvents(run_dir).update()), right, spoilt=spoilt),
        undisturbed=right,
        tolerance=tolerance,
        ledger=ledgers[0],
        undisturbed_ledger=ledgers[1],
    )


def farthest(steps: Iterable[EventRow], right: Mapping[int, float], *, spoilt: Collection[int] = ()) -> dict[int, float]:
    """The loss of each step; where it was done several times, the one that is farthest from the right one. One of a generation
    that was `spoilt` counts only if no later one has done the step again."""
    found: dict[int, float] = {}
    rows = sorted(steps, key=lambda row: generation_of(row["incarnation"]))
    newest = {row["step"]: generation_of(row["incarnation"]) for row in rows}
    for row in rows:
        generation = generation_of(row["incarnation"])
        if generation in spoilt and generation < newest[row["step"]]:
            continue
        step, loss = row["step"], float(row["loss"] if row["loss"] is not None else "nan")
        wanted = right.get(step, loss)
        if step not in found or isnan(loss) or abs(loss - wanted) > abs(found[step] - wanted):
            found[step] = loss
    return found
