"""What the undisturbed run adds to the facts of a run."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from elastictrain.chaos.invariants import ChaosFacts
from elastictrain.chaos.run_events import EventRow, RunEvents, steps_of
from elastictrain.data.ledger import read_ledger
from elastictrain.storage.opening import open_store

CHANGING_WORLD = 1e-5
"""Relative: worlds of other sizes add in another order."""


def with_undisturbed(facts: ChaosFacts, *, run_dir: Path, undisturbed: Path, tolerance: float) -> ChaosFacts:
    """Losses and ledgers of both."""
    right = {row["step"]: float(row["loss"]) for row in steps_of(RunEvents(undisturbed).update())}
    ledgers = [list(read_ledger(open_store(str(folder)))) for folder in (run_dir, undisturbed)]
    return replace(
        facts,
        losses=farthest(steps_of(RunEvents(run_dir).update()), right),
        undisturbed=right,
        tolerance=tolerance,
        ledger=ledgers[0],
        undisturbed_ledger=ledgers[1],
    )


def farthest(steps: Iterable[EventRow], right: dict[int, float]) -> dict[int, float]:
    """The loss of each step; where it was done several times, the one that is farthest from the right one."""
    found: dict[int, float] = {}
    for row in steps:
        step, loss = row["step"], float(row["loss"] if row["loss"] is not None else "nan")
        wanted = right.get(step, loss)
        if step not in found or not abs(loss - wanted) <= abs(found[step] - wanted):
            found[step] = loss
    return found
