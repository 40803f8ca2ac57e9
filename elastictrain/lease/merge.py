"""Merges the journals of finished starts: `plan_merges` decides, `merge_finished` acts.

Each process of each start has its own journal. Those of finished starts are merged into few objects with the same lines in the
same order: `events/000001-to-000064.part-00001-r00000.jsonl` holds what the first ranks of starts 1 to 64 wrote,
`events/000001-to-000064.part-00001-others.jsonl` what all others wrote. Name order stays reading order. A launcher's journal,
`events/launcher-HOST.jsonl`, belongs to the generation of its first record:
`events/000001-to-000064.part-00001-launchers.jsonl`.

A merge may be interrupted or repeated at any point: its objects are created if they do not exist, and a journal is deleted only
once they hold all its lines. A line that is in a journal and in a merged object is the same record.
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
from elastictrain.storage.bounded_read import read_bounded, run_concurrently
from elastictrain.storage.store import ObjectInfo, Store

logger = logging.getLogger(__name__)

EVENTS = "events"
FIRST_RANK, OTHERS, LAUNCHERS = "r00000", "others", "launchers"

BLOCK = 64  # starts whose journals are merged together
KEPT_STARTS = 64  # the newest starts keep their journals: readers look for them by name
FINISHED_S = 24 * 3600.0  # a journal silent for so long has no writer; a saver holds state for half of this time at most
LARGE_BYTES = 4 << 20  # a journal of this size is not merged
_JOURNAL = re.compile(rf"({EVENTS}/(\d{{6,}})-\w+-([a-z]\d{{5,}}))(?:\.part-\d+)?\.jsonl")
_MERGED = re.compile(rf"{EVENTS}/(\d{{6,}})-to-(\d{{6,}})\.part-(\d{{5,}})-({FIRST_RANK}|{OTHERS}|{LAUNCHERS})\.jsonl")
# Its group is the name that all objects of one launcher's journal share.
_LAUNCHER = re.compile(rf"({EVENTS}/launcher-[^/]+?)(?:\.part-\d+)?\.jsonl")
_HEAD_BYTES = 64 << 10
_GENERATION = re.compile(r"generation-([1-9]\d{0,8})")
_PART = re.compile(r"\.part-\d+\.jsonl$")

MERGED_BYTES = 16 << 20  # size at which a merged object ends, with the journal that reaches it
_READS = 16
_MERGES = 64  # many journals are merged by many starts, because merging takes time of the process that trains


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
    """Journals to merge, and objects that hold some of their lines already, from an earlier merge that was interrupted."""

    first: int
    last: int
    writer: str
    parts: tuple[Merged, ...]
    sources: tuple[str, ...]

    def key(self, part: int) -> str:
        return f"{EVENTS}/{self.first:06d}-to-{self.last:06d}.part-{part:05d}-{self.writer}.jsonl"


def parse_merged(key: str) -> Merged | None:
    """None if this is no merged object of one block."""
    match = _MERGED.fullmatch(key)
    if match is None or _block(int(match[1])) != _block(int(match[2])):
        return None
    return Merged(key, int(match[1]), int(match[2]), int(match[3]), match[4])


def plan_merges(infos: Iterable[ObjectInfo], *, launchers: Mapping[str, int], newest: int, now_s: float) -> list[Merge]:
    """What can be merged, oldest first. `newest` is the newest start's number, `now_s` the time by the storage's clock.

    `launchers`: the first generation of each launcher's journal; a journal without a record is missing there.
    A block of starts is merged when `KEPT_STARTS` others have followed it and none of its journals was written to for
    `FINISHED_S`: until then a process may still append.
    """
    # A launcher may live long after the start that it began with: journals of other processes do not wait for its journal.
    journals: dict[tuple[int, bool], list[JournalObject]] = defaultdict(list)
    merged: dict[tuple[int, bool], list[Merged]] = defaultdict(list)
    for info in infos:
        if (one := parse_merged(info.key)) is not None:
            merged[_block(one.first), one.writer == LAUNCHERS].append(one)
        elif (match := _LAUNCHER.fullmatch(info.key)) is not None:
            if (number := launchers.get(match[1])) is not None:
                journals[_block(number), True].append(JournalObject(info, number, match[1], LAUNCHERS))
        elif (match := _JOURNAL.fullmatch(info.key)) is not None:
            number, writer = int(match[2]), FIRST_RANK if match[3] == FIRST_RANK else OTHERS
            journals[_block(number), False].append(JournalObject(info, number, match[1], writer))
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
    """Ranges of earlier merges, those between them, and each start with a large journal as a range of its own."""
    ranges = {(one.first, one.last) for one in merged}

    def place(number: int) -> tuple[int, int] | int:
        """The earlier range that holds it, a range of its own if it is large, or how many borders lie before it."""
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
    """Do at most `most` merges of `plan_merges`, while `goes_on` returns true. Lists the events once. Raises: StorageError."""
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
            # Another process merges too: an older start that was frozen, or a newer one.
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
        journals = run_concurrently([partial(_read_lines, store, key) for key in merge.sources[first : first + _READS]])
        for lines in journals:
            fresh = [line for line in lines if _digest(line) not in known]
            pieces += fresh
            num_bytes += sum(map(len, fresh))
            if num_bytes >= MERGED_BYTES:
                create()
                num_bytes = 0
    if pieces:
        create()
    # Only when all lines are stored. The beginning of a launcher's journal shows where it belongs, and is deleted last.
    logs: dict[str, list[str]] = {}
    for key in merge.sources:
        logs.setdefault(_PART.sub("", key), []).insert(0, key)
    run_concurrently([partial(_delete_merged, store, log, known) for log in logs.values()])


def _delete_merged(store: Store, log: Iterable[str], known: Set[bytes]) -> None:
    """Read again before deleting: a journal that has grown meanwhile stays, and a later start merges it."""
    for key in log:
        if not all(_digest(line) in known for line in _read_lines(store, key)):
            return
        store.delete(key)


def _read_lines(store: Store, key: str) -> list[bytes]:
    try:
        return _whole_lines(read_bounded(store, key, max_bytes=MERGED_BYTES + LARGE_BYTES))
    except ObjectNotFoundError:
        # The process that deleted it has merged it.
        return []


def _whole_lines(data: bytes) -> list[bytes]:
    return [line + b"\n" for line in data.split(b"\n")[:-1] if line]


def _digest(line: bytes) -> bytes:
    return hashlib.blake2b(line, digest_size=16).digest()


def _launchers(store: Store, keys: Iterable[str]) -> dict[str, int]:
    """The first generation of each launcher's journal, from the first object of the journal."""
    heads: dict[str, str] = {}
    for key in sorted(keys, reverse=True):
        if (match := _LAUNCHER.fullmatch(key)) is not None:
            heads[match[1]] = key
    numbers = run_concurrently([partial(_first_generation, store, key) for key in heads.values()])
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
