"""Whether a run whose folder holds no checkpoint has committed before. Free of torch.

Only a start that would begin at step 0 asks. It lists each folder once and reads a few objects, the newest first.
"""

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Literal

import msgspec

from elastictrain.bounded_json import MalformedJsonError, parse_record
from elastictrain.checkpoint.folders import RUN_COMMITTED_KEY
from elastictrain.checkpoint.lineage import Lineage, ResumeOrigin, number_of
from elastictrain.checkpoint.manifest import Count
from elastictrain.checkpoint.save_interval import FailureCounts
from elastictrain.errors import ObjectNotFoundError
from elastictrain.lease.merge import EVENTS, LAUNCHERS, parse_merged
from elastictrain.storage.bounded_read import read_all
from elastictrain.storage.store import ObjectInfo, Store

_LOG = re.compile(r"events/(\d{6,}-\w+)-[rk]00000(?:\.part-\d+)?\.jsonl")
_HOSTS_FOLDER = "launch/hosts"
_FOLDER_OF_STEP = re.compile(r"step-(\d{9,})")

_NEWEST, _OLDEST = 8, 2  # incarnations whose logs are read; the first of a run is the most likely to have committed

_OBJECTS = 3  # read of each log of an incarnation's first host (a bucket splits logs into objects): the first, and the newest
_LINES = 64  # host records that are read: each start of a launcher writes one, until another launcher deletes it
_READ_BYTES = 256 << 10  # at each end of an object: a log begins with the resume and ends with the last commit
_MERGED_BYTES = 32 << 20  # read of a merged log, which holds several incarnations


@dataclass(frozen=True, slots=True, order=True)
class Trace:
    """Evidence of a step that no checkpoint holds any more."""

    step: int
    where: str


@dataclass(frozen=True, slots=True)
class JobMemory:
    """What the torchrun or launcher that started this process remembers of the run."""

    incarnations: tuple[str, ...] = ()
    step: int = 0  # the newest step committed, or restored by a start; 0 if none
    snapshot_interval: int = 0  # steps between snapshots that rank 0 has learned; 0 if none
    evaluated: int = 0  # the newest step whose evaluation was completed, or tried once more; 0 if none
    failures: FailureCounts = FailureCounts()  # noqa: RUF009  # frozen


@dataclass(frozen=True, slots=True)
class InMemory:
    incarnation: str
    step: int
    host: str


def find_traces(store: Store, lineage: Lineage, *, incarnation: str) -> list[Trace]:
    """Evidence in the run folder of commits before `incarnation`, newest first. Raises: StorageError."""
    newest = lineage.newest()
    found = [_of_logs(store, incarnation=incarnation), _of_launchers(store, newest)]
    with suppress(ObjectNotFoundError):
        mark = store.read(RUN_COMMITTED_KEY, end=_READ_BYTES)
        found.append(Trace(step_of_mark(mark), f"{store.url}/{RUN_COMMITTED_KEY}"))
    if newest is not None and newest.step > 0:
        found.append(Trace(newest.step, f"the lineage of {newest.incarnation}"))
    return sorted((trace for trace in found if trace is not None), reverse=True)


def of_memory(held: Iterable[InMemory], *, known: Iterable[str]) -> list[Trace]:
    """The newest snapshot on each host of an incarnation that the run folder does not know, but once did. Pure."""
    newest: dict[str, int] = {}
    there = frozenset(known)
    for one in held:
        if one.incarnation not in there and one.step > 0:
            newest[one.host] = max(one.step, newest.get(one.host, 0))
    return sorted((Trace(step, f"the memory of host {host}") for host, step in newest.items()), reverse=True)


def lost_message(traces: Iterable[Trace], *, url: str) -> str:
    lines = "\n".join(f"  - {trace.where} knows of step {trace.step}" for trace in traces)
    return (
        f"{url} holds no checkpoint, but the run is not new:\n{lines}\n"
        "Put the checkpoints back, from a backup or by mounting the storage that has them; or start over from step 0 with "
        "`checkpoint.on_invalid=fresh`."
    )


@dataclass(frozen=True, slots=True)
class _Mark:
    checkpoint: str = ""
    step: int = 0


def step_of_mark(data: bytes) -> int:
    """The step that a commit marker names; 0 if none. Pure."""
    try:
        mark = parse_record(data, _Mark)
    except MalformedJsonError:
        return 0
    match = _FOLDER_OF_STEP.match(mark.checkpoint)
    return int(match[1]) if match is not None else mark.step


@dataclass(frozen=True, slots=True)
class LogRow:
    event: Literal["checkpoint_saved", "resume"]
    step: Count
    incarnation: str = ""
    rank: int | None = None


