"""Which snapshots a host holds, and which of them make a whole checkpoint together."""

import os
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass

from elastictrain.checkpoint.manifest import JsonValue
from elastictrain.checkpoint.memory.header import SnapshotFacts, facts_from_json
from elastictrain.checkpoint.memory.place import SlotName, parse_slot_name
from elastictrain.checkpoint.memory.slot import Slot


@dataclass(frozen=True, slots=True)
class Held:
    """One rank's whole snapshot in one slot of one host."""

    host: int
    """Number of the host in the group that asks."""

    slot: str
    facts: SnapshotFacts

    @property
    def replica(self) -> bool:
        """Whether it is of a rank of another host."""
        return self.slot.startswith("replica")

    def to_json(self) -> JsonValue:
        """For other ranks."""
        facts: dict[str, JsonValue] = asdict(self.facts)
        return [self.host, self.slot, facts]


def held_from_json(value: JsonValue) -> Held:
    """The inverse of `Held.to_json`. Raises: TypeError, ValueError."""
    if not isinstance(value, list) or len(value) != 3:
        raise TypeError(f"a held snapshot must be a list of 3 values, but is {value!r}")
    host, slot, facts = value
    if not isinstance(host, int) or not isinstance(slot, str):
        raise TypeError(f"a held snapshot must name host and slot, but is of {host!r} and {slot!r}")
    return Held(host, slot, facts_from_json(facts))


@dataclass(frozen=True, slots=True)
class SnapshotSet:
    """A step of which every rank's snapshot is held somewhere; `sources[rank]` are its holders, own ones first."""

    incarnation: str
    step: int
    world_size: int
    sources: tuple[tuple[Held, ...], ...]
    on_line: bool = True
    """Whether the run went on with it, as far as is known."""

    @property
    def state(self) -> Mapping[str, JsonValue]:
        """As rank 0 saw it."""
        return self.sources[0][0].facts.state

    @property
    def config_digest(self) -> str:
        """Of the run that took it."""
        return self.sources[0][0].facts.config_digest


def whole_sets(held: Iterable[Held], *, run: str, off_line: Collection[tuple[str, int]] = ()) -> tuple[SnapshotSet, ...]:
    """The complete steps in memory, newest first, `off_line` (incarnation and step) behind all others. Pure."""
    found: dict[tuple[int, str, int], dict[int, list[Held]]] = defaultdict(lambda: defaultdict(list))
    for one in held:
        facts = one.facts
        if facts.run == run:
            found[(facts.step, facts.incarnation, facts.world_size)][facts.rank].append(one)
    sets = []
    for (step, incarnation, world_size), ranks in sorted(found.items(), reverse=True):
        if ranks.keys() == set(range(world_size)):
            sources = tuple(
                tuple(sorted(ranks[rank], key=lambda one: (one.replica, one.host, one.slot))) for rank in range(world_size)
            )
            sets.append(SnapshotSet(incarnation, step, world_size, sources, on_line=(incarnation, step) not in off_line))
    return tuple(sorted(sets, key=lambda one: not one.on_line))


def slot_names(folder: str) -> list[SlotName]:
    """The slots in a run's folder in host memory; none if it is not there."""
    names = []
    with suppress(FileNotFoundError):
        names = sorted(os.listdir(folder))  # noqa: PTH208
    return [slot for name in names if (slot := parse_slot_name(name)) is not None]


def look(folder: str, *, host: int) -> list[Held]:
    """The whole snapshots in a run's folder in host memory."""
    held = []
    for name in slot_names(folder):
        try:
            slot = Slot.open(f"{folder}/{name}")
        except OSError:
            continue
        try:
            facts = slot.facts
        finally:
            slot.close()
        if facts is not None and facts.rank == name.rank:
            held.append(Held(host, str(name), facts))
    return held
