"""The goodput ledger: each second of each worker belongs to exactly one cause. A pure function of the events.

A run has as many workers as its largest world so far, or as its hosts bring now, if that is more. The workers of a generation
share its timeline, which rank 0 and the launcher of its host have written. The others wait, if their launcher lives, or are
absent.
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from heapq import merge
from math import inf

from elastictrain.errors import EXIT_STOPPED
from elastictrain.report.history import GenerationEvents, History, OfLauncher, Timed
from elastictrain.report.records import (
    CompiledRow,
    EvalRow,
    EventRow,
    FailureRow,
    GenerationEndedRow,
    GenerationRow,
    LauncherEndedRow,
    LauncherStartedRow,
    ResumeRow,
    SavedRow,
    SnapshotRow,
    StartRow,
    StepRow,
    StopRow,
)


class TimeCause(StrEnum):
    """What a worker's second was spent on."""

    USEFUL = "useful step"
    REPEATED = "repeated step"
    COMPILE = "compile"
    WARM_UP = "first-step warm-up"
    STARTUP = "process start and build"
    PREFLIGHT = "preflight"
    RENDEZVOUS = "rendezvous and group"
    RESTORE = "restore"
    SNAPSHOT = "snapshot stall"
    SAVE = "save stall"
    EVALUATION = "evaluation"
    DATA = "data wait"
    STRAGGLER = "straggler wait"
    FAILURE = "failure until noticed"
    DRAIN = "stop and drain"
    WAITING = "waiting for hosts"
    ABSENT = "host absent"
    UNKNOWN = "unknown"


# By part of a start (`start.seconds`), and by the phase in which a generation without a start has ended.
_PHASES = {
    **dict.fromkeys(("rendezvous", "group", "process group", "predecessors"), TimeCause.RENDEZVOUS),
    **dict.fromkeys(("preflight", "preflight_group"), TimeCause.PREFLIGHT),
    "restore": TimeCause.RESTORE,
}
_WAITS = {"data": TimeCause.DATA, "save": TimeCause.SAVE, "straggler": TimeCause.STRAGGLER}
_ENDS = {
    **dict.fromkeys(("done", "leaving", "grow"), TimeCause.DRAIN),
    # After one that ended without a word another one was made.
    **dict.fromkeys(("failed", "lost", "ended"), TimeCause.FAILURE),
}
USUAL_STEPS = 2  # after the first: how long that one would have taken without warm-up is the least of their durations


@dataclass(frozen=True, slots=True)
class Segment:
    """A span of time that `workers` workers spent on one cause; times in Unix seconds."""

    begin: float
    end: float
    cause: TimeCause
    workers: float
    generation: int = 0  # 0: of none

    @property
    def worker_s(self) -> float:
        return (self.end - self.begin) * self.workers


@dataclass(frozen=True, slots=True)
class GenerationSpan:
    """When a generation ran, and how it ended: `done`, `leaving`, `grow`, `failed`, `lost`, `ended` (unexplained) or `open`."""

    events: GenerationEvents
    begin: float
    end: float
    workers: int
    hosts: tuple[str, ...]
    outcome: str
    offset: float  # added to the times of its rows
    launcher: str  # of rank 0's host; empty without launchers
    reason: str = ""

    @property
    def number(self) -> int:
        return self.events.number


def spans(history: History) -> list[GenerationSpan]:
    """All generations in order; none overlaps another."""
    offsets, found = history.offsets(), list[GenerationSpan]()
    newest = last_time(history, offsets)
    draft = [one for _, number in sorted(history.generations.items()) if (one := _span(number, offsets, newest)) is not None]
    for index, one in enumerate(draft):
        begin = max(one.begin, found[-1].end) if found else one.begin
        following = min((later.begin for later in draft[index + 1 :]), default=newest)
        end = max(begin, min(one.end, following) if index + 1 < len(draft) else one.end)
        outcome = "ended" if one.outcome == "open" and index + 1 < len(draft) else one.outcome
        if outcome == "ended":
            end = max(begin, _last_row(one.events) + one.offset, min(end, _replaced(one, history, offsets)))
        found.append(replace(one, begin=begin, end=end, outcome=outcome))
    return found