def read_log(pieces: Iterable[bytes]) -> Iterator[LogRow]:
    """Commits and resumes in pieces of logs, whose first and last lines may be cut. Pure."""
    for piece in pieces:
        for line in piece.splitlines():
            if b'"checkpoint_saved"' in line or b'"resume"' in line:
                with suppress(MalformedJsonError):
                    yield parse_record(line, LogRow)


def _of_logs(store: Store, *, incarnation: str) -> Trace | None:
    units = _units(store, incarnation=incarnation)
    looked_at = 0
    while units:
        unit = units.pop(0)
        incarnations: dict[str, list[LogRow]] = {name: [] for name in unit if name != _MERGED}
        for name, infos in unit.items():
            for row in read_log(_pieces(store, infos, merged=name == _MERGED)):
                # A merged log has the rows of several incarnations and ranks.
                if name != _MERGED or row.rank == 0:
                    incarnations.setdefault(row.incarnation if name == _MERGED else name, []).append(row)
        for name, rows in sorted(incarnations.items(), reverse=True):
            # A resume from memory counts, too: had the run never committed, `begun.json` would still exist.
            if (step := max((row.step for row in rows), default=0)) > 0:
                return Trace(step, f"{store.url}/events of {name}")
            if looked_at < _NEWEST and any(row.event == "resume" for row in rows):
                # The run started from step 0 there and has committed nothing since: older commits were given up.
                return None
        looked_at += max(1, len(incarnations))
        if looked_at >= _NEWEST:
            del units[:-_OLDEST]
    return None


_MERGED = ""  # in the place of an incarnation's name: logs of several incarnations, merged


def _units(store: Store, *, incarnation: str) -> list[dict[str, list[ObjectInfo]]]:
    """Logs of the first hosts by incarnation, newest first; incarnations that were merged together share a unit."""
    logs: dict[str, list[ObjectInfo]] = {}
    merged: dict[tuple[int, int], list[ObjectInfo]] = {}
    for info in store.list(EVENTS):
        if (one := parse_merged(info.key)) is not None:
            if one.writer != LAUNCHERS:
                merged.setdefault((one.first, one.last), []).append(info)
        elif (match := _LOG.fullmatch(info.key)) is not None and match[1] != incarnation:
            logs.setdefault(match[1], []).append(info)
    units = {(last, f"{last}"): {_MERGED: infos} for (_, last), infos in merged.items()}
    for name, infos in logs.items():
        number = number_of(name)
        cover = next((last for first, last in merged if first <= number <= last), None)
        order = (number, name) if cover is None else (cover, f"{cover}")
        units.setdefault(order, {})[name] = infos
    return [units[order] for order in sorted(units, reverse=True)]


def _pieces(store: Store, log: list[ObjectInfo], *, merged: bool) -> Iterator[bytes]:
    """Both ends of the logs of rank 0 and of its host's saver; merged logs as a whole, up to `_MERGED_BYTES`."""
    by_writer: dict[str, list[ObjectInfo]] = {}
    for info in log:
        by_writer.setdefault(info.key.partition(".")[0], []).append(info)
    few = (info for infos in by_writer.values() for info in dict.fromkeys((*infos[:1], *infos[1:][-(_OBJECTS - 1) :])))
    size_bytes = _MERGED_BYTES if merged else _READ_BYTES
    for info in log if merged else few:
        with suppress(ObjectNotFoundError):
            yield store.read(info.key, end=size_bytes)
            if info.size_bytes > size_bytes and not merged:
                yield store.read(info.key, start=max(size_bytes, info.size_bytes - size_bytes), end=info.size_bytes)


class _Ended(msgspec.Struct, frozen=True):
    """The ends of generations in a host record; `end` is that of the newest one."""

    generation: int = -1
    ended: int = -1
    committed_step: int = 0
    end: "_Ended | None" = None


def _of_launchers(store: Store, newest: ResumeOrigin | None) -> Trace | None:
    """The newest commit in host records, of generations from the newest lineage record on."""
    first = newest.generation if newest is not None else 0
    keys = [info.key for info in islice(store.list(_HOSTS_FOLDER), _LINES) if info.key.endswith(".json")]
    traces = []
    for key, data in read_all(store, keys).items():
        with suppress(MalformedJsonError):
            line = parse_record(data, _Ended)
            ends = [(line.ended, line.committed_step)]
            ends += [(line.end.generation, line.end.committed_step)] if line.end is not None else []
            traces += [Trace(step, f"{store.url}/{key}") for number, step in ends if number >= first and step > 0]
    return max(traces, default=None)
