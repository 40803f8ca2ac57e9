"""The chain of generations in a run's storage, the heartbeats of their owners, and the starts of the run.

A generation is one object, created if it does not exist; the newest one names the owner. An owner's heartbeat is a growing
number in an object of its own. All observers use their own monotonic clock.

Readers find a generation or a start by name, without a listing. Each start removes records older than the last `KEPT` numbers;
the events, whose journals are merged, show what happened before.
"""

import logging
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from elastictrain.bounded_json import as_record, encode_record, parse_json, parse_record
from elastictrain.errors import ObjectExistsError, ObjectNotFoundError, StorageError
from elastictrain.lease.merge import KEPT_STARTS, merge_finished
from elastictrain.storage.bounded_read import exists, read_all, read_record, run_concurrently
from elastictrain.storage.opening import without_sync
from elastictrain.storage.store import Store
from elastictrain.storage.writers import is_dead, process_name

logger = logging.getLogger(__name__)

LAUNCHER = "launch"  # the owner of every generation of `python -m elastictrain.launch`: launchers agree among themselves
BEAT_S = 5.0  # interval of an owner's heartbeats
STALE_S = 20.0  # an owner silent for so long may be replaced; several beats, so that slow storage is survived

HOSTS, GENERATIONS, LINEAGE = "launch/hosts", "launch/generations", "lineage"
_NEWEST = "launch/newest.json"  # a hint: a generation that exists, not far behind the newest
_AHEAD = 4
_DIGITS = 10
_GENERATION = re.compile(rf"{GENERATIONS}/(\d{{9}})\.json")
_TRACE = re.compile(r"(?:events/(?:\d{6,}-to-)?|lineage/\d+-)(\d{6,})[-.]")

STARTS = "launch/starts"
KEPT = 1000
_AT_ONCE = 16  # numbers that one start removes at most: a long backlog is trimmed by many starts
_LINEAGE_EVERY = 16  # lineage objects are named after incarnations, so trimming lists them: not at each start
LINEAGE_KEPT = 960  # with those added until the next trim: one page of an object store's listing
_MERGE_EVERY = 16  # merging lists the events: not at each start, and never before training begins
_NUMBER = re.compile(r"(\d{6,})-\w+")


@dataclass(frozen=True, slots=True)
class LeaseClaim:
    """The owner of a generation."""

    number: int
    owner: str  # empty if the record is damaged, or older than owners
    host: str = ""
    pid: int = 0
    lines: tuple[str, ...] = ()  # names of the objects with the owner's heartbeats
    over: bool = False  # the run has ended: no owner holds it

    def __str__(self) -> str:
        who = f"launcher(s) on {self.host}" if self.owner == LAUNCHER else f"process {self.pid} on {self.host}"
        return f"{who}, generation {self.number}"


@dataclass(frozen=True, slots=True)
class Sign:
    """The fields of an owner's object that show whether it lives; objects of launchers have them too."""

    beat: int
    state: str = ""  # "gone" if the owner has left, or its processes are known to be dead
    writers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Member:
    name: str = ""
    host: str = ""


@dataclass(frozen=True, slots=True)
class _LauncherGeneration:
    """The fields of a launchers' generation that describe its owner."""

    number: int
    outcome: str
    owner: str = ""
    members: tuple[_Member, ...] = ()


def parse_claim(number: int, data: bytes) -> LeaseClaim:
    """Parse the record of a generation, also one of launchers. An unreadable one has no owner, and is over."""
    try:
        document = parse_json(data)
        if "outcome" in document:
            made = as_record(document, _LauncherGeneration)
            names, lines = ", ".join(one.name for one in made.members), tuple(one.host for one in made.members)
            owner = LAUNCHER if made.owner == LAUNCHER else ""
            claim = LeaseClaim(made.number, owner, names, lines=lines, over=made.outcome != "run")
        else:
            claim = as_record({"over": True, **document}, LeaseClaim)
    except (ValueError, TypeError):
        return LeaseClaim(number, "", over=True)
    return claim if claim.number == number else LeaseClaim(number, "", over=True)


