"""What the records of a run tell of its earlier starts: how ranks ended, and what preflights found."""

import logging
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from elastictrain.bounded_json import as_record, parse_json, parse_record
from elastictrain.checkpoint.lineage import number_of
from elastictrain.errors import ObjectNotFoundError, StorageError
from elastictrain.lease.chain import StartRecord, Starts
from elastictrain.preflight.policy import STARTS, Ended, PastFindings
from elastictrain.storage.appendlog import last_part, part_key
from elastictrain.storage.bounded_read import side_by_side
from elastictrain.storage.store import Store

logger = logging.getLogger(__name__)

_READ_AT_MOST = 64
"""Records of the last incarnation: in a large group those of the first ranks tell enough."""

_READ_BYTES = 256 << 10
"""Of each log: its last record names where all ranks were, and a long run's log is long."""


@dataclass(frozen=True, slots=True)
class _End:
    """The last record of a rank that said how it ended."""

    event: Literal["failure", "stop"]
    exit_code: int


@dataclass(frozen=True, slots=True)
class _HostsPreflight:
    """The record of a preflight of hosts."""

    stage: Literal["hosts"]
    findings: list[Any]


class PastStarts:
    """Of the run in `store`, before `incarnation`. What cannot be read is not known, and said. Nothing is listed."""

    def __init__(self, store: Store, *, incarnation: str) -> None:
        self._store = store
        self._number = number_of(incarnation)

    def ended(self) -> tuple[list[Ended], int]:
        """How the ranks of the last incarnation said that they ended, and how many of them there were: of the first ones only,
        where there were many. One that was killed at once may have left no log."""
        try:
            starts = Starts(self._store).last(self._number, count=STARTS)
            if not starts:
                return [], 1
            num_ranks = min(starts[-1].world_size, _READ_AT_MOST)
            ends = side_by_side([partial(self._end_of, starts[-1], rank) for rank in range(num_ranks)])
        except StorageError as error:
            logger.warning("how the last incarnation ended cannot be read: %s", error)
            return [], 1
        return [word for rank, data in enumerate(ends) if (word := last_word(data, rank=rank)) is not None], num_ranks

    def findings(self) -> list[PastFindings]:
        """Of each earlier preflight of the hosts, the newest last."""
        try:
            starts = Starts(self._store).last(self._number, count=STARTS)
            found = side_by_side([partial(self._begin_of, start) for start in starts])
        except StorageError as error:
            logger.warning("what earlier starts found cannot be read: %s", error)
            return []
        return [one for data in found for one in findings_in(data)]

    def _end_of(self, start: StartRecord, rank: int) -> bytes:
        """The last records of a rank; the last object of a log has the last word."""
        stem = _stem(start, rank)
        key = f"{stem}.jsonl"
        try:
            size_bytes = self._store.stat(key).size_bytes
        except ObjectNotFoundError:
            number = last_part(self._store, stem)
            return self._store.read(part_key(stem, number))[-_READ_BYTES:] if number else b""
        return self._store.read(key, start=max(0, size_bytes - _READ_BYTES))

    def _begin_of(self, start: StartRecord) -> bytes:
        """The first records of rank 0: a preflight is among the first that happens."""
        stem = _stem(start, 0)
        for key in (f"{stem}.jsonl", part_key(stem, 1)):
            try:
                return self._store.read(key, end=_READ_BYTES)
            except ObjectNotFoundError:
                continue
        return b""


def _stem(start: StartRecord, rank: int) -> str:
    return f"events/{start.incarnation}-r{rank:05d}"


def last_word(data: bytes, *, rank: int) -> Ended | None:
    """How a rank ended, by the last line of its records; None if it did not say."""
    lines = data.strip().splitlines()
    try:
        return Ended(rank, parse_record(lines[-1], _End).exit_code) if lines else None
    except ValueError:
        return None


def findings_in(data: bytes) -> list[PastFindings]:
    """What the records of one incarnation tell of its preflight of hosts; lines that are no records are counted and skipped."""
    whole = data if len(data) < _READ_BYTES else data[: data.rfind(b"\n") + 1]
    found: list[PastFindings] = []
    num_skipped = 0
    for line in whole.splitlines():
        if b'"preflight"' not in line:
            continue
        try:
            row = parse_json(line)
        except ValueError:
            num_skipped += 1
            continue
        with suppress(ValueError):
            findings = as_record(row, _HostsPreflight).findings
            found.append([one for one in findings if isinstance(one, dict)])
    if num_skipped:
        logger.warning("%d lines of an earlier start's events are no records, and are skipped", num_skipped)
    return found