def _replaced(span: GenerationSpan, history: History, offsets: Mapping[str, float]) -> float:
    """When the first of the launchers came that took the place of one of a generation's, which has said nothing of an end."""
    starts = (
        (one.time + offsets.get(name, 0.0), host_of(name))
        for name, rows in history.launchers.items()
        for one in rows
        if isinstance(one.row, LauncherStartedRow)
    )
    return min((time for time, host in starts if time > span.begin and host in span.hosts), default=inf)


def last_time(history: History, offsets: Mapping[str, float]) -> float:
    """The time of the newest event, savers' apart: they may write long after the end."""
    launchers = (one.time + offsets.get(one.writer, 0.0) for rows in history.launchers.values() for one in rows)
    workers = (_last_row(generation) + _offset_of(generation, offsets) for generation in history.generations.values())
    return max((*launchers, *workers), default=0.0)


def _offset_of(events: GenerationEvents, offsets: Mapping[str, float]) -> float:
    return offsets.get(_reference(events), 0.0)


def _reference(events: GenerationEvents) -> str:
    """The launcher of rank 0's host; empty if there is none."""
    begins = events.by_launcher(GenerationRow)
    first = next((one.row.hosts[0] for one in begins.values() if one.row.hosts), "")
    return next((name for name in begins if name.rpartition("-")[0] == first), next(iter(begins), ""))


def _last_row(events: GenerationEvents) -> float:
    of_workers = (rows for kind, rows in events.rows.items() if kind is not SavedRow and not issubclass(kind, OfLauncher))
    return max((one.time for rows in of_workers for one in rows), default=0.0)


def _span(events: GenerationEvents, offsets: Mapping[str, float], newest: float) -> GenerationSpan | None:
    """None if only a saver, or launchers that end with the run, have written."""
    begins, ends = events.by_launcher(GenerationRow), events.by_launcher(GenerationEndedRow)
    start, reference, last = events.first(StartRow), _reference(events), _last_row(events)
    offset = offsets.get(reference, 0.0)
    if begins:
        begin, world = begins[reference].time, begins[reference].row
        size, hosts = world.world_size, tuple(world.hosts)
    elif last:
        begin = min(one.time for kind, rows in events.rows.items() if kind is not SavedRow for one in rows)
        begin = start.time - sum(start.row.seconds.values()) if start is not None else begin
        size, hosts = (start.row.world_size, tuple(start.row.hosts)) if start is not None else (1, ())
    else:
        return None
    stop, failures = events.first(StopRow), events.of(FailureRow)
    kinds = [one.row.kind for one in ends.values()]
    outcome = next((kind for kind in ("failed", "lost") if kind in kinds), kinds[0] if kinds else "")
    if not outcome:
        stopped = "done" if stop is not None and not stop.row.exit_code else "leaving"
        # Who is asked to stop before the first step has nothing to save, and leaves no other record.
        asked = bool(failures) and all(one.row.exit_code == EXIT_STOPPED for one in failures)
        outcome = stopped if stop is not None or asked else "failed" if failures else "open" if begins else "ended"
    if reference in ends:
        end = ends[reference].time
    elif ends:
        end = min(one.time + offsets.get(name, 0.0) for name, one in ends.items()) - offset
    else:
        # A launcher that says nothing more may live; a process of its own has written its last event.
        end = newest - offset if outcome == "open" else last
    reason = next((one.row.reason for one in ends.values() if one.row.kind == outcome), stop.row.reason if stop else "")
    begin, end = begin + offset, max(begin, end) + offset
    return GenerationSpan(events, begin, end, max(1, size), hosts, outcome, offset, reference, reason)


def attribute(history: History) -> list[Segment]:
    """All segments. At any time from the first start on, their workers are all workers of the run."""
    generations, offsets = spans(history), history.offsets()
    newest, done = last_time(history, offsets), 0
    waiting = _waiting(history, generations, offsets, newest)
    begin = min((*(one.begin for one in generations), *(time for time, _ in waiting)), default=newest)
    group: list[Segment] = []
    for one in generations:
        if one.begin > begin:
            group.append(Segment(begin, one.begin, TimeCause.ABSENT, 0))
        timeline = _Timeline(one, done)
        group += timeline.segments()
        begin, done = one.end, timeline.done
    if newest > begin:
        group.append(Segment(begin, newest, TimeCause.ABSENT, 0))
    return [one for one in _with_others(group, waiting) if one.end > one.begin]


