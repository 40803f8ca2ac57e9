"""What parts of a run take, in seconds: figures of docs/benchmarks.md, or those of a run's own events."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import mean, median

from elastictrain.errors import UsageError
from elastictrain.report.history import EventReader, History, Timed
from elastictrain.report.ledger import GenerationSpan, host_of, spans
from elastictrain.report.records import LauncherStartedRow, ResumeRow, SavedRow, SnapshotRow, StepRow
from elastictrain.storage.opening import open_store

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
    found = _measured(EventReader(store).update())
    if not found.get("step_s"):
        raise UsageError(f"--run must be the folder of a run that has done steps, but {store.url} has no two `step` events")
    return replace(costs, **found)


@dataclass(frozen=True, slots=True)
class _Step:
    """Not the first of its generation; times in Unix seconds."""

    end: float
    took_s: float
    workers: int


def _measured(history: History) -> dict[str, float]:
    """Means, as totals are asked for; of what there are figures of."""
    generations = spans(history)
    steps = [
        _Step(later.time + span.offset, later.time - before.time, span.workers)
        for span in generations
        for before, later in pairwise(span.events.of(StepRow))
    ]
    usual_s = _usual([one.took_s for one in steps])
    measured = {name: mean(values) for name, values in _durations(generations, _starts(history)).items()}
    measured |= {"step_s": usual_s} if usual_s else {}
    worlds = {world: [one.took_s for one in steps if one.workers == world] for world in {one.workers for one in steps}}
    measured |= _steps_of_worlds({world: _usual(took_s) for world, took_s in worlds.items() if len(took_s) >= _STEPS})
    for name in {"recovery_s", "restart_s"} & measured.keys():
        # They are measured up to the end of the first step.
        measured[name] -= usual_s
    if saves := [
        (one.time + span.offset - _total(one.row.seconds), one.time + span.offset)
        for span in generations
        for one in _saves(span)
    ]:
        # What steps took beside the usual while a checkpoint was written.
        beside = [one for one in steps if any(one.end > begin and one.end - one.took_s < end for begin, end in saves)]
        measured["save_stall_s"] = sum(one.took_s - usual_s for one in beside) / len(saves)
    return {name: max(0.0, value) for name, value in measured.items()}


def _starts(history: History) -> dict[str, list[float]]:
    """When launchers have started, by host."""
    offsets, found = history.offsets(), defaultdict[str, list[float]](list)
    for name, rows in history.launchers.items():
        times = [one.time + offsets.get(name, 0.0) for one in rows if isinstance(one.row, LauncherStartedRow)]
        found[host_of(name)] += times
    return found


def _durations(generations: Sequence[GenerationSpan], starts: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    found = defaultdict[str, list[float]](list)
    for before, span in zip((None, *generations), generations, strict=False):
        steps, snapshots = span.events.of(StepRow), span.events.of(SnapshotRow)
        resume = span.events.first(ResumeRow)
        read_s = _total(resume.row.seconds) if resume is not None and resume.row.tier == "storage" else 0.0
        if read_s:
            found["restore_s"].append(read_s)
        if steps:
            since = before.begin if before is not None else 0.0
            came = {host for host, times in starts.items() if any(since < at <= span.begin for at in times)}
            # Whether launchers have come on all of its hosts since the last generation began; torchrun starts all anew.
            anew = before is None or not starts or came.issuperset(span.hosts)
            found["restart_s" if anew else "recovery_s"].append(steps[0].time + span.offset - span.begin - read_s)
            if span.outcome in ("grow", "leaving"):
                found["stop_s"].append(span.end - steps[-1].time - span.offset)
        found["snapshot_stall_s"] += [one.row.stall_s for one in snapshots]
        found["snapshot_every_s"] += [later.time - earlier.time for earlier, later in pairwise(snapshots)]
        found["save_s"] += [_total(one.row.seconds) for one in _saves(span)]
    return {name: values for name, values in found.items() if values}


def _saves(span: GenerationSpan) -> list[Timed[SavedRow]]:
    """The checkpoints that training did not wait for."""
    return [one for one in span.events.of(SavedRow) if one.row.reason in ("interval", "time") and _total(one.row.seconds) > 0]


def _usual(took_s: Sequence[float]) -> float:
    """The mean of those that are no pauses."""
    usual_s = median(took_s) if took_s else 0.0
    return mean([one for one in took_s if usual_s / _PAUSE < one < usual_s * _PAUSE] or took_s or [0.0])


def _total(seconds: Mapping[str, float]) -> float:
    return sum(seconds.values())


def _steps_of_worlds(steps_s: Mapping[int, float]) -> dict[str, float]:
    """The step of the largest world, and the part of it that takes as long in the smallest one; empty for one world."""
    largest, smallest = max(steps_s, default=0), min(steps_s, default=0)
    if smallest < 1 or smallest == largest:
        return {}
    step_s = steps_s[largest]
    divided_s = (steps_s[smallest] - step_s) / (largest / smallest - 1)
    return {"step_s": step_s, "step_fixed_s": min(max(0.0, step_s - divided_s), step_s)}
