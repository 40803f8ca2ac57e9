"""Checkpointers over a store in a dictionary."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from elastictrain.chaos.memory_store import KilledError, nothing
from elastictrain.chaos.memory_store import MemoryStore as FakeStore
from elastictrain.checkpoint.checkpointer import Checkpointer
from elastictrain.checkpoint.earlier_commits import JobMemory
from elastictrain.config.composed import CheckpointGroup
from elastictrain.events import Event

__all__ = ["Bench", "FakeStore", "KilledError", "nothing"]

_NOTHING = JobMemory()


@dataclass
class Bench:
    """A store and the events of the checkpointers over it."""

    store: FakeStore = field(default_factory=FakeStore)
    events: list[Event] = field(default_factory=list)

    def checkpointer(self, incarnation: str = "inc1", *, job: JobMemory = _NOTHING, **options: object) -> Checkpointer:
        """One of a world of one."""
        return Checkpointer(
            self.store,
            options=CheckpointGroup(**options),  # type: ignore[arg-type]
            group=None,
            rank=0,
            world_size=1,
            incarnation=incarnation,
            config_digest="digest",
            record=self.events.append,
            job=job,
            clock=lambda: 1000.0,
        )

    def files(self) -> Mapping[str, int]:
        """Keys and sizes."""
        return {key: len(data) for key, data in self.store.objects.items()}

    def folders(self) -> set[str]:
        """Names of the folders that hold anything."""
        return {key.split("/")[1] for key in self.store.objects if key.count("/") == 2}
