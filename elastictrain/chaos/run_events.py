"""The events of a run, read as they are written."""

import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elastictrain.chaos.damage import generation_of
from elastictrain.chaos.invariants import GenerationFact

EventRow = Mapping[str, Any]


@dataclass(slots=True)
class RunEvents:
    """Rows of rank 0, of launchers and of savers, each by time."""

    run_dir: Path
    rows: list[EventRow] = field(default_factory=list)
    launcher: list[EventRow] = field(default_factory=list)
    savers: list[EventRow] = field(default_factory=list)
    last_step: int = 0
    _read: dict[str, int] = field(default_factory=dict)

    def update(self) -> list[EventRow]:
        """Read what is new; returns the rows of rank 0."""
        patterns = ("*-r00000*.jsonl", "launcher-*.jsonl", "*-k*.jsonl")
        for known, pattern in zip((self.rows, self.launcher, self.savers), patterns, strict=True):
            new = [row for path in sorted((self.run_dir / "events").glob(pattern)) for row in self._new_rows(path)]
            if new:
                known.extend(new)
                known.sort(key=lambda row: float(row["time"]))
                self.last_step = max(self.last_step, last_step(new))
        return self.rows

    def _new_rows(self, path: Path) -> Iterable[EventRow]:
        before = self._read.get(path.name, 0)
        if path.stat().st_size <= before:
            return []
        with path.open("rb") as file:
            file.seek(before)
            # The line that is being written is read when it is whole.
            data = file.read().rpartition(b"\n")[0]
        self._read[path.name] = before + len(data) + bool(data)
        return [json.loads(line) for line in data.splitlines()]


def steps_of(rows: Iterable[EventRow]) -> list[EventRow]:
    return [row for row in rows if row["event"] == "step"]


def last_step(rows: Iterable[EventRow]) -> int:
    return max((row["step"] for row in steps_of(rows)), default=0)


def generation_facts(
    records: Iterable[Mapping[str, Any]], *, savers: Iterable[EventRow], spoilt: Collection[int] = ()
) -> list[GenerationFact]:
    """The generations of these records, with what their savers have replicated. A step of which a replica has failed once does
    not count: the workers go on to the next, though it may arrive later. `spoilt`: numbers of generations."""
    arrived, failed = defaultdict[tuple[int, int], set[int]](set), set[tuple[int, int]]()
    for row in savers:
        key = generation_of(row["incarnation"]), row.get("step", 0)
        if row["event"] == "replicated":
            arrived[key].add(row["of_rank"])
        elif row["event"] == "replication_failed":
            failed.add(key)
    found = []
    for record in records:
        number, members = record["number"], record["members"]
        ranks = set(range(sum(member["processes"] for member in members)))
        steps = [key[1] for key, of in arrived.items() if key[0] == number and of >= ranks and key not in failed]
        launchers = {member["host"] for member in members}
        found.append(GenerationFact(number, launchers, max(steps, default=0), spoilt=number in spoilt))
    return found
