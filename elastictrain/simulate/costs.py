"""What parts of a run take, in seconds: figures of docs/benchmarks.md, or those of a run's own events."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from statistics import median
from typing import Any

from elastictrain.bounded_json import MalformedJsonError, parse_json
from elastictrain.errors import UsageError
from elastictrain.storage.opening import open_store

Row = Mapping[str, Any]
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
    logs = sorted(info.key for info in store.list("events/") if info.key.endswith(".jsonl"))
    rows = [row for key in logs for row in _parsed(store.read(key))]
    found = _measured(sorted(rows, key=lambda row: _number(row.get("time"))))
    if not found.get("step_s"):
        raise UsageError(f"--run must be the folder of a run that has done steps, but {store.url} has no two `step` events")
    return replace(costs, **found)


def _parsed(data: bytes) -> Iterable[Row]:
    for line in data.splitlines():
        try:
            row = parse_json(line)
        except MalformedJsonError:
            # The last line of a killed writer.
            continue
        if isinstance(row, dict):
            yield row


def _measured(rows: Sequence[Row]) -> dict[str, float]:
    """Medians, of what there are figures of. `rows` of all ranks and launchers, in the order of time."""
    found: dict[str, list[float]] = {field.name: [] for field in fields(RunCosts)}
    last: dict[str, Row] = {}  # of each kind
    by_world: dict[int, list[float]] = {}  # durations of steps
    begun_s, number = None, 0  # of a generation that has not done a step
    for row in rows:
        kind, time_s, seconds = str(row.get("event")), _number(row.get("time")), row.get("seconds")
        before = last.get(kind)
        if kind in ("step", "snapshot") and row.get("rank") != 0:
            continue
        if kind in ("step", "snapshot") and before is not None and before["incarnation"] == row["incarnation"]:
            found["step_s" if kind == "step" else "snapshot_every_s"].append(time_s - _number(before["time"]))
            if kind == "step" and (start := last.get("start")) and start["incarnation"] == row["incarnation"]:
                by_world.setdefault(int(_number(start.get("world_size"))), []).append(time_s - _number(before["time"]))
        if kind == "snapshot":
            found["snapshot_stall_s"].append(_number(row.get("stall_s")))
        elif kind == "step" and begun_s is not None:
            found["recovery_s" if number > 1 else "restart_s"].append(time_s - begun_s)
            begun_s = None
        elif kind == "generation" and (before is None or before["incarnation"] != row["incarnation"]):
            begun_s, number = time_s, number + 1
        elif kind == "generation_ended" and row.get("kind") in ("grow", "leaving") and "step" in last:
            if before is None or before["incarnation"] != row["incarnation"]:
                found["stop_s"].append(time_s - _number(last["step"]["time"]))
        elif kind == "checkpoint_saved" and row.get("reason") in ("interval", "time") and isinstance(seconds, dict):
            found["save_s"].append(sum(map(_number, seconds.values())))
        last[kind] = row
    measured = {name: median(values) for name, values in found.items() if values}
    measured |= _steps_of_worlds({world: median(values) for world, values in by_world.items() if len(values) >= _STEPS})
    if found["save_s"]:
        # What steps took beside the usual.
        measured["save_stall_s"] = sum(one - measured["step_s"] for one in found["step_s"]) / len(found["save_s"])
    return {name: max(0.0, value) for name, value in measured.items()}


def _steps_of_worlds(steps_s: Mapping[int, float]) -> dict[str, float]:
    """The step of the largest world, and the part of it that takes as long in the smallest one; empty for one world."""
    largest, smallest = max(steps_s, default=0), min(steps_s, default=0)
    if smallest < 1 or smallest == largest:
        return {}
    step_s = steps_s[largest]
    divided_s = (steps_s[smallest] - step_s) / (largest / smallest - 1)
    return {"step_s": step_s, "step_fixed_s": min(max(0.0, step_s - divided_s), step_s)}


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0
