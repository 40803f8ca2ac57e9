"""Merges the journals of finished starts, and reads the events of a run, merged or not. Acts.

A merge may be cut short or done twice at any point: what it makes is created if it does not exist, and a journal is deleted
only when every line of it is found there. A line that is in a journal and in a merged object is the same record.
"""

import hashlib
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Set
from functools import partial

from elastictrain.errors import ObjectExistsError, ObjectNotFoundError, ObjectTooLargeError
from elastictrain.lease.merge_plan import EVENTS, LARGE_BYTES, Merge, Merged, parse_journal, parse_merged, plan_merges
from elastictrain.storage.bounded_read import read_bounded
from elastictrain.storage.parallel import side_by_side
from elastictrain.storage.store import Store

logger = logging.getLogger(__name__)

MERGED_BYTES = 16 << 20
"""What one merged object grows to, but for the last journal that goes into it."""

_MERGES = 64
"""A run that has many journals left is merged little by little, as merging takes time of the process that trains."""


def merge_finished(store: Store, *, newest: int, now_s: float, goes_on: Callable[[], bool], most: int = _MERGES) -> None:
    """Do at most `most` merges that `plan_merges` finds, as long as `goes_on` holds. Lists the events once.

    Raises: StorageError.
    """
    for merge in plan_merges(store.list(EVENTS), newest=newest, now_s=now_s)[:most]:
        if not goes_on():
            return
        try:
            _merge(store, merge)
        except ObjectTooLargeError as error:
            logger.warning("journals of starts %d to %d are not merged: %s", merge.first, merge.last, error)
        except ObjectExistsError:
            # Another process merges: an older start that was frozen, or a newer one.
            continue


def read_events(store: Store) -> Iterator[bytes]:
    """All records of a run (without newline), each once, in reading order. Raises: StorageError.

    A record that its writer did not finish is left out.
    """
    keys = [info.key for info in store.list(EVENTS) if info.key.endswith(".jsonl")]
    merged = {key: one for key in keys if (one := parse_merged(key)) is not None}
    left = {key: cover for key in keys if (cover := _cover(key, merged.values())) is not None}
    ranges_left = set(left.values())
    there: set[bytes] = set()

    def order(key: str) -> tuple[float, bool, str]:
        cover, journal = left.get(key), parse_journal(key)
        if cover is not None:
            return cover[0], True, key
        number = merged[key].first if key in merged else journal.number if journal is not None else math.inf
        return number, False, key

    for key in sorted(keys, key=order):
        lines = _whole_lines(store.read(key))
        if key in merged and _range(merged[key]) in ranges_left:
            there.update(map(_digest, lines))
        elif key in left:
            lines = [line for line in lines if _digest(line) not in there]
        yield from (line[:-1] for line in lines)


def _merge(store: Store, merge: Merge) -> None:
    """Raises: ObjectExistsError if another process does the same; ObjectTooLargeError, StorageError."""
    known = {_digest(line) for part in merge.parts for line in _whole_lines(_read(store, part.key))}
    number = max((part.part for part in merge.parts), default=0)
    sources = list(merge.sources)
    while sources:
        batch, pieces, num_bytes = [], [], 0
        while sources and num_bytes < MERGED_BYTES:
            lines = _whole_lines(_read(store, sources[0]))
            fresh = [line for line in lines if _digest(line) not in known]
            batch.append(sources.pop(0))
            pieces += fresh
            num_bytes += sum(map(len, fresh))
        if pieces:
            number += 1
            store.create(merge.key(number), b"".join(pieces))
            known.update(map(_digest, pieces))
        side_by_side([partial(_delete_merged, store, key, known) for key in batch])


def _delete_merged(store: Store, key: str, known: Set[bytes]) -> None:
    """Looked at once more: a journal that has grown meanwhile stays, and is merged by a later start."""
    if all(_digest(line) in known for line in _whole_lines(_read(store, key))):
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


def _range(one: Merged) -> tuple[int, int, str]:
    return one.first, one.last, one.writer


def _cover(key: str, merged: Iterable[Merged]) -> tuple[int, int, str] | None:
    """The merged objects that may hold lines of a journal."""
    journal = parse_journal(key)
    if journal is None:
        return None
    covers = (_range(one) for one in merged if one.first <= journal.number <= one.last and one.writer == journal.writer)
    return next(covers, None)
