"""Where the state of a simulated run is kept: in host memory and in storage. Here it is only counted."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from elastictrain.checkpoint.folders import FolderFacts
from elastictrain.checkpoint.manifest import MANIFEST_NAME
from elastictrain.checkpoint.retention import plan_retention
from elastictrain.simulate.scenario import Scenario

_FILES_OF_A_SAVE = 3  # beside the shards of the workers: manifest, layout, newest mark


@dataclass(slots=True, eq=False)
class Save:
    generation: int
    step: int
    hosts: Sequence[str]
    lost: bool = False  # a host is gone before its part was written


@dataclass(frozen=True, slots=True)
class Restored:
    step: int
    from_memory: bool


@dataclass(frozen=True, slots=True)
class Committed:
    """Requests of a save."""

    writes: int
    deletes: int


class TrainedState(Protocol):
    """What groups of hosts have trained; `hosts` are in the order of their ranks."""

    @property
    def save_s(self) -> float:
        """From the begin of the next save to its commit."""

    def stored_step(self) -> int:
        """The newest step in storage."""

    def known_step(self) -> int:
        """The newest step that is kept anywhere."""

    def restore(self, generation: int, hosts: Sequence[str]) -> Restored | None:
        """What a generation goes on from; None where storage does not answer."""

    def ended(self, generation: int, hosts: Sequence[str], *, step: int) -> None:
        """Nobody trains in the generation any more, and the newest snapshots in the memory of its hosts are of `step`."""

    def damage_newest(self) -> None:
        """The newest checkpoint in storage cannot be restored any more, unless it is the only one."""

    def begin_save(self, generation: int, hosts: Sequence[str], *, step: int) -> Save | None:
        """None if the save is refused at once."""

    def commit(self, save: Save) -> Committed | None:
        """None if it did not become durable."""

    def host_gone(self, host: str, *, saved: bool) -> None:
        """A launcher is gone, and the memory of its host with it, unless it left with all of it `saved`."""


class CountedState:
    def __init__(self, scenario: Scenario) -> None:
        self.save_s = scenario.costs.save_s
        self._scenario = scenario
        self._snapshot: tuple[int, Sequence[str]] = (0, ())  # its step, and the hosts that have it
        self._handed_over: set[str] = set()  # hosts that left, and saved what they had
        self._checkpoints: dict[str, FolderFacts] = {}
        self._files: dict[str, int] = {}

    def stored_step(self) -> int:
        return max((one.step for one in self._checkpoints.values()), default=0)

    def known_step(self) -> int:
        return max(self._snapshot[0], self.stored_step())

    def restore(self, generation: int, hosts: Sequence[str]) -> Restored:
        """Each host's replicas are on the next ones."""
        there = set(hosts)
        step, holders = self._snapshot
        lost = [place for place, host in enumerate(holders) if host not in there and host not in self._handed_over]
        copies = range(1, min(self._scenario.replicas, len(holders) - 1) + 1)
        whole = all(any(holders[(place + copy) % len(holders)] in there for copy in copies) for place in lost)
        in_memory = bool(step) and whole and step >= self.stored_step()
        return Restored(step, True) if in_memory else Restored(self.stored_step(), False)

    def ended(self, generation: int, hosts: Sequence[str], *, step: int) -> None:
        self._snapshot = step, hosts

    def damage_newest(self) -> None:
        if len(self._checkpoints) > 1:
            name = max(self._checkpoints, key=lambda one: self._checkpoints[one].step)
            del self._checkpoints[name], self._files[name]

    def begin_save(self, generation: int, hosts: Sequence[str], *, step: int) -> Save:
        return Save(generation, step, hosts)

    def commit(self, save: Save) -> Committed | None:
        """None also if a host is gone before its part was written, or the step is stored already. Applies retention."""
        name = f"step-{save.step:09d}"
        if save.lost or name in self._checkpoints:
            return None
        self._checkpoints[name] = FolderFacts(name, save.step, 0, {MANIFEST_NAME: 1})
        writes = self._files[name] = len(save.hosts) * self._scenario.processes + _FILES_OF_A_SAVE
        folders = list(self._checkpoints.values())
        keep_last, intact = self._scenario.keep_last, self._checkpoints.keys()
        deletions = plan_retention(folders, newest=name, intact=intact, keep_last=keep_last, keep_every=0)
        for deletion in deletions:
            del self._checkpoints[deletion.folder]
        return Committed(writes, sum(self._files.pop(deletion.folder) for deletion in deletions))

    def host_gone(self, host: str, *, saved: bool) -> None:
        if saved:
            self._handed_over.add(host)
