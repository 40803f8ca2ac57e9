"""What parts of a run take, in seconds: figures of docs/benchmarks.md, or those of a run's own events."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from statistics import mean, median
from typing import Any

from elastictrain.bounded_json import MalformedJsonError, parse_json
from elastictrain.errors import UsageError
from elastictrain.storage.opening import open_store

Row = Mapping[str, Any]
_STEPS = 10  # of a world, at least, to tell what its steps take
_PAUSE = 1.5  # times the median: a step that takes as long was interrupted


@dataclass(frozen=True, slots=True)
class RunCosts:
    """Defaults: Llama 1b, FSDP2, 18 GB of state on 2 x H200."""

    step_s: float = 0.27  # an optimizer step on all hosts; with fewer it takes longer, for the global batch stays
    step_fixed_s: float = 0.0  # the part of a step that takes as long with fewer hosts
    recovery_s: float = 2.7  # from the begin of a generation until it trains, where processes go on, or standbys take over
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
    """Means, as totals are asked for; of what there are figures of. `rows` of all ranks and launchers, in the order of time."""
    measured = {name: mean(values) for name, values in _durations(rows).items() if values}
    steps = [(row, took_s, world) for row, took_s, world in _steps(rows)]
    usual_s = _usual([took_s for _, took_s, _ in steps])
    measured |= {"step_s": usual_s} if usual_s else {}
    worlds = {
        world: [took_s for _, took_s, one in steps if one == world] for world in {world for _, _, world in steps if world}
    }
    measured |= _steps_of_worlds({world: _usual(took_s) for world, took_s in worlds.items() if len(took_s) >= _STEPS})
    for name in {"recovery_s", "restart_s"} & measured.keys():
        # They are measured up to the end of the first step.
        measured[name] -= usual_s
    if saves := [(_number(row["time"]) - _took_s(row), _number(row["time"])) for row in rows if _is_interval_save(row)]:
        # What steps took beside the usual while a checkpoint was written.
        ends = [(_number(row["time"]), took_s) for row, took_s, _ in steps]
        extra_s = sum(took_s - usual_s for end_s, took_s in ends if any(end_s > b and end_s - took_s < e for b, e in saves))
        measured["save_stall_s"] = extra_s / len(saves)
    return {name: max(0.0, value) for name, value in measured.items()}


def _durations(rows: Sequence[Row]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {field.name: [] for field in fields(RunCosts)}
    last: dict[str, Row] = {}  # of each kind
    begun_s, anew = None, False  # of a generation that has not done a step; whether all of its launchers are new
    came = set[str]()  # hosts whose launchers came since a generation began
    for row in rows:
        kind, time_s = str(row.get("event")), _number(row.get("time"))
        before = last.get(kind)
        first = before is None or before["incarnation"] != row["incarnation"]
        if kind in ("step", "snapshot", "resume") and row.get("rank") != 0:
            continue
        if kind == "snapshot":
            found["snapshot_stall_s"].append(_number(row.get("stall_s")))
            if not first and before is not None:
                found["snapshot_every_s"].append(time_s - _number(before["time"]))
        elif kind == "resume" and row.get("tier") == "storage":
            found["restore_s"].append(_took_s(row))
        elif kind == "step" and begun_s is not None:
            from_storage = last.get("resume", {}).get("tier") == "storage"
            beside_s = found["restore_s"][-1] if from_storage else 0.0
            found["restart_s" if anew else "recovery_s"].append(time_s - begun_s - beside_s)
            begun_s = None
        elif kind == "launcher_started":
            came.add(str(row.get("host")))
        elif kind == "generation" and first:
            hosts = row.get("hosts")
            anew = before is None or (isinstance(hosts, list) and came.issuperset(hosts))
            begun_s, came = time_s, set()
        elif kind == "generation_ended" and row.get("kind") in ("grow", "leaving") and "step" in last and first:
            found["stop_s"].append(time_s - _number(last["step"]["time"]))
        elif _is_interval_save(row):
            found["save_s"].append(_took_s(row))
        last[kind] = row
    return found


def _steps(rows: Sequence[Row]) -> Iterator[tuple[Row, float, int]]:
    """Each step but the first of its generation: how long it took, and on how many workers; 0 where nobody tells."""
    before: Row | None = None
    worlds: dict[object, int] = {}
    for row in rows:
        if row.get("event") == "start":
            worlds[row["incarnation"]] = int(_number(row.get("world_size")))
        if row.get("event") == "step" and row.get("rank") == 0:
            if before is not None and before["incarnation"] == row["incarnation"]:
                yield row, _number(row["time"]) - _number(before["time"]), worlds.get(row["incarnation"], 0)
            before = row


def _usual(took_s: Sequence[float]) -> float:
    """The mean of those that are no pauses, and that no clock has gone wrong in."""
    usual_s = median(took_s) if took_s else 0.0
    return mean([one for one in took_s if usual_s / _PAUSE < one < usual_s * _PAUSE] or took_s or [0.0])


def _is_interval_save(row: Row) -> bool:
    return row.get("event") == "checkpoint_saved" and row.get("reason") in ("interval", "time") and _took_s(row) > 0


def _took_s(row: Row) -> float:
    seconds = row.get("seconds")
    return sum(map(_number, seconds.values())) if isinstance(seconds, dict) else 0.0


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