def is_held(before: Mapping[str, Sign], now: Mapping[str, Sign], *, watched_s: float) -> bool | None:
    """Whether the owner of these objects lives, None while that is unknown; `before` was read `watched_s` ago."""
    living = {name: sign for name, sign in now.items() if sign.state != "gone"}
    if now and not living:
        return False
    if any(before.get(name) != sign for name, sign in living.items()):
        return True
    return False if watched_s >= STALE_S else None


class Chain:
    """The generations of one run. Every method raises StorageError."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.volatile = without_sync(store)  # for objects that need not survive a power loss

    def newest(self) -> LeaseClaim:
        """The generation with the largest number; number 0 and over if none exists."""
        number, data = newest_record(self._store)
        return parse_claim(number, data) if number else LeaseClaim(0, "", over=True)

    def read(self, number: int) -> LeaseClaim | None:
        with suppress(ObjectNotFoundError):
            return parse_claim(number, read_record(self._store, generation_key(number)))
        return None

    def create(self, claim: LeaseClaim) -> bool:
        """False if the generation exists already."""
        return create_record(self._store, claim.number, encode_record(claim))

    def signs(self, claim: LeaseClaim) -> Mapping[str, Sign]:
        """The heartbeats of a generation's owner, by name."""
        dead = partial(is_dead, here=process_name())
        read = read_all(self._store, map(_line, claim.lines))
        signs = {}
        for name in claim.lines:
            with suppress(KeyError, ValueError):
                sign = parse_record(read[_line(name)], Sign)
                signs[name] = replace(sign, state="gone") if sign.writers and all(map(dead, sign.writers)) else sign
        return signs

    def write_sign(self, owner: str, *, beat: int, gone: bool, writers: tuple[str, ...]) -> None:
        """Write the heartbeat of an owner that lives, or has left."""
        self.volatile.write(_line(owner), encode_record(Sign(beat, "gone" if gone else "busy", writers)))

    def remove_signs(self, before: LeaseClaim) -> None:
        """Delete the heartbeats of a replaced owner, unless storage fails; launchers delete their own."""
        try:
            for name in before.lines if before.owner not in ("", LAUNCHER) else ():
                self._store.delete(_line(name))
        except StorageError as error:
            logger.info("leftovers of the previous owner are not removed yet: %s", error)

    def created_s(self, number: int) -> float | None:
        """When a generation was created, in unix seconds, for messages; None if it was deleted."""
        with suppress(ObjectNotFoundError):
            return self._store.stat(generation_key(number)).modified
        return None

    def last_number(self, newest: LeaseClaim) -> int:
        """The largest number in use: the newest generation's, if that has an owner.

        Before generations had owners, events alone numbered the starts under a bare torchrun.
        """
        if newest.owner:
            return newest.number
        found = (_TRACE.match(info.key) for folder in ("events", "lineage") for info in self._store.list(folder))
        return max([newest.number, *(int(match[1]) for match in found if match)])

    def ensure_last_number(self, newest: LeaseClaim) -> int:
        """Return the largest number in use; if it is no generation yet, create one that is over, for launchers to follow."""
        last = self.last_number(newest)
        if last > newest.number:
            self.create(LeaseClaim(last, LAUNCHER, over=True))
        return last


def newest_record(store: Store) -> tuple[int, bytes]:
    """The newest generation's number and record; 0 and b"" if none exists.

    Generations have no gaps, except where numbers of earlier releases were skipped. So a reader asks by name for those after a
    hint; without a hint it lists them.
    """
    hint = read_all(store, [_NEWEST]).get(_NEWEST, b"")
    number = int(hint) if hint.isdigit() and len(hint) < _DIGITS else 0
    found = _from(store, number) if number else None
    if found is None:
        numbers = [int(match[1]) for info in store.list(GENERATIONS) if (match := _GENERATION.fullmatch(info.key))]
        # A listing may lag behind, a read by name does not.
        candidates = sorted(numbers, reverse=True) or [1]
        found = next((one for number in candidates if (one := _from(store, number)) is not None), None)
    return found or (0, b"")


