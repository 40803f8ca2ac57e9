"""Journals of finished starts are merged: what `plan_merges` decides, `merge_finished` does.

Each process of each start has a journal of its own. Those of finished starts are merged into few objects that hold the same
lines in the same order: `events/000001-to-000064.part-00001-r00000.jsonl` what the first ranks of starts 1 to 64 wrote,
`events/000001-to-000064.part-00001-others.jsonl` what all others wrote. Name order stays reading order. Launchers have journals
of their own, `events/launcher-HOST.jsonl`, which belong to the generation that their first record names:
`events/000001-to-000064.part-00001-launchers.jsonl`.

A merge may be cut short or done twice at any point: what it makes is created if it does not exist, and a journal is deleted
only when every line of it is found there. A line that is in a journal and in a merged object is the same record.
"""

import hashlib
import logging
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from itertools import count, groupby

from elastictrain.bounded_json import MalformedJsonError, parse_json
from elastictrain.errors import ObjectExistsError, ObjectNotFoundError, ObjectTooLargeError
from elastictrain.storage.bounded_read import read_bounded, side_by_side
from elastictrain.storage.store import ObjectInfo, Store

logger = logging.getLogger(__name__)

EVENTS = "events"
FIRST_RANK, OTHERS, LAUNCHERS = "r00000", "others", "launchers"

BLOCK = 64  # starts whose journals are merged together
KEPT_STARTS = 64  # the newest starts keep their journals: they are looked for by name

FINISHED_S = 24 * 3600.0
"""A journal that was not written to for so long has no writer any more; a saver holds state for half of this time at most."""

LARGE_BYTES = 4 << 20  # a log of this size stays as it is
_JOURNAL = re.compile(rf"({EVENTS}/(\d{{6,}})-\w+-([a-z]\d{{5,}}))(?:\.part-\d+)?\.jsonl")
_MERGED = re.compile(rf"{EVENTS}/(\d{{6,}})-to-(\d{{6,}})\.part-(\d{{5,}})-({FIRST_RANK}|{OTHERS}|{LAUNCHERS})\.jsonl")
_LAUNCHER = re.compile(rf"({EVENTS}/launcher-[^/]+?)(?:\.part-\d+)?\.jsonl")
_HEAD_BYTES = 64 << 10
_GENERATION = re.compile(r"generation-([1-9]\d{0,8})")
_PART = re.compile(r"\.part-\d+\.jsonl$")

MERGED_BYTES = 16 << 20  # what one merged object grows to, but for the last journal that goes into it
_READS = 16

_MERGES = 64  # a run that has many journals left is merged little by little, as merging takes time of the process that trains


@dataclass(frozen=True, slots=True)
class JournalObject:
    """One object of a journal that is not merged."""

    info: ObjectInfo
    number: int
    log: str  # the same for all objects of one journal
    writer: str


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


def _launcher_log(key: str) -> str | None:
    """The same for all objects of a launcher's journal; None if this is none."""
    match = _LAUNCHER.fullmatch(key)
    return match[1] if match is not None else None


def _parse_journal(info: ObjectInfo, *, launchers: Mapping[str, int]) -> JournalObject | None:
    """None if this is no journal. `launchers` are the generations with which logs of launchers begin."""
    if (log := _launcher_log(info.key)) is not None:
        return JournalObject(info, launchers[log], log, LAUNCHERS) if log in launchers else None
    match = _JOURNAL.fullmatch(info.key)
    if match is None:
        return None
    return JournalObject(info, int(match[2]), match[1], FIRST_RANK if match[3] == FIRST_RANK else OTHERS)


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
    # A launcher may live long after the start that it began with: nobody else's journals wait for it.
    journals: dict[tuple[int, bool], list[JournalObject]] = defaultdict(list)
    merged: dict[tuple[int, bool], list[Merged]] = defaultdict(list)
    for info in infos:
        if (one := parse_merged(info.key)) is not None:
            merged[_block(one.first), one.writer == LAUNCHERS].append(one)
        elif (journal := _parse_journal(info, launchers=launchers)) is not None:
            journals[_block(journal.number), journal.writer == LAUNCHERS].append(journal)
    merges: list[Merge] = []
    for block in sorted(journals):
        finished = all(journal.info.modified <= now_s - FINISHED_S for journal in journals[block])
        if finished and (block[0] + 1) * BLOCK <= newest - KEPT_STARTS:
            merges += _plan_block(journals[block], merged[block])
    return merges


def _block(number: int) -> int:
    return (number - 1) // BLOCK