def _with_others(group: list[Segment], waiting: list[tuple[float, float]]) -> Iterator[Segment]:
    """The segments of generations (of 0 workers between them), and beside them who waits and who is absent."""
    largest, waits, changes = 0.0, 0.0, iter(waiting)
    change = next(changes, None)
    for one in group:
        largest = max(largest, one.workers)
        if one.workers:
            yield one
        begin = one.begin
        while begin < one.end or (change is not None and change[0] <= begin):
            while change is not None and change[0] <= begin:
                waits, change = max(0.0, waits + change[1]), next(changes, None)
            if begin >= one.end:
                break
            end = min(one.end, change[0]) if change is not None else one.end
            if waits:
                yield Segment(begin, end, TimeCause.WAITING, waits)
            if (absent := largest - one.workers - waits) > 0:
                yield Segment(begin, end, TimeCause.ABSENT, absent)
            begin = end


def _waiting(
    history: History, generations: Sequence[GenerationSpan], offsets: Mapping[str, float], newest: float
) -> list[tuple[float, float]]:
    """When how many workers begin (or, negative, cease) to wait: those of launchers that live and are in no generation."""
    first = {name: min(one.time for one in rows) + offsets.get(name, 0.0) for name, rows in history.launchers.items()}
    lost: dict[str, list[float]] = defaultdict(list)
    for name, rows in history.launchers.items():
        for one in rows:
            if isinstance(one.row, GenerationEndedRow) and one.row.lost:
                lost[one.row.lost].append(one.time + offsets.get(name, 0.0))
    member: dict[str, list[GenerationSpan]] = defaultdict(list)
    for span in generations:
        for name in span.events.by_launcher(GenerationRow):
            member[name].append(span)
    changes: list[tuple[float, float]] = []
    for name, rows in history.launchers.items():
        # Times from which its launcher is known to live, or to be dead.
        marks = [(one.time + offsets.get(name, 0.0), not isinstance(one.row, LauncherEndedRow)) for one in rows]
        marks += [(time, False) for time in lost[name]]
        marks += [(span.end, False) for span in member[name] if name not in span.events.by_launcher(GenerationEndedRow)]
        later = [first[one] for one in first if host_of(one) == host_of(name) and first[one] > first[name]]
        until = min((newest, *later))
        processes = _processes(rows)
        for begin, end in _without(_alive(sorted(marks), until), [(span.begin, span.end) for span in member[name]]):
            changes += [(begin, processes), (end, -processes)]
    return sorted(changes)


def host_of(launcher: str) -> str:
    """A launcher is named after its host, with a number of its own behind it."""
    return launcher.rpartition("-")[0]


def _processes(rows: Iterable[Timed[EventRow]]) -> float:
    told = [float(one.row.processes) for one in rows if isinstance(one.row, LauncherStartedRow)]
    shares = [one.row.world_size / max(1, len(one.row.hosts)) for one in rows if isinstance(one.row, GenerationRow)]
    return next(iter((*told, *shares)), 0.0)


def _alive(marks: Sequence[tuple[float, bool]], until: float) -> Iterator[tuple[float, float]]:
    since: float | None = None
    for time, alive in (*marks, (until, False)):
        if time >= until:
            break
        if alive:
            since = time if since is None else since
        elif since is not None:
            yield since, time
            since = None
    if since is not None:
        yield since, until


