"""Figures of `bench_recovery.py`: what the event files of a run say about each recovery in it. Nothing here acts."""

import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from elastictrain.chaos.run_events import EventRow as Row
from elastictrain.chaos.run_events import last_step, steps_of

RESTART, IN_PLACE = "restart", "in_place"
_BEGINS_ANEW = frozenset(("start", "resume", "recovery"))  # events after which steps may be repeated


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """One act of the plan: a signal to the workers of some ranks. `time` is in Unix seconds."""

    time: float
    ranks: tuple[int, ...]
    pids: Mapping[int, int]  # of all workers just before, by rank
    during: str = ""  # the moment of a recovery in which it came; empty while the run trained


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a strike. Seconds count from its signal."""

    strike: Strike
    rung: str  # by the event `recovery`; without one, by the pids of the survivors
    last_step: int  # the newest step of before
    new_step_s: float | None  # until a step was done that no process had done before; None if there was none
    first_step_s: float | None  # until any step was done
    steps_repeated: int
    survivors: int
    survivors_kept: int  # those with the same pid afterwards
    seconds: Mapping[str, float] = field(default_factory=dict)  # phases of the recovery, from its event


@dataclass(frozen=True, slots=True)
class Sample:
    """Resources of one process, or of all under one label, at one moment."""

    label: str
    figures: Mapping[str, float]


def boundary(rows: Sequence[Row], after: float) -> int | None:
    """Index of the first row after a time that a new life of the training wrote. `rows`: of rank 0, by time.

    A new life has a new name, says that it begins, or repeats a step.
    """
    name, step = "", 0
    for index, row in enumerate(rows):
        is_step = row["event"] == "step"
        begins = row["event"] in _BEGINS_ANEW or row["incarnation"] != name or (is_step and row["step"] <= step)
        if row["time"] > after and begins and index:
            return index
        name, step = row["incarnation"], row["step"] if is_step else step
    return None


def new_step(rows: Sequence[Row], after: float) -> Row | None:
    """The first step after a time that no life before had done; None while there is none."""
    if (index := boundary(rows, after)) is None:
        return None
    done = last_step(rows[:index])
    return next((row for row in steps_of(rows[index:]) if row["step"] > done), None)


def pids_told(rows: Iterable[Row]) -> dict[int, int]:
    """Pids by rank from the newest of these rows that has them; empty if none has."""
    told: Mapping[str, int] = {}
    for row in rows:
        told = row.get("pids") or told
    return {int(rank): pid for rank, pid in told.items()}


def judge(strike: Strike, rows: Sequence[Row], *, pids: Mapping[int, int], struck_too: Collection[int] = ()) -> Outcome:
    """`rows`: of rank 0, by time, up to the next strike that found the run training. `pids`: of the workers after the recovery,
    for rows that do not tell them. `struck_too`: ranks of other strikes within the recovery, which are no survivors."""
    index = boundary(rows, strike.time)
    after = rows[index:] if index is not None else []
    last = last_step(rows[:index])
    first, new = next(iter(steps_of(after)), None), new_step(rows, strike.time)
    told = next((row for row in after if row["event"] == "recovery"), None)
    pids = pids_told(after) or pids
    survivors = [rank for rank in strike.pids if rank not in {*strike.ranks, *struck_too}]
    kept = sum(pids.get(rank) == strike.pids[rank] for rank in survivors)
    repeated = max(0, last - first["step"] + 1) if first is not None else 0
    return Outcome(
        strike=strike,
        rung=told["rung"] if told is not None else IN_PLACE if survivors and kept == len(survivors) else RESTART,
        last_step=last,
        new_step_s=new["time"] - strike.time if new is not None else None,
        first_step_s=first["time"] - strike.time if first is not None else None,
        steps_repeated=told["steps_repeated"] if told is not None else repeated,
        survivors=len(survivors),
        survivors_kept=kept,
        seconds=told["seconds"] if told is not None else {},
    )


def usual_step_s(rows: Sequence[Row]) -> float:
    """The median time between steps of an undisturbed part of a run."""
    return float(statistics.median(later["time"] - earlier["time"] for earlier, later in pairwise(steps_of(rows))))


def differences(rows: Sequence[Row], right: Sequence[Row]) -> list[str]:
    """Steps whose loss is not that of the undisturbed run bit for bit, whose positions are others, or that are missing."""
    wanted = {row["step"]: row for row in steps_of(right)}
    found = []
    for row in steps_of(rows):
        step, other = row["step"], wanted.get(row["step"])
        if other is None:
            found.append(f"step {step}: not done by the undisturbed run")
        elif (row["loss"], row["positions"]) != (other["loss"], other["positions"]):
            here, there = (f"loss {one['loss']!r}, positions {one['positions']}" for one in (row, other))
            found.append(f"step {step}: {here}; undisturbed: {there}")
    missing = set(range(1, last_step(rows) + 1)).difference(row["step"] for row in steps_of(rows))
    return found + [f"step {step}: missing" for step in sorted(missing)]


def ledger_differences(
    ledger: Mapping[int, Mapping[int, int]], right: Mapping[int, Mapping[int, int]], *, steps: int, batch: int
) -> list[str]:
    """Steps up to `steps` that did not consume each of their positions once, or other samples than the undisturbed run did.
    The ledgers are folded (`elastictrain.data.ledger.fold`); `batch` is the global batch."""
    wrong = []
    for step in range(1, steps + 1):
        wanted, found = list(range((step - 1) * batch, step * batch)), ledger.get(step, {})
        if sorted(found) != wanted:
            wrong.append(f"step {step}: the ledger has positions {sorted(found)}, not {wanted[0]} to {wanted[-1]}")
        elif found != right.get(step):
            wrong.append(f"step {step}: the ledger has other samples than that of the undisturbed run")
    return wrong


def growth(samples: Sequence[Sequence[Sample]]) -> dict[str, dict[str, tuple[float, float]]]:
    """By label and figure: medians over the first and over the last third of the moments at which samples were taken."""
    third = max(1, len(samples) // 3)
    found: dict[str, dict[str, tuple[float, float]]] = {}
    for label in dict.fromkeys(one.label for moment in samples for one in moment):
        parts = []
        for moments in (samples[:third], samples[-third:]):
            figures: dict[str, list[float]] = {}
            for one in (one for moment in moments for one in moment if one.label == label):
                for name, value in one.figures.items():
                    figures.setdefault(name, []).append(value)
            parts.append({name: statistics.median(values) for name, values in figures.items()})
        found[label] = {name: (parts[0][name], parts[1][name]) for name in parts[0] if name in parts[1]}
    return found


def _line(label: str, outcomes: Sequence[Outcome], value: Callable[[Outcome], float | None]) -> str:
    values = [seconds for one in outcomes if (seconds := value(one)) is not None]
    figures = f"{statistics.median(values):10.2f} {max(values):10.2f}" if values else f"{'-':>10} {'-':>10}"
    repeated = statistics.median(one.steps_repeated for one in outcomes)
    kept, survivors = sum(one.survivors_kept for one in outcomes), sum(one.survivors for one in outcomes)
    never = len(outcomes) - len(values)
    end = f"  {never} never" if never else ""
    return f"{label:<14}{len(outcomes):6d}{figures}{repeated:10.1f}{f'{kept}/{survivors}':>16}{end}"


def table(outcomes: Sequence[Outcome]) -> list[str]:
    """Time to the next new step by rung, and phases of recoveries that told them, at most 80 columns wide."""
    lines = [f"{'rung':<14}{'kills':>6}{'median s':>10} {'worst s':>10}{'repeated':>10}{'survivors kept':>16}"]
    for rung in sorted({one.rung for one in outcomes}):
        lines.append(_line(rung, [one for one in outcomes if one.rung == rung], lambda one: one.new_step_s))
    lines.append(_line("all", outcomes, lambda one: one.new_step_s))
    lines.append(_line("to any step", outcomes, lambda one: one.first_step_s))
    phases = list(dict.fromkeys(name for one in outcomes for name in one.seconds))
    if phases:
        lines += ["", f"{'phase':<20}{'median s':>10} {'worst s':>10}"]
    for name in phases:
        values = [one.seconds[name] for one in outcomes if name in one.seconds]
        lines.append(f"{name[:19]:<20}{statistics.median(values):10.3f} {max(values):10.3f}")
    return lines


def growth_table(found: Mapping[str, Mapping[str, tuple[float, float]]]) -> list[str]:
    """First and last figures of each process, at most 80 columns wide."""
    lines = [f"{'first -> last':<14}{'descriptors':>15}{'threads':>15}{'MB':>24}"]
    for label, figures in found.items():
        cells = (_change(figures.get(name), unit) for name, unit in (("descriptors", 1), ("threads", 1), ("bytes", 1e6)))
        descriptors, threads, size = cells
        lines.append(f"{label[:13]:<14}{descriptors:>15}{threads:>15}{size:>24}")
    return lines


def _change(pair: tuple[float, float] | None, unit: float) -> str:
    digits = 0 if unit == 1 else 1
    return "" if pair is None else f"{pair[0] / unit:.{digits}f} -> {pair[1] / unit:.{digits}f}"
