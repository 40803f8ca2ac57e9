"""The chain of generations in a run's storage, the signs of life of their owners, and the starts of the run.

A generation is one object, created if it does not exist; the newest one names the owner. An owner shows that it lives by a
number that grows in an object of its own. All observers use their own monotonic clock.

Nothing has to be listed to find a generation or a start. Their records are kept for the last `KEPT` numbers: each start removes
what falls behind. What happened before is in the events, whose journals are merged.
"""

import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum, auto
from functools import partial

from elastictrain.bounded_json import as_record, encode_record, parse_json, parse_record
from elastictrain.errors import ObjectExistsError, ObjectNotFoundError
from elastictrain.lease.merge import KEPT_STARTS, merge_finished
from elastictrain.storage.bounded_read import exists, read_all, read_record, side_by_side
from elastictrain.storage.opening import without_sync
from elastictrain.storage.store import Store
from elastictrain.storage.writers import is_dead, process_name

LAUNCHER = "launch"  # the owner of every generation of `python -m elastictrain.launch`: launchers agree among themselves
BEAT_S = 5.0  # interval at which an owner shows that it lives

STALE_S = 20.0
"""How long an owner may be silent before another one may take over; a few of its beats, so that slow storage is survived."""

HOSTS, GENERATIONS, LINEAGE = "launch/hosts", "launch/generations", "lineage"
_NEWEST = "launch/newest.json"  # a hint: some generation that is there, and not far behind the newest
_AHEAD = 4
_DIGITS = 10
_GENERATION = re.compile(rf"{GENERATIONS}/(\d{{9}})\.json")
_TRACE = re.compile(r"(?:events/(?:\d{6,}-to-)?|lineage/\d+-)(\d{6,})[-.]")

STARTS = "launch/starts"
KEPT = 1000
_AT_ONCE = 16  # numbers that one start removes at most: a run that has many of them left is trimmed little by little
_LINEAGE_EVERY = 16  # the lineage is named after incarnations, and has to be listed: not by each start
LINEAGE_KEPT = 960  # with what comes until it is trimmed again, one page of a list of an object store
_MERGE_EVERY = 16  # so are the events: not by each start, and by none before it trains
_NUMBER = re.compile(r"(\d{6,})-\w+")


class Hold(StrEnum):
    """What is known of an owner."""

    FREE = auto()
    HELD = auto()
    UNKNOWN = auto()  # not looked at for long enough


@dataclass(frozen=True, slots=True)
class LeaseClaim:
    """A generation, as far as its owner goes."""

    number: int
    owner: str  # empty where the record is damaged, or older than owners
    host: str = ""
    pid: int = 0
    lines: tuple[str, ...] = ()  # names of the objects in which its owner shows that it lives
    over: bool = False  # whether the run was over: nobody holds it

    def __str__(self) -> str:
        who = f"launcher(s) on {self.host}" if self.owner == LAUNCHER else f"process {self.pid} on {self.host}"
        return f"{who}, generation {self.number}"


@dataclass(frozen=True, slots=True)
class Sign:
    """What an owner's object says; read from those of launchers, too."""

    beat: int
    state: str = ""
    writers: tuple[str, ...] = ()

    @property
    def gone(self) -> bool:
        """Whether it has left, or its processes are known to be dead."""
        return self.state == "gone"


@dataclass(frozen=True, slots=True)
class _Member:
    name: str = ""
    host: str = ""


@dataclass(frozen=True, slots=True)
class _LauncherGeneration:
    """As launchers write it, as far as its owner goes."""

    number: int
    outcome: str
    owner: str = ""
    members: tuple[_Member, ...] = ()


def parse_claim(number: int, data: bytes) -> LeaseClaim:
    """From the record of a generation, also one that launchers made. What cannot be read has no owner, and is over."""
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


def judge(before: Mapping[str, Sign], now: Mapping[str, Sign], *, watched_s: float) -> Hold:
    """Whether the owner of these objects lives; `before` was read `watched_s` ago."""
    living = {name: sign for name, sign in now.items() if not sign.gone}
    if now and not living:
        return Hold.FREE
    if any(before.get(name) != sign for name, sign in living.items()):
        return Hold.HELD
    return Hold.FREE if watched_s >= STALE_S else Hold.UNKNOWN