def _without(intervals: Iterable[tuple[float, float]], holes: Sequence[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """The parts of intervals that no hole covers; holes in order, none overlaps another."""
    for begin, end in intervals:
        since = begin
        for hole_begin, hole_end in holes:
            if hole_end <= since or hole_begin >= end:
                continue
            if hole_begin > since:
                yield since, hole_begin
            since = max(since, hole_end)
        if since < end:
            yield since, end


class _Timeline:
    """The causes of one generation, from its begin to its end."""

    def __init__(self, span: GenerationSpan, done: int) -> None:
        """`done`: the newest step that an earlier generation has done."""
        self._span = span
        self._before = self.done = done
        self._now = span.begin
        self._found: list[Segment] = []
        # What interrupted the steps: when it was recorded, why, and for how long.
        rows, shift = span.events, span.offset
        self._interruptions = deque(
            merge(
                [(one.time + shift, TimeCause.EVALUATION, one.row.seconds) for one in rows.of(EvalRow)],
                [(one.time + shift, TimeCause.SNAPSHOT, one.row.stall_s) for one in rows.of(SnapshotRow)],
            )
        )

    def segments(self) -> list[Segment]:
        self._start()
        self._steps()
        self._end()
        return self._found

    def _to(self, time: float, cause: TimeCause) -> None:
        """All until `time` has this cause."""
        end = min(time, self._span.end)
        if end > self._now:
            self._found.append(Segment(self._now, end, cause, self._span.workers, self._span.number))
            self._now = end

    def _start(self) -> None:
        events, shift = self._span.events, self._span.offset
        start, resume = events.first(StartRow), events.first(ResumeRow)
        if start is None:
            if not events.of(StepRow):
                phases = [*(one.row.phase for one in events.of(FailureRow)), *self._phases_ended()]
                self._to(self._span.end, next((_PHASES[one] for one in phases if one in _PHASES), TimeCause.STARTUP))
            return
        time, seconds = start.time + shift, start.row.seconds
        self._to(time - sum(seconds.values()), TimeCause.STARTUP)
        for name, part_s in seconds.items():
            self._to(min(time, self._now + part_s), _PHASES.get(name, TimeCause.STARTUP))
        self._to(time, TimeCause.STARTUP)
        # What ended before this took place in it.
        self._to(resume.time + shift if resume is not None else self._span.end, TimeCause.RESTORE)

    def _phases_ended(self) -> list[str]:
        return [one.row.phase for one in self._span.events.of(GenerationEndedRow)]

    def _steps(self) -> None:
        steps, shift = self._span.events.of(StepRow), self._span.offset
        parts = [self._parts(one, since + shift) for one, since in self._with_since(steps)]
        if parts:
            # The first step was done at once, and the ones after it are launched ahead.
            usual = min((useful for _, useful in parts[1 : 1 + USUAL_STEPS]), default=0.0)
            warm_up = TimeCause.COMPILE if self._span.events.of(CompiledRow) else TimeCause.WARM_UP
            others, first = parts[0]
            parts[0] = ([*others, (warm_up, max(0.0, first - usual))], min(first, usual))
        for one, (others, _) in zip(steps, parts, strict=True):
            for cause, seconds in others:
                self._to(self._now + seconds, cause)
            self._to(one.time + shift, TimeCause.USEFUL if one.row.step > self.done else TimeCause.REPEATED)
            self.done = max(self.done, one.row.step)

    def _with_since(self, steps: Sequence[Timed[StepRow]]) -> Iterator[tuple[Timed[StepRow], float]]:
        """Each step with the time of the one before; the first with the present one."""
        since = self._now - self._span.offset
        for one in steps:
            yield one, since
            since = max(since, one.time)

    def _parts(self, step: Timed[StepRow], since: float) -> tuple[list[tuple[TimeCause, float]], float]:
        """What else the time of a step was spent on, and how much of it is left for the step."""
        time = step.time + self._span.offset
        left = max(0.0, time - since)
        found = [(cause, step.row.waits.get(name, 0.0)) for name, cause in _WAITS.items()]
        while self._interruptions and self._interruptions[0][0] <= time:
            _, cause, seconds = self._interruptions.popleft()
            found.append((cause, seconds))
        parts = []
        for cause, seconds in found:
            part = min(left, max(0.0, seconds))
            parts.append((cause, part))
            left -= part
        return parts, left

    def _end(self) -> None:
        while self._interruptions:
            time, cause, seconds = self._interruptions.popleft()
            self._to(time - seconds, TimeCause.DRAIN)
            self._to(time, cause)
        self._to(self._span.end, _ENDS.get(self._span.outcome, TimeCause.UNKNOWN))
