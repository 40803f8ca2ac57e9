"""Each failure of a run: when it was noticed, who was the culprit, what it cost. A pure function of the events."""

import signal
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from elastictrain import errors
from elastictrain.report.ledger import GenerationSpan
from elastictrain.report.records import (
    CollectiveFaultRow,
    DivergedRow,
    FailureRow,
    GenerationEndedRow,
    GenerationRow,
    HangRow,
    RecoveryRow,
    ResumeRow,
    StepRow,
)

HANG, LOST, DIVERGED, SILENT = "hang", "host lost", "replicas diverged", "ended without a word"
_CODES = {
    errors.EXIT_CONFIG: "configuration",
    errors.EXIT_USAGE: "configuration",
    errors.EXIT_UNFIT: "host unfit",
    errors.EXIT_BUG: "error",
    errors.EXIT_STORAGE: "storage",
    errors.EXIT_TRANSPORT: "connection",
}
_SIGNAL_BASE = 128
_FAILED = frozenset(("failed", "lost", "ended"))


@dataclass(frozen=True, slots=True)
class FailureRecord:
    """`time`: when it was noticed, in Unix seconds. `recover_s`: from then to the end of the next step, None before that."""

    time: float
    generation: int
    culprit: str  # `rank 3 on b`, a host, or several; empty if nobody can be named
    cause: str  # one of a few words, or `killed by SIGNAL`
    exit_code: int | None
    evidence: tuple[str, ...]  # sentences of those who noticed, the clearest first
    collective: CollectiveFaultRow | None  # the first collective that ranks did not call alike
    lost_steps: int | None  # steps that were done and are done again; None before the state is restored
    recover_s: float | None
    rung: str  # of the recovery ladder; empty before the next step


@dataclass(frozen=True, slots=True)
class RungFigures:
    """Recoveries of one rung of the ladder."""

    count: int
    median_s: float
    worst_s: float


def find_failures(generations: Sequence[GenerationSpan], offsets: Mapping[str, float]) -> list[FailureRecord]:
    """All failures, by time. `offsets`: see `History.offsets`."""
    return [
        _record(one, generations[index + 1 :], offsets)
        for index, one in enumerate(generations)
        if one.outcome in _FAILED and (one.outcome != "ended" or index + 1 < len(generations))
    ]


def by_rung(failures: Sequence[FailureRecord]) -> dict[str, RungFigures]:
    """How long recoveries took, by rung."""
    times: dict[str, list[float]] = {}
    for one in failures:
        if one.recover_s is not None:
            times.setdefault(one.rung, []).append(one.recover_s)
    return {rung: RungFigures(len(found), median(found), max(found)) for rung, found in sorted(times.items())}


def _record(span: GenerationSpan, later: Sequence[GenerationSpan], offsets: Mapping[str, float]) -> FailureRecord:
    events = span.events
    ends = [one for one in events.of(GenerationEndedRow) if one.row.kind in _FAILED]
    failures = [one for one in events.of(FailureRow) if one.row.exit_code != errors.EXIT_STOPPED]
    noticed = [one.time + span.offset for rows in (events.of(HangRow), failures) for one in rows]
    noticed += [one.time + offsets.get(one.writer, 0.0) for one in ends]
    time = min((max(span.begin, min(one, span.end)) for one in noticed), default=span.end)
    culprit, cause, code = _explain(span, later)
    faults = [one.row for one in events.of(CollectiveFaultRow)]
    told = [one.text for one in faults]
    # A hang's text ends with the sentence of its collective.
    hangs = [one.row.text.removesuffix(f". {told[0]}" if told else "") or one.row.reason for one in events.of(HangRow)]
    sentences = [*told, *hangs, *(one.row.reason for one in ends), *(f"{one.writer}: {one.row.error}" for one in failures)]
    recovered = next((one for one in later if one.events.rows.get(StepRow)), None)
    step = recovered.events.of(StepRow)[0].time + recovered.offset if recovered is not None else None
    resumed = next((found.row.step for one in later for found in one.events.of(ResumeRow)), None)
    newest = max((one.row.step for one in events.of(StepRow)), default=0)
    rungs = [found.row.rung for found in recovered.events.of(RecoveryRow)] if recovered is not None else []
    return FailureRecord(
        time=time,
        generation=span.number,
        culprit=culprit,
        cause=cause,
        exit_code=code,
        evidence=tuple(dict.fromkeys(one for one in sentences if one)),
        collective=next(iter(faults), None),
        lost_steps=max(0, newest - resumed) if resumed is not None else None,
        recover_s=max(0.0, step - time) if step is not None else None,
        rung="" if recovered is None else next(iter(rungs), "restart"),
    )


