"""What the records of a run tell of its earlier starts: how ranks ended, and what preflights found."""

import logging
import re
from collections.abc import Iterable, Sequence
from typing import Any

from elastictrain.bounded_json import parse_json
from elastictrain.errors import StorageError
from elastictrain.preflight.history import STARTS, Findings
from elastictrain.preflight.policy import Ended
from elastictrain.storage.store import ObjectInfo, Store

logger = logging.getLogger(__name__)

_LOG = re.compile(r"events/(\d+-\w+)-r(\d+)(?:\.part-\d+)?\.jsonl")
_READ_AT_MOST = 64
"""Records of the last incarnation: in a large group those of the first ranks tell enough."""

_READ_BYTES = 256 << 10
"""Of each log: its last record names the whereabouts of all ranks, and a long run's log is long."""

_START_AMONG = 8
"""A log in a bucket grows by objects; the start of a run is in one of the first."""


class PastStarts:
    """Of the run in `store`, before `incarnation`. What cannot be read is not known, and said."""

    def __init__(self, store: Store, *, incarnation: str) -> None:
        self._store = store
        self._incarnation = incarnation

    def ended(self) -> tuple[list[Ended], int]:
        """How the ranks of the last incarnation said that they ended, and how many of them there were: of the first ones only,
        where there were many. One that was killed at once may have left no log."""
        try:
            starts = self._starts()
            logs = starts[max(starts)] if starts else {}
            first = dict(sorted(logs.items())[:_READ_AT_MOST])
            # The last object of a log has the last word.
            words = [last_word(self._end_of(objects[-1]), rank=rank) for rank, objects in first.items()]
            world_size = self._world_size(logs.get(0, [])) or len(first)
        except StorageError as error:
            logger.warning("how the last incarnation ended cannot be read: %s", error)
            return [], 1
        return [word for word in words if word is not None], min(world_size, _READ_AT_MOST)

    def findings(self) -> list[Findings]:
        """Of each earlier preflight of the hosts, the newest last."""
        found: list[Findings] = []
        try:
            for _, logs in sorted(self._starts().items())[-STARTS:]:
                # A preflight is among the first that happens.
                found += findings_in(self._store.read(logs[0][0].key, end=_READ_BYTES)) if 0 in logs else []
        except StorageError as error:
            logger.warning("what earlier starts found cannot be read: %s", error)
        return found

    def _starts(self) -> dict[str, dict[int, list[ObjectInfo]]]:
        """By incarnation and rank: the objects of its log, in their order."""
        starts: dict[str, dict[int, list[ObjectInfo]]] = {}
        for info in sorted(self._store.list("events"), key=lambda info: info.key):
            match = _LOG.fullmatch(info.key)
            if match is not None and match[1] != self._incarnation:
                starts.setdefault(match[1], {}).setdefault(int(match[2]), []).append(info)
        return starts

    def _end_of(self, log: ObjectInfo) -> bytes:
        return self._store.read(log.key, start=max(0, log.size_bytes - _READ_BYTES))

    def _world_size(self, logs: Sequence[ObjectInfo]) -> int | None:
        """As rank 0 wrote it into its log when all had come up; None if they had not."""
        for log in logs[:_START_AMONG]:
            if (found := world_size_in(self._store.read(log.key, end=_READ_BYTES))) is not None:
                return found
        return None


def last_word(data: bytes, *, rank: int) -> Ended | None:
    """How a rank ended, by the last line of its records; None if it did not say."""
    lines = data.decode(errors="replace").strip().splitlines()
    rows, _ = _rows(lines[-1:])
    if not rows or rows[0].get("event") not in ("failure", "stop"):
        return None
    code = rows[0].get("exit_code")
    return Ended(rank, code) if isinstance(code, int) else None


def world_size_in(data: bytes) -> int | None:
    """Of the group whose start is among these records."""
    rows, _ = _rows(line for line in data.splitlines() if b'"start"' in line)
    for row in rows:
        if row.get("event") == "start" and isinstance(row.get("world_size"), int):
            return int(row["world_size"])
    return None


def findings_in(data: bytes) -> list[Findings]:
    """What the records of one incarnation tell of its preflight of hosts; lines that are no records are counted and skipped."""
    whole = data if len(data) < _READ_BYTES else data[: data.rfind(b"\n") + 1]
    rows, num_skipped = _rows(line for line in whole.splitlines() if b'"preflight"' in line)
    if num_skipped:
        logger.warning("%d lines of an earlier start's events are no records, and are skipped", num_skipped)
    return [
        [one for one in row["findings"] if isinstance(one, dict)]
        for row in rows
        if row.get("stage") == "hosts" and isinstance(row.get("findings"), list)
    ]


def _rows(lines: Iterable[bytes | str]) -> tuple[list[dict[str, Any]], int]:
    """The records in lines of a log, and how many lines are none."""
    rows, num_skipped = [], 0
    for line in lines:
        try:
            row = parse_json(line)
        except ValueError:
            row = None
        if isinstance(row, dict):
            rows.append(row)
        else:
            num_skipped += 1
    return rows, num_skipped
