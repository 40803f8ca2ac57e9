"""What the keeper knows of the ranks of its host: which incarnation they are in, and what each step still waits for. Pure."""

from collections import defaultdict
from dataclasses import dataclass, field

from elastictrain.checkpoint.keeper.pins import Pinned


@dataclass(frozen=True, slots=True)
class Station:
    """The ranks of this host in one incarnation."""

    incarnation: str
    world_size: int
    ranks: tuple[int, ...]
    heard: bool = True
    """Whether one of its workers has spoken to this keeper; else only what lies in memory tells of it."""

    @property
    def leader(self) -> bool:
        """Whether this host commits checkpoints."""
        return 0 in self.ranks


@dataclass(slots=True)
class Desk:
    """Collects the snapshots of one step until all ranks of the host have theirs."""

    station: Station | None = None
    waiting: dict[int, dict[int, Pinned]] = field(default_factory=lambda: defaultdict(dict))
    """By step and rank: snapshots that are to become durable."""

    newest: dict[int, int] = field(default_factory=dict)
    """By rank: the step of its newest whole snapshot in this incarnation."""

    saved_step: int = -1
    """The newest step of this incarnation that is in storage."""

    def move_to(self, station: Station) -> list[Pinned]:
        """A new incarnation: what still waited for ranks of the old one is given up."""
        if self.station is not None and self.station.incarnation == station.incarnation:
            self.station = station
            return []
        given_up = [pinned for ranks in self.waiting.values() for pinned in ranks.values()]
        self.station = station
        self.waiting.clear()
        self.newest.clear()
        # It may go on from an older step than the one before it has saved.
        self.saved_step = -1
        return given_up

    def arrived(self, pinned: Pinned) -> tuple[Pinned, ...]:
        """A durable snapshot came; all of its step, if this was the last one that was missing."""
        assert self.station is not None  # noqa: S101
        of_step = self.waiting[pinned.facts.step]
        of_step[pinned.facts.rank] = pinned
        if of_step.keys() >= set(self.station.ranks):
            del self.waiting[pinned.facts.step]
            return tuple(of_step[rank] for rank in self.station.ranks)
        return ()

    def give_up(self, step: int) -> list[Pinned]:
        """What waits for a step that will not be complete."""
        return list(self.waiting.pop(step, {}).values())

    def overtaken(self) -> list[int]:
        """Steps that wait, and that every rank of this host has passed: they will never be complete."""
        if self.station is None or len(self.newest) < len(self.station.ranks):
            return []
        oldest = min(self.newest.values())
        return sorted(step for step in self.waiting if step < oldest)