def create_record(store: Store, number: int, data: bytes) -> bool:
    """False if the generation exists already with another record."""
    try:
        store.create(generation_key(number), data)
    except ObjectExistsError:
        # The answer to a successful create can be lost; its repetition then finds the object.
        return read_record(store, generation_key(number)) == data
    return True


def write_newest_hint(store: Store, number: int) -> None:
    """Write the hint from which readers search for the newest generation."""
    store.write(_NEWEST, str(number).encode())


def _from(store: Store, number: int) -> tuple[int, bytes] | None:
    """The last of consecutive generations from this number on; None if this number does not exist."""
    newest: tuple[int, bytes] | None = None
    while True:
        read = read_all(store, [generation_key(number + ahead) for ahead in range(_AHEAD)])
        for _ in range(_AHEAD):
            data = read.get(generation_key(number))
            if data is None:
                return newest
            newest, number = (number, data), number + 1


def generation_key(number: int) -> str:
    return f"{GENERATIONS}/{number:09d}.json"


def _line(name: str) -> str:
    return f"{HOSTS}/{name}.json"


@dataclass(frozen=True, slots=True)
class StartRecord:
    """One incarnation of the run, recorded when its ranks had met."""

    number: int
    incarnation: str
    world_size: int


class Starts:
    """The starts of one run. Every method raises StorageError."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def write(self, start: StartRecord) -> None:
        self._store.write(_start_key(start.number), encode_record(start))

    def last(self, before: int, *, count: int) -> list[StartRecord]:
        """The starts among the `count` numbers before `before` whose ranks had met, newest last."""
        starts = self._read(range(max(1, before - count), before))
        return [starts[number] for number in sorted(starts)]

    def known(self, incarnations: Iterable[str]) -> list[str]:
        """The incarnations of this run: those that left a trace in its folder, whatever their release."""
        names = sorted(set(incarnations))
        numbers = {name: int(match[1]) for name in names if (match := _NUMBER.fullmatch(name))}
        parts = ("", ".part-00001")
        traces = {f"events/{name}-r00000{part}.jsonl": name for name in names for part in parts}
        traces |= {f"{LINEAGE}/{number:09d}-{name}.json": name for name, number in numbers.items()}
        found = run_concurrently([partial(exists, self._store, key) for key in traces])
        there = {name for name, is_there in zip(traces.values(), found, strict=True) if is_there}
        starts = self._read(numbers.values())
        there |= {name for name, number in numbers.items() if number in starts and starts[number].incarnation == name}
        return sorted(there)

    def _read(self, numbers: Iterable[int]) -> dict[int, StartRecord]:
        keys = {_start_key(number): number for number in numbers}
        starts = {}
        for key, data in read_all(self._store, keys).items():
            with suppress(ValueError):
                start = parse_record(data, StartRecord)
                if start.number == keys[key]:
                    starts[start.number] = start
        return starts

    def trim(self, newest: int) -> None:
        """Delete the records that no start needs any more."""
        last = newest - KEPT
        if last < 1:
            return
        numbers = range(max(1, last - _AT_ONCE + 1), last + 1)
        keys = [key for number in numbers for key in (_start_key(number), generation_key(number))]
        if newest % _LINEAGE_EVERY == 0:
            keys += sorted(info.key for info in self._store.list(LINEAGE))[:-LINEAGE_KEPT]
        run_concurrently([partial(self._store.delete, key) for key in keys])

    def merge_events(self, newest: int) -> None:
        """Merge the journals of finished starts, every `_MERGE_EVERY` starts, while this start is the newest."""
        if newest % _MERGE_EVERY or newest <= KEPT_STARTS:
            return
        following = generation_key(newest + 1)
        # The storage's clock, which also dates the journals.
        now_s = self._store.stat(_start_key(newest)).modified
        merge_finished(self._store, newest=newest, now_s=now_s, goes_on=lambda: not exists(self._store, following))


def _start_key(number: int) -> str:
    return f"{STARTS}/{number:09d}.json"
