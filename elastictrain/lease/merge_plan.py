"""Which journals of events are merged, and into what. Pure.

Each process of each start has a journal of its own. Those of finished starts are merged into few objects that hold the same
lines in the same order: `events/000001-to-000064.part-00001-r00000.jsonl` what the first ranks of starts 1 to 64 wrote,
`events/000001-to-000064.part-00001-others.jsonl` what all others wrote. Name order stays reading order.

Launchers have journals of their own, `events/launcher-HOST.jsonl`, which belong to the generation that their first record
names: `events/000001-to-000064.part-00001-launchers.jsonl`.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from elastictrain.storage.store import ObjectInfo

EVENTS = "events"
FIRST_RANK, OTHERS, LAUNCHERS = "r00000", "others", "launchers"

_TOGETHER = ((FIRST_RANK, OTHERS), (LAUNCHERS,))
"""A launcher may live long after the start that it began with: nobody else's journals wait for it."""

BLOCK = 64
"""Starts whose journals are merged together."""

KEPT_STARTS = 64
"""The newest starts keep their journals: they are looked for by name."""

FINISHED_S = 24 * 3600.0
"""A journal that was not written to for so long has no writer any more; a saver holds state for half of this time at most."""

LARGE_BYTES = 4 << 20
"""A log of this size stays as it is."""

_JOURNAL = re.compile(rf"({EVENTS}/(\d{{6,}})-\w+-([a-z]\d{{5,}}))(?:\.part-\d+)?\.jsonl")
_MERGED = re.compile(rf"{EVENTS}/(\d{{6,}})-to-(\d{{6,}})\.part-(\d{{5,}})-({FIRST_RANK}|{OTHERS}|{LAUNCHERS})\.jsonl")
_LAUNCHER = re.compile(rf"({EVENTS}/launcher-[^/]+?)(?:\.part-\d+)?\.jsonl")


@dataclass(frozen=True, slots=True)
class JournalObject:
    """One object of a journal that is not merged."""

    key: str
    number: int
    """Of its start."""

    log: str
    """The same for all objects of one journal."""

    writer: str
    """`r00000`, `others` or `launchers`."""


@dataclass(frozen=True, slots=True)
class Merged:
    """One object that holds the journals of several starts."""

    key: str
    first: int
    last: int
    part: int
    writer: str


@dataclass(frozen=True, slots=True)
class Merge:
    """Journals to merge, and the objects that hold some of their lines already: an earlier merge may have been cut short."""

    first: int
    last: int
    writer: str
    parts: tuple[Merged, ...]
    sources: tuple[str, ...]

    def key(self, part: int) -> str:
        """Of one of the objects that it makes."""
        return f"{EVENTS}/{self.first:06d}-to-{self.last:06d}.part-{part:05d}-{self.writer}.jsonl"


def launcher_log(key: str) -> str | None:
    """The same for all objects of a launcher's journal; None if this is none."""
    match = _LAUNCHER.fullmatch(key)
    return match[1] if match is not None else None


def parse_journal(key: str, *, launchers: Mapping[str, int]) -> JournalObject | None:
    """None if this is no journal. `launchers` are the generations with which logs of launchers begin."""
    if (log := launcher_log(key)) is not None:
        return JournalObject(key, launchers[log], log, LAUNCHERS) if log in launchers else None
    match = _JOURNAL.fullmatch(key)
    if match is None:
        return None
    return JournalObject(key, int(match[2]), match[1], FIRST_RANK if match[3] == FIRST_RANK else OTHERS)


def parse_merged(key: str) -> Merged | None:
    """None if this is no merged object: those are of one block."""
    match = _MERGED.fullmatch(key)
    if match is None or _block(int(match[1])) != _block(int(match[2])):
        return None
    return Merged(key, int(match[1]), int(match[2]), int(match[3]), match[4])


def plan_merges(infos: Iterable[ObjectInfo], *, launchers: Mapping[str, int], newest: int, now_s: float) -> list[Merge]:
    """What can be merged, oldest first. `newest` is the number of the newest start, `now_s` the time by the storage's clock.

    `launchers` are the generations with which logs of launchers begin; one that is not there has no record yet.

    A block of starts is merged when `KEPT_STARTS` others have followed it and none of its journals was written to for
    `FINISHED_S`: until then it may still be appended to.
    """
    merged: list[Merged] = []
    blocks: dict[tuple[int, tuple[str, ...]], list[tuple[JournalObject, ObjectInfo]]] = {}
    for info in infos:
        if (one := parse_merged(info.key)) is not None:
            merged.append(one)
        elif (journal := parse_journal(info.key, launchers=launchers)) is not None:
            blocks.setdefault((_block(journal.number), _together(journal.writer)), []).append((journal, info))
    merges: list[Merge] = []
    for (block, writers), journals in sorted(blocks.items(), key=lambda pair: pair[0]):
        finished = all(info.modified <= now_s - FINISHED_S for _, info in journals)
        if finished and (block + 1) * BLOCK <= newest - KEPT_STARTS:
            merges += _plan_block(journals, [one for one in merged if _block(one.first) == block and one.writer in writers])
    return merges


def _together(writer: str) -> tuple[str, ...]:
    return next(writers for writers in _TOGETHER if writer in writers)


def _block(number: int) -> int:
    return (number - 1) // BLOCK


def _plan_block(journals: Sequence[tuple[JournalObject, ObjectInfo]], merged: Sequence[Merged]) -> list[Merge]:
    total_bytes: dict[str, int] = {}
    for journal, info in journals:
        total_bytes[journal.log] = total_bytes.get(journal.log, 0) + info.size_bytes
    large = {journal.number for journal, _ in journals if total_bytes[journal.log] >= LARGE_BYTES}
    small = sorted((one for one, _ in journals if total_bytes[one.log] < LARGE_BYTES), key=lambda one: (one.number, one.key))
    merges = []
    for first, last in _ranges({one.number for one, _ in journals}, large=large, merged=merged):
        for writer in sorted({one.writer for one in small}):
            sources = tuple(one.key for one in small if first <= one.number <= last and one.writer == writer)
            parts = tuple(one for one in merged if (one.first, one.last, one.writer) == (first, last, writer))
            if len(sources) > 1 or (sources and parts):
                merges.append(Merge(first, last, writer, parts, sources))
    return merges


def _ranges(numbers: Iterable[int], *, large: set[int], merged: Sequence[Merged]) -> list[tuple[int, int]]:
    """Those of earlier merges, and what lies between them and the starts with a large log, which are ranges of their own."""
    ranges = {(one.first, one.last) for one in merged}

    def place(number: int) -> tuple[int, int] | int:
        """The earlier range that it is in, itself if it is alone, or how many borders lie before it."""
        earlier = next((one for one in sorted(ranges) if one[0] <= number <= one[1]), None)
        if earlier is not None:
            return earlier
        if number in large:
            return (number, number)
        return sum(first < number for first, _ in ranges) + sum(one < number for one in large)

    found = []
    for where, group in groupby(sorted(numbers), key=place):
        together = list(group)
        found.append(where if isinstance(where, tuple) else (together[0], together[-1]))
    return sorted(set(found))
