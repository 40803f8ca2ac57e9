"""The chain of generations in a run's storage, and the signs of life of their owners. Acts."""

import re
from collections.abc import Mapping
from functools import partial

from elastictrain.bounded_json import encode_record
from elastictrain.errors import ObjectExistsError, ObjectNotFoundError
from elastictrain.lease.records import LAUNCHER, LeaseClaim, Sign, encode_sign, parse_claim, parse_sign
from elastictrain.storage.bounded_read import read_all, read_record
from elastictrain.storage.opening import without_sync
from elastictrain.storage.store import Store
from elastictrain.storage.writers import is_dead, this_writer

HOSTS, GENERATIONS, LINEAGE = "launch/hosts", "launch/generations", "lineage"
_NEWEST = "launch/newest.json"
"""A hint: some generation that is there, and not far behind the newest."""

_AHEAD = 4
_DIGITS = 10
_GENERATION = re.compile(rf"{GENERATIONS}/(\d{{9}})\.json")
_TRACE = re.compile(r"(?:events/(?:\d{6,}-to-)?|lineage/\d+-)(\d{6,})[-.]")


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
        data = encode_record(claim)
        try:
            self._store.create(generation_key(claim.number), data)
        except ObjectExistsError:
            # The answer to a create that succeeded can be lost, and its repetition then finds the object there.
            return read_record(self._store, generation_key(claim.number)) == data
        return True

    def signs(self, claim: LeaseClaim) -> Mapping[str, Sign]:
        """What the owner of a generation says of itself, by object."""
        dead = partial(is_dead, here=this_writer())
        read = read_all(self._store, map(_line, claim.lines))
        signs = {name: parse_sign(read[_line(name)], is_dead=dead) for name in claim.lines if _line(name) in read}
        return {name: sign for name, sign in signs.items() if sign is not None}

    def write_sign(self, owner: str, *, beat: int, gone: bool, writers: tuple[str, ...]) -> None:
        """Show that an owner lives, or has left."""
        self.volatile.write(_line(owner), encode_sign(beat=beat, gone=gone, writers=writers))

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
