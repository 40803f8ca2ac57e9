"""A store that answers late, loses writes and tears objects; only create-if-absent is what it promises to be."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Generic, TypeVar

from elastictrain.launch.membership.records import Generation, HostRecord

K = TypeVar("K")
V = TypeVar("V")


class StorageDownError(Exception):
    pass


@dataclass(slots=True)
class Weather:
    """How bad it is at the moment, as probabilities of each operation."""

    late: float = 0.0
    longest_lag_s: float = 0.0
    failing: float = 0.0
    lost: float = 0.0
    torn: float = 0.0


@dataclass(slots=True)
class Table(Generic[K, V]):
    """Every value that was ever written, and when: a late reader sees what was there before."""

    rows: dict[K, list[tuple[float, V]]] = field(default_factory=dict)

    def put(self, key: K, value: V, *, now_s: float) -> None:
        self.rows.setdefault(key, []).append((now_s, value))

    def get(self, key: K, *, as_of_s: float) -> V | None:
        for written_s, value in reversed(self.rows.get(key, ())):
            if written_s <= as_of_s:
                return value
        return None

    def all(self, *, as_of_s: float) -> Iterator[tuple[K, V]]:
        for key in self.rows:
            value = self.get(key, as_of_s=as_of_s)
            if value is not None:
                yield key, value


class Storage:
    def __init__(self, random: Random, *, atomic: bool = True) -> None:
        self.random = random
        self.weather = Weather()
        self.atomic = atomic
        self.records: Table[str, HostRecord] = Table()
        self.generations: Table[int, Generation] = Table()

    def as_of(self, now_s: float) -> float:
        """The moment that a reading shows."""
        late = self.random.random() < self.weather.late
        return now_s - self.random.random() * self.weather.longest_lag_s if late else now_s

    def torn(self) -> bool:
        return self.random.random() < self.weather.torn

    def _applied(self) -> bool:
        """Whether a write takes place; it may also fail, with or without having taken place."""
        if self.random.random() < self.weather.failing:
            raise StorageDownError
        return self.random.random() >= self.weather.lost

    def write_record(self, record: HostRecord, *, now_s: float) -> None:
        if self._applied():
            self.records.put(record.host, record, now_s=now_s)

    def create(self, generation: Generation, *, now_s: float) -> None:
        if not self._applied():
            return
        known_s = now_s if self.atomic else self.as_of(now_s)
        if self.generations.get(generation.number, as_of_s=known_s) is None:
            self.generations.put(generation.number, generation, now_s=now_s)
        if self.random.random() < self.weather.failing:
            raise StorageDownError

    def newest(self, before: Generation | None, *, now_s: float) -> Generation | None:
        """Never an older one than before: the registry reads on from what it knows."""
        number = 0 if before is None else before.number
        as_of_s = self.as_of(now_s)
        while (found := self.generations.get(number + 1, as_of_s=as_of_s)) is not None:
            before, number = found, number + 1
        return before

    def all_entries(self, *, now_s: float) -> list[HostRecord]:
        as_of_s = self.as_of(now_s)
        return [record for _, record in self.records.all(as_of_s=as_of_s) if not (self.weather.torn and self.torn())]