def _plan_block(journals: Sequence[JournalObject], merged: Sequence[Merged]) -> list[Merge]:
    total_bytes = Counter[str]()
    for one in journals:
        total_bytes[one.log] += one.info.size_bytes
    large = {one.number for one in journals if total_bytes[one.log] >= LARGE_BYTES}
    small = sorted((one for one in journals if total_bytes[one.log] < LARGE_BYTES), key=lambda one: (one.number, one.info.key))
    merges = []
    for first, last in _ranges({one.number for one in journals}, large=large, merged=merged):
        for writer in sorted({one.writer for one in small}):
            sources = tuple(one.info.key for one in small if first <= one.number <= last and one.writer == writer)
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


def merge_finished(store: Store, *, newest: int, now_s: float, goes_on: Callable[[], bool], most: int = _MERGES) -> None:
    """Do at most `most` merges that `plan_merges` finds, as long as `goes_on` holds. Lists the events once.

    Raises: StorageError.
    """
    infos = list(store.list(EVENTS))
    launchers = _launchers(store, (info.key for info in infos))
    for merge in plan_merges(infos, launchers=launchers, newest=newest, now_s=now_s)[:most]:
        if not goes_on():
            return
        try:
            _merge(store, merge)
        except ObjectTooLargeError as error:
            logger.warning("journals of starts %d to %d are not merged: %s", merge.first, merge.last, error)
        except ObjectExistsError:
            # Another process merges: an older start that was frozen, or a newer one.
            continue


def _merge(store: Store, merge: Merge) -> None:
    """Raises: ObjectExistsError if another process does the same; ObjectTooLargeError, StorageError."""
    known = {_digest(line) for part in merge.parts for line in _read_lines(store, part.key)}
    numbers = count(max((part.part for part in merge.parts), default=0) + 1)
    pieces: list[bytes] = []

    def create() -> None:
        store.create(merge.key(next(numbers)), b"".join(pieces))
        known.update(map(_digest, pieces))
        pieces.clear()

    num_bytes = 0
    for first in range(0, len(merge.sources), _READS):
        journals = side_by_side([partial(_read_lines, store, key) for key in merge.sources[first : first + _READS]])
        for lines in journals:
            fresh = [line for line in lines if _digest(line) not in known]
            pieces += fresh
            num_bytes += sum(map(len, fresh))
            if num_bytes >= MERGED_BYTES:
                create()
                num_bytes = 0
    if pieces:
        create()
    # Only when all is there: the beginning of a launcher's log tells where the log belongs, and goes last.
    logs: dict[str, list[str]] = {}
    for key in merge.sources:
        logs.setdefault(_PART.sub("", key), []).insert(0, key)
    side_by_side([partial(_delete_merged, store, log, known) for log in logs.values()])


def _delete_merged(store: Store, log: Iterable[str], known: Set[bytes]) -> None:
    """Looked at once more: a journal that has grown meanwhile stays, and is merged by a later start."""
    for key in log:
        if not all(_digest(line) in known for line in _read_lines(store, key)):
            return
        store.delete(key)


def _read_lines(store: Store, key: str) -> list[bytes]:
    try:
        return _whole_lines(read_bounded(store, key, most_bytes=MERGED_BYTES + LARGE_BYTES))
    except ObjectNotFoundError:
        # Whoever deleted it has merged it.
        return []


def _whole_lines(data: bytes) -> list[bytes]:
    return [line + b"\n" for line in data.split(b"\n")[:-1] if line]


def _digest(line: bytes) -> bytes:
    return hashlib.blake2b(line, digest_size=16).digest()


def _launchers(store: Store, keys: Iterable[str]) -> dict[str, int]:
    """The generation with which each log of a launcher begins; its first object has it."""
    heads: dict[str, str] = {}
    for key in sorted(keys, reverse=True):
        if (log := _launcher_log(key)) is not None:
            heads[log] = key
    numbers = side_by_side([partial(_first_generation, store, key) for key in heads.values()])
    return {log: number for log, number in zip(heads, numbers, strict=True) if number is not None}


def _first_generation(store: Store, key: str) -> int | None:
    try:
        lines = _whole_lines(store.read(key, end=_HEAD_BYTES))
    except ObjectNotFoundError:
        return None
    for line in lines:
        try:
            row = parse_json(line)
        except MalformedJsonError:
            continue
        if isinstance(row, dict) and (match := _GENERATION.fullmatch(str(row.get("incarnation")))):
            return int(match[1])
    return None
