"""What parts of a run take, in seconds: figures of docs/benchmarks.md, or those of a run's own events."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from statistics import median
from typing import TypeVar

from elastictrain.errors import UsageError
from elastictrain.report.history import EventReader, GenerationEvents, History, Timed
from elastictrain.report.records import GenerationEndedRow, GenerationRow, SavedRow, SnapshotRow, StartRow, StepRow
from elastictrain.storage.opening import open_store

R = TypeVar("R")
_STEPS = 10  # of a world, at least, whose median tells what its steps take


@dataclass(frozen=True, slots=True)
class RunCosts:
    """Defaults: Llama 1b, FSDP2, 18 GB of state on 2 x H200."""

    step_s: float = 0.27  # an optimizer step on all hosts; with fewer it takes longer, for the global batch stays
    step_fixed_s: float = 0.0  # the part of a step that takes as long with fewer hosts
    recovery_s: float = 2.7  # from the begin of a generation to its first step where processes go on, or standbys take over
    restart_s: float = 8.4  # the same with new processes
    restore_s: float = 7.0  # in addition where the state comes from storage, not from host memory
    save_s: float = 7.8  # until a checkpoint is durable, beside training
    save_stall_s: float = 0.4  # for which training stands still at a checkpoint
    snapshot_every_s: float = 8.6  # between snapshots in host memory
    snapshot_stall_s: float = 0.1  # for which training stands still at a snapshot
    stop_s: float = 2.0  # for an orderly end of a host's workers, with a snapshot of the last step


def read_costs(url: str, costs: RunCosts) -> RunCosts:
    """`costs` with what the events of the run in the folder `url` tell. Raises: UsageError if it has no steps; StorageError."""
    store = open_store(url, follow_links=True)
    found = _measured(EventReader(store).update())
    if not found.get("step_s"):
        raise UsageError(f"--run must be the folder of a run that has done steps, but {store.url} has no two `step` events")
    return replace(costs, **found)


def _measured(history: History) -> dict[str, float]:
    """Medians, of what there are figures of."""
    found: dict[str, list[float]] = {field.name: [] for field in fields(RunCosts)}
    by_world: dict[int, list[float]] = defaultdict(list)  # durations of steps
    begun = False
    for _, generation in sorted(history.generations.items()):
        steps, snapshots = _of_rank_0(generation, StepRow), _of_rank_0(generation, SnapshotRow)
        steps_s = [later.time - one.time for one, later in pairwise(steps)]
        found["step_s"] += steps_s
        if (start := generation.first(StartRow)) is not None:
            by_world[start.row.world_size] += steps_s
        found["snapshot_every_s"] += [later.time - one.time for one, later in pairwise(snapshots)]
        found["snapshot_stall_s"] += [one.row.stall_s for one in snapshots]
        if (begin := generation.first(GenerationRow)) is not None:
            if steps:
                found["recovery_s" if begun else "restart_s"].append(steps[0].time - begin.time)
            begun = True
        if steps and (end := generation.first(GenerationEndedRow)) is not None and end.row.kind in ("grow", "leaving"):
            found["stop_s"].append(end.time - steps[-1].time)
        saved = [one.row for one in generation.of(SavedRow) if one.row.reason in ("interval", "time")]
        found["save_s"] += [sum(row.seconds.values()) for row in saved]
    measured = {name: median(values) for name, values in found.items() if values}
    measured |= _steps_of_worlds({world: median(values) for world, values in by_world.items() if len(values) >= _STEPS})
    if found["save_s"]:
        # What steps took beside the usual.
        measured["save_stall_s"] = sum(one - measured["step_s"] for one in found["step_s"]) / len(found["save_s"])
    return {name: max(0.0, value) for name, value in measured.items()}


def _of_rank_0(generation: GenerationEvents, kind: type[R]) -> list[Timed[R]]:
    return [one for one in generation.of(kind) if one.writer == "rank 0"]


def _steps_of_worlds(steps_s: Mapping[int, float]) -> dict[str, float]:
    """The step of the largest world, and the part of it that takes as long in the smallest one; empty for one world."""
    largest, smallest = max(steps_s, default=0), min(steps_s, default=0)
    if smallest < 1 or smallest == largest:
        return {}
    step_s = steps_s[largest]
    divided_s = (steps_s[smallest] - step_s) / (largest / smallest - 1)
    return {"step_s": step_s, "step_fixed_s": min(max(0.0, step_s - divided_s), step_s)}
