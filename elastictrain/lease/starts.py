"""The starts of a run by their numbers: nothing has to be listed to find one. Acts.

Records of starts and generations are kept for the last `KEPT` numbers: each start removes what falls behind. What
happened before is in the events, whose journals are merged.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

from elastictrain.bounded_json import encode_record, parse_record
from elastictrain.lease.chain import LINEAGE, generation_key
from elastictrain.lease.merge import KEPT_STARTS, merge_finished
from elastictrain.storage.bounded_read import exists, read_all, side_by_side
from elastictrain.storage.store import Store

STARTS = "launch/starts"
KEPT = 1000
_AT_ONCE = 16
"""Numbers that one start removes at most: a run that has many of them left is trimmed little by little."""

_LINEAGE_EVERY = 16
"""The lineage is named after incarnations, and has to be listed: not by each start."""

LINEAGE_KEPT = 960
"""With what comes until it is trimmed again, one page of a list of an object store."""

_MERGE_EVERY = 16
"""So are the events: not by each start, and by none before it trains."""

_NUMBER = re.compile(r"(\d{6,})-\w+")


@dataclass(frozen=True, slots=True)
class StartRecord:
    """One incarnation of the run, from the moment that its ranks had met."""

    number: int
    incarnation: str
    world_size: int


class Starts:
    """Of one run. Every method raises StorageError."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def write(self, start: StartRecord) -> None:
        """Note that a start's ranks have met."""
        self._store.write(_key(start.number), encode_record(start))

    def last(self, before: int, *, count: int) -> list[StartRecord]:
        """Those among the `count` numbers before `before` whose ranks had met, the newest last."""
        numbers = {_key(number): number for number in range(max(1, before - count), before)}
        found = read_all(self._store, numbers)
        starts = (_parse(numbers[key], data) for key, data in found.items())
        return sorted((start for start in starts if start is not None), key=lambda start: start.number)

    def known(self, incarnations: Iterable[str]) -> list[str]:
        """Those that belong to this run: they have left a trace in its folder, by whatever release."""
        names = sorted(set(incarnations))
        traces = {key: name for name in names for key in _traces(name)}
        found = side_by_side([partial(exists, self._store, key) for key in traces])
        there = {name for name, is_there in zip(traces.values(), found, strict=True) if is_there}
        numbers = {name: int(match[1]) for name in names if (match := _NUMBER.fullmatch(name))}
        records = read_all(self._store, {_key(number) for number in numbers.values()})
        for name, number in numbers.items():
            start = _parse(number, records.get(_key(number), b""))
            if start is not None and start.incarnation == name:
                there.add(name)
        return sorted(there)

    def trim(self, newest: int) -> None:
        """Remove what no start needs any more."""
        last = newest - KEPT
        if last < 1:
            return
        numbers = range(max(1, last - _AT_ONCE + 1), last + 1)
        keys = [key for number in numbers for key in (_key(number), generation_key(number))]
        if newest % _LINEAGE_EVERY == 0:
            keys += sorted(info.key for info in self._store.list(LINEAGE))[:-LINEAGE_KEPT]
        side_by_side([partial(self._store.delete, key) for key in keys])

    def merge_events(self, newest: int) -> None:
        """Merge the journals of finished starts, now and then, for as long as this is the newest start."""
        if newest % _MERGE_EVERY or newest <= KEPT_STARTS:
            return
        following = generation_key(newest + 1)
        # By the clock that dates the journals: that of the storage.
        now_s = self._store.stat(_key(newest)).modified
        merge_finished(self._store, newest=newest, now_s=now_s, goes_on=lambda: not exists(self._store, following))


def _key(number: int) -> str:
    return f"{STARTS}/{number:09d}.json"


def _traces(incarnation: str) -> list[str]:
    keys = [f"events/{incarnation}-r00000.jsonl", f"events/{incarnation}-r00000.part-00001.jsonl"]
    if match := _NUMBER.fullmatch(incarnation):
        keys.append(f"{LINEAGE}/{int(match[1]):09d}-{incarnation}.json")
    return keys


def _parse(number: int, data: bytes) -> StartRecord | None:
    try:
        start = parse_record(data, StartRecord)
    except ValueError:
        return None
    return start if start.number == number else None