def _explain(span: GenerationSpan, later: Sequence[GenerationSpan]) -> tuple[str, str, int | None]:
    """Culprit, cause and exit code: whoever was found to hang or to differ, then who died, then who reported an error."""
    events = span.events
    ends = sorted((one.row for one in events.of(GenerationEndedRow) if one.row.kind in _FAILED), key=_vagueness)
    failures = sorted((one for one in events.of(FailureRow)), key=lambda one: _rank_of(one.row.exit_code))
    code = ends[0].exit_code if ends else failures[0].row.exit_code if failures else None
    if diverged := events.first(DivergedRow):
        numbers = ", ".join(map(str, diverged.row.ranks))
        return f"rank {numbers} on {', '.join(diverged.row.hosts)}", DIVERGED, code
    guilty = [name for one in events.of(HangRow) for name in one.row.guilty or one.row.hosts]
    # Where none is in the minority, a fault accuses all.
    if guilty := guilty or [name for one in events.of(CollectiveFaultRow) if one.row.others for name in one.row.culprits]:
        return ", ".join(dict.fromkeys(guilty)), HANG, code
    if ends:
        end = ends[0]
        named = [*end.died, *(lost for one in later[:1] for found in one.events.of(RecoveryRow) for lost in found.row.lost)]
        ranks = [name for name in named if name.startswith("rank ")]
        if not ranks and _rank_of(end.exit_code):
            if host := _lost_host(span, later):
                return host, LOST, end.exit_code
            # A launcher that has heard of the end from another host first does not tell of its own worker's reason.
            if failures and not _rank_of(found := failures[0].row.exit_code):
                return _with_host(failures[0].writer, span), describe_code(found), found
            return "", describe_code(end.exit_code), end.exit_code
        return ", ".join(dict.fromkeys(ranks or named)), describe_code(end.exit_code), end.exit_code
    if failures:
        alone = _rank_of(failures[0].row.exit_code) < _rank_of(errors.EXIT_TRANSPORT)
        return failures[0].writer if alone else "", describe_code(failures[0].row.exit_code), code
    # Of several hosts nobody is left to say which one was the first.
    return span.hosts[0] if len(span.hosts) == 1 else "", SILENT, None


def _with_host(writer: str, span: GenerationSpan) -> str:
    """`rank 3 on b`, where all hosts have as many workers; else what is known of it."""
    each, rest = divmod(span.workers, max(1, len(span.hosts)))
    host = span.hosts[int(writer.removeprefix("rank ")) // each :][:1] if each and not rest else ()
    return " on ".join((writer, *host))


def _lost_host(span: GenerationSpan, later: Sequence[GenerationSpan]) -> str:
    """The host that fell silent: whom most others name, and who did not live to see the end of this generation; empty if there
    is none."""
    ends = span.events.by_launcher(GenerationEndedRow)
    votes = Counter(one.row.lost for name, one in ends.items() if one.row.lost not in ("", name))
    if later:
        # In a partition of two hosts each names the other one.
        following = later[0].events.by_launcher(GenerationRow)
        votes.update(name for name in span.events.by_launcher(GenerationRow) if name not in (*ends, *following))
        votes = Counter({name: 2 * number + (name not in following) for name, number in votes.items()})
    return max(votes, key=votes.__getitem__, default="").rpartition("-")[0]


def describe_code(code: int) -> str:
    """The kind of failure that an exit code stands for."""
    if code > _SIGNAL_BASE:
        try:
            return f"killed by {signal.Signals(code - _SIGNAL_BASE).name}"
        except ValueError:
            return f"killed by signal {code - _SIGNAL_BASE}"
    return _CODES.get(code, f"exit code {code}")


def _vagueness(end: GenerationEndedRow) -> tuple[bool, bool, int]:
    """Who names ranks explains more than who names a host, and any cause more than a broken connection."""
    return not any(name.startswith("rank ") for name in end.died), end.kind == "lost", _rank_of(end.exit_code)


def _rank_of(code: int) -> int:
    """More than 0 where another failure is the cause: a broken connection, or workers that have lost their launcher."""
    return {errors.EXIT_TRANSPORT: 1, errors.EXIT_STOPPED: 2}.get(code, 0)
