"""What the events of a run say, whatever the order in which they were read; and the reader that adds new ones."""

from collections import defaultdict
from dataclasses import dataclass, field
from statistics import median
from typing import Generic, TypeVar, cast

from elastictrain.bounded_json import MalformedJsonError
from elastictrain.errors import ObjectNotFoundError
from elastictrain.report.records import (
    EventLine,
    EventRow,
    GenerationEndedRow,
    GenerationRow,
    LauncherEndedRow,
    LauncherStartedRow,
    NoticeRow,
    launcher_of,
    parse_line,
)
from elastictrain.storage.store import Store

_CHUNK_BYTES = 8 << 20
_LEAST_OFFSET_S = 2.0  # launchers record a generation's begin within a poll of each other: less is no wrong clock

R = TypeVar("R")

OfLauncher = LauncherStartedRow | GenerationRow | GenerationEndedRow | NoticeRow | LauncherEndedRow


@dataclass(frozen=True, slots=True)
class Timed(Generic[R]):
    """A row, when it was written (Unix seconds, by the clock of its writer), and by which rank or launcher."""

    time: float
    writer: str
    row: R
    generation: int = 0


@dataclass(slots=True)
class GenerationEvents:
    """The rows of one generation, by kind."""

    number: int
    rows: dict[type[object], list[Timed[EventRow]]] = field(default_factory=lambda: defaultdict(list))

    def of(self, kind: type[R]) -> list[Timed[R]]:
        """All of one kind, by time; those of the same time by writer."""
        return sorted(cast(list[Timed[R]], self.rows.get(kind, [])), key=lambda one: (one.time, one.writer))

    def first(self, kind: type[R]) -> Timed[R] | None:
        return next(iter(self.of(kind)), None)

    def by_launcher(self, kind: type[R]) -> dict[str, Timed[R]]:
        """The last of one kind by each launcher."""
        return {one.writer: one for one in self.of(kind)}


@dataclass(slots=True)
class History:
    """The events of a run so far. The same lines make the same history, in whatever pieces they come."""

    generations: dict[int, GenerationEvents] = field(default_factory=dict)
    launchers: dict[str, list[Timed[EventRow]]] = field(default_factory=lambda: defaultdict(list))
    garbled: int = 0
    _seen: set[int] = field(default_factory=set)
    _unnamed: dict[str, str] = field(default_factory=dict)  # the launcher whose lines an object with several journals is at

    def add(self, key: str, lines: bytes) -> None:
        """Add whole lines of the object `key`, in their order."""
        for line in lines.splitlines():
            try:
                event = parse_line(line) if line.strip() else None
            except MalformedJsonError:
                self.garbled += 1
                continue
            if event is None:
                continue
            if isinstance(event.row, LauncherStartedRow):
                self._unnamed[key] = event.row.launcher
            launched = isinstance(event.row, OfLauncher)
            writer = (launcher_of(key) or self._unnamed.get(key, "launcher")) if launched else f"rank {event.rank}"
            # A merge that was interrupted leaves a line twice.
            if (digest := hash((writer, line))) not in self._seen:
                self._seen.add(digest)
                self._add(writer, event)

    def _add(self, writer: str, event: EventLine) -> None:
        if isinstance(event.row, OfLauncher):
            self.launchers[writer].append(Timed(event.time, writer, event.row, event.generation))
        if event.generation > 0:
            generation = self.generations.setdefault(event.generation, GenerationEvents(event.generation))
            generation.rows[type(event.row)].append(Timed(event.time, writer, event.row, event.generation))

    def offsets(self) -> dict[str, float]:
        """Seconds to add to the times of each launcher's host, so that clocks agree: launchers of one generation begin it
        together."""
        begins = [generation.by_launcher(GenerationRow) for _, generation in sorted(self.generations.items())]
        found: dict[str, float] = {}
        while left := [writer for one in begins for writer in one if writer not in found]:
            found[left[0]] = 0.0
            grows = True
            while grows:
                grows = False
                for new in sorted({name for one in begins if found.keys() & one.keys() for name in one if name not in found}):
                    pairs = [(one, known) for one in begins if new in one for known in one if known in found]
                    offset = median(one[known].time + found[known] - one[new].time for one, known in pairs)
                    found[new] = offset if abs(offset) > _LEAST_OFFSET_S else 0.0
                    grows = True
        return found


@dataclass(slots=True)
class EventReader:
    """Reads the events of a run as they grow."""

    store: Store
    history: History = field(default_factory=History)
    _read: dict[str, int] = field(default_factory=dict)

    def update(self) -> History:
        """Add what is new; a line that is still being written is left for later. Raises: StorageError."""
        for info in list(self.store.list("events")):
            if info.key.endswith(".jsonl"):
                self._read_object(info.key, info.size_bytes)
        return self.history

    def _read_object(self, key: str, size_bytes: int) -> None:
        while (begin := self._read.get(key, 0)) < size_bytes:
            try:
                data = self.store.read(key, start=begin, end=begin + _CHUNK_BYTES)
            except ObjectNotFoundError:
                # It was merged; the next call reads the object that has its lines.
                return
            end = data.rfind(b"\n") + 1
            if not end and len(data) < _CHUNK_BYTES:
                return
            # A line longer than a chunk is none that a writer wrote.
            self._read[key] = begin + (end or len(data))
            self.history.add(key, data[:end])
