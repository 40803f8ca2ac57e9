"""Merges the journals of finished starts. Acts.

A merge may be cut short or done twice at any point: what it makes is created if it does not exist, and a journal is deleted
only when every line of it is found there. A line that is in a journal and in a merged object is the same record.
"""

import hashlib
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from functools import partial
from itertools import count

from elastictrain.bounded_json import MalformedJsonError, parse_json
from elastictrain.errors import ObjectExistsError, ObjectNotFoundError, ObjectTooLargeError
from elastictrain.lease.merge_plan import (
    EVENTS,
    LARGE_BYTES,
    Merge,
    launcher_log,
    plan_merges,
)
from elastictrain.storage.bounded_read import read_bounded, side_by_side
from elastictrain.storage.store import Store

logger = logging.getLogger(__name__)

MERGED_BYTES = 16 << 20
"""What one merged object grows to, but for the last journal that goes into it."""

_READS = 16
"""Journals that are read at once."""

_HEAD_BYTES = 64 << 10
_GENERATION = re.compile(r"generation-([1-9]\d{0,8})")
_PART = re.compile(r"\.part-\d+\.jsonl$")

_MERGES = 64
"""A run that has many journals left is merged little by little, as merging takes time of the process that trains."""


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
    known = {_digest(line) for part in merge.parts for line in _whole_lines(_read(store, part.key))}
    numbers = count(max((part.part for part in merge.parts), default=0) + 1)
    pieces: list[bytes] = []

    def create() -> None:
        store.create(merge.key(next(numbers)), b"".join(pieces))
        known.update(map(_digest, pieces))
        pieces.clear()

    num_bytes = 0
    for lines in _journals(store, merge.sources):
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


def _journals(store: Store, keys: Sequence[str]) -> Iterator[list[bytes]]:
    """The lines of each, in their order."""
    for first in range(0, len(keys), _READS):
        for data in side_by_side([partial(_read, store, key) for key in keys[first : first + _READS]]):
            yield _whole_lines(data)


def _delete_merged(store: Store, log: Iterable[str], known: Set[bytes]) -> None:
    """Looked at once more: a journal that has grown meanwhile stays, and is merged by a later start."""
    for key in log:
        if not all(_digest(line) in known for line in _whole_lines(_read(store, key))):
            return
        store.delete(key)


def _read(store: Store, key: str) -> bytes:
    try:
        return read_bounded(store, key, most_bytes=MERGED_BYTES + LARGE_BYTES)
    except ObjectNotFoundError:
        # Whoever deleted it has merged it.
        return b""


def _whole_lines(data: bytes) -> list[bytes]:
    return [line + b"\n" for line in data.split(b"\n")[:-1] if line]


def _digest(line: bytes) -> bytes:
    return hashlib.blake2b(line, digest_size=16).digest()


def _launchers(store: Store, keys: Iterable[str]) -> dict[str, int]:
    """The generation with which each log of a launcher begins; its first object has it."""
    heads: dict[str, str] = {}
    for key in sorted(keys, reverse=True):
        if (log := launcher_log(key)) is not None:
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