class Chain:
    """Of one run. Every method raises StorageError."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.volatile = without_sync(store)
        """The same storage, for what need not outlast a loss of power."""

    def newest(self) -> LeaseClaim:
        """The generation with the largest number; number 0 and over where there is none."""
        number, data = newest_record(self._store)
        return parse_claim(number, data) if number else LeaseClaim(0, "", over=True)

    def read(self, number: int) -> LeaseClaim | None:
        """One generation; None if it does not exist."""
        try:
            return parse_claim(number, read_record(self._store, generation_key(number)))
        except ObjectNotFoundError:
            return None

    def create(self, claim: LeaseClaim) -> bool:
        """Whether this became the generation of its number; False if another was there before."""
        return create_record(self._store, claim.number, encode_record(claim))

    def signs(self, claim: LeaseClaim) -> Mapping[str, Sign]:
        """What the owner of a generation says of itself, by object."""
        dead = partial(is_dead, here=process_name())
        read = read_all(self._store, map(_line, claim.lines))
        signs = {}
        for name in claim.lines:
            with suppress(KeyError, ValueError):
                sign = parse_record(read[_line(name)], Sign)
                signs[name] = replace(sign, state="gone") if sign.writers and all(map(dead, sign.writers)) else sign
        return signs

    def write_sign(self, owner: str, *, beat: int, gone: bool, writers: tuple[str, ...]) -> None:
        """Show that an owner lives, or has left."""
        self.volatile.write(_line(owner), encode_record(Sign(beat, "gone" if gone else "busy", writers)))

    def remove_signs(self, claim: LeaseClaim) -> None:
        """Of an owner whose place was taken."""
        for name in claim.lines:
            self._store.delete(_line(name))

    def created_s(self, number: int) -> float | None:
        """When a generation was made, in unix seconds, for people; None if it is gone."""
        try:
            return self._store.stat(generation_key(number)).modified
        except ObjectNotFoundError:
            return None

    def last_number(self, newest: LeaseClaim) -> int:
        """The largest number in use: that of the newest generation, if all before it were numbered as it is.

        Before generations had owners, starts under a bare torchrun were numbered by their events alone.
        """
        if newest.owner:
            return newest.number
        found = (_TRACE.match(info.key) for folder in ("events", "lineage") for info in self._store.list(folder))
        return max([newest.number, *(int(match[1]) for match in found if match)])

    def number_on(self, newest: LeaseClaim) -> int:
        """Have generations of launchers follow upon all numbers in use, with a generation of nobody; the newest number."""
        last = self.last_number(newest)
        if last > newest.number:
            self.create(LeaseClaim(last, LAUNCHER, over=True))
        return last


def newest_record(store: Store) -> tuple[int, bytes]:
    """The generation with the largest number, and its number; 0 where there is none.

    Generations are numbered without gaps, but for one where numbers of earlier releases were passed over. So what follows a
    hint is asked for by name; without one they are listed.
    """
    hint = read_all(store, [_NEWEST]).get(_NEWEST, b"")
    number = int(hint) if hint.isdigit() and len(hint) < _DIGITS else 0
    found = _from(store, number) if number else None
    if found is None:
        numbers = [int(match[1]) for info in store.list(GENERATIONS) if (match := _GENERATION.fullmatch(info.key))]
        # A list may lag behind, a read of a name does not.
        candidates = sorted(numbers, reverse=True) or [1]
        found = next((one for number in candidates if (one := _from(store, number)) is not None), None)
    return found or (0, b"")


def create_record(store: Store, number: int, data: bytes) -> bool:
    """Whether this became the record of a generation; False if another was there before."""
    try:
        store.create(generation_key(number), data)
    except ObjectExistsError:
        # The answer to a create that succeeded can be lost, and its repetition then finds the object there.
        return read_record(store, generation_key(number)) == data
    return True


def point_at(store: Store, number: int) -> None:
    """Whoever looks for the newest generation begins with this one."""
    store.write(_NEWEST, str(number).encode())


def _from(store: Store, number: int) -> tuple[int, bytes] | None:
    """The last of the generations that follow one another from this number on; None if there is none of this number."""
    newest: tuple[int, bytes] | None = None
    while True:
        read = read_all(store, [generation_key(number + ahead) for ahead in range(_AHEAD)])
        for _ in range(_AHEAD):
            data = read.get(generation_key(number))
            if data is None:
                return newest
            newest, number = (number, data), number + 1


def generation_key(number: int) -> str:
    """Of the record of a generation."""
    return f"{GENERATIONS}/{number:09d}.json"


def _line(name: str) -> str:
    return f"{HOSTS}/{name}.json"


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
        self._store.write(_start_key(start.number), encode_record(start))

    def last(self, before: int, *, count: int) -> list[StartRecord]:
        """Those among the `count` numbers before `before` whose ranks had met, the newest last."""
        starts = self._read(range(max(1, before - count), before))
        return [starts[number] for number in sorted(starts)]

    def known(self, incarnations: Iterable[str]) -> list[str]:
        """Those that belong to this run: they have left a trace in its folder, by whatever release."""
        names = sorted(set(incarnations))
        traces = {key: name for name in names for key in _traces(name)}
        found = side_by_side([partial(exists, self._store, key) for key in traces])
        there = {name for name, is_there in zip(traces.values(), found, strict=True) if is_there}
        numbers = {name: int(match[1]) for name in names if (match := _NUMBER.fullmatch(name))}
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
        """Remove what no start needs any more."""
        last = newest - KEPT
        if last < 1:
            return
        numbers = range(max(1, last - _AT_ONCE + 1), last + 1)
        keys = [key for number in numbers for key in (_start_key(number), generation_key(number))]
        if newest % _LINEAGE_EVERY == 0:
            keys += sorted(info.key for info in self._store.list(LINEAGE))[:-LINEAGE_KEPT]
        side_by_side([partial(self._store.delete, key) for key in keys])

    def merge_events(self, newest: int) -> None:
        """Merge the journals of finished starts, now and then, for as long as this is the newest start."""
        if newest % _MERGE_EVERY or newest <= KEPT_STARTS:
            return
        following = generation_key(newest + 1)
        # By the clock that dates the journals: that of the storage.
        now_s = self._store.stat(_start_key(newest)).modified
        merge_finished(self._store, newest=newest, now_s=now_s, goes_on=lambda: not exists(self._store, following))


def _start_key(number: int) -> str:
    return f"{STARTS}/{number:09d}.json"


def _traces(incarnation: str) -> list[str]:
    keys = [f"events/{incarnation}-r00000.jsonl", f"events/{incarnation}-r00000.part-00001.jsonl"]
    if match := _NUMBER.fullmatch(incarnation):
        keys.append(f"{LINEAGE}/{int(match[1]):09d}-{incarnation}.json")
    return keys
