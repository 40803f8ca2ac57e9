"""What simulated groups train: steps, snapshots in host memory, checkpoints in storage, and what a failure costs."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from elastictrain.launch.membership.records import Generation, HostRecord
from elastictrain.simulate.network import Network
from elastictrain.simulate.queue import EventQueue
from elastictrain.simulate.scenario import Scenario
from elastictrain.simulate.state import CountedState, Save, TrainedState

_STOPPED_WITHIN_S = 5.0
_AGAIN_S = 1.0
_TRIED_AGAIN_S = 3.0  # until a refused request is repeated: on average, pauses being 4 to 8 s by then


class Joining(Protocol):
    """A host that joins a generation."""

    record: HostRecord
    ready_s: float


@dataclass(slots=True, eq=False)
class GenerationGroup:
    """The workers of one generation, wherever they run."""

    generation: Generation
    at_work: set[str] = field(default_factory=set)
    ready_s: float = 0.0  # when all its hosts have processes
    begun: bool = False
    running: bool = False
    over: bool = False  # some of its workers have ended, or been asked to
    first_step: float = 0.0
    step: float = 0.0
    stalled_until_s: float = 0.0

    @property
    def whole(self) -> bool:
        return len(self.at_work) == len(self.generation.members)

    @property
    def hosts(self) -> tuple[str, ...]:
        return tuple(member.host for member in self.generation.members)


@dataclass(slots=True)
class Totals:
    """Of a run so far."""

    steps: float = 0.0  # that were done; fractions of steps, for only what is saved is whole
    progress_s: float = 0.0  # in which steps were done that nobody had done before
    useful_s: float = 0.0  # of all hosts: the same without the share of snapshots, by the share of hosts that did them
    repeated_s: float = 0.0
    lost_steps: float = 0.0  # that had to be repeated
    starts: int = 0
    from_memory: int = 0  # starts whose state was in host memory
    from_storage: int = 0
    saves: int = 0
    writes: int = 0
    deletes: int = 0


class Training:
    def __init__(self, queue: EventQueue, network: Network, scenario: Scenario, *, state: TrainedState | None = None) -> None:
        """`state`: where what was trained is kept; without one it is only counted."""
        self.queue, self.network, self.scenario = queue, network, scenario
        self.state = state or CountedState(scenario)
        self.costs = costs = scenario.costs
        self.restart_cost_s = costs.stop_s + costs.recovery_s
        self.new_processes_s = max(0.0, costs.restart_s - costs.recovery_s)
        self.groups: dict[int, GenerationGroup] = {}
        self.totals = Totals()
        self.overtaken: list[int] = []  # generations that trained on, and saved, after a newer one had begun
        self.unfit: set[int] = set()  # machines with which no generation passes its checks
        self.checks_fail: Callable[[str], None] = lambda host: None  # what a failed check does to a host
        self._cut: set[str] = set()  # hosts that do not reach storage
        self._reached_s = 0.0  # when hosts last reached it again
        self.waited_s = -math.inf  # when a restore found last that storage does not answer
        self._newest_begun = 0
        self._saving: list[Save] = []
        self._saves_from_s = 0.0  # until then no save becomes durable
        self._counted_s = 0.0

    def known_step(self) -> int:
        return self.state.known_step()

    def join(self, generation: Generation, hosts: Sequence[Joining]) -> None:
        """Once all members have joined they start."""
        group = self.groups.setdefault(generation.number, GenerationGroup(generation))
        for host in hosts:
            group.at_work.add(host.record.host)
            group.ready_s = max(group.ready_s, host.ready_s)
        if not group.whole or group.over:
            return
        self._restore(group)

    def _restore(self, group: GenerationGroup) -> None:
        if group.over or not group.whole:
            return
        restored = self.state.restore(group.generation.number, group.hosts)
        if restored is None:
            self.waited_s = self.queue.now_s
            self.queue.at(self.queue.now_s + _AGAIN_S, lambda: self._restore(group))
            return
        group.first_step = group.step = float(restored.step)
        takes_s = self.costs.recovery_s + (0.0 if restored.from_memory or not restored.step else self.costs.restore_s)
        begins_s = max(group.ready_s, self.queue.now_s + group.generation.pause_s) + takes_s
        self.queue.at(begins_s, lambda: self._begin(group, from_memory=restored.from_memory))

    def _begin(self, group: GenerationGroup, *, from_memory: bool) -> None:
        if group.over or not group.whole:
            return
        if unfit := [host for host in group.hosts if self.network.machine[host] in self.unfit]:
            self.checks_fail(unfit[0])
            return
        totals, newest = self.totals, max(self.groups)
        group.begun, self._newest_begun = True, max(self._newest_begun, group.generation.number)
        totals.starts += 1
        totals.from_memory += from_memory
        totals.from_storage += not from_memory and group.step > 0
        totals.lost_steps += max(0.0, totals.steps - group.step) if group.generation.number == newest else 0.0
        self.groups = {number: one for number, one in self.groups.items() if number >= newest or one.at_work}
        self.update()
        self.queue.at(self.queue.now_s + self.scenario.every_s, lambda: self._save(group))

    def update(self) -> None:
        """The network has changed, or a group."""
        self.count()
        for group in self.groups.values():
            group.running = group.begun and not group.over and group.whole and self.network.connected(group.at_work)

    def count(self) -> None:
        """What has been done since it was counted last."""
        since_s, self._counted_s = self._counted_s, self.queue.now_s
        totals = self.totals
        for number, group in self.groups.items():
            if not group.running:
                continue
            before, rate = group.step, self._rate(group)
            group.step += rate * max(0.0, self.queue.now_s - max(since_s, group.stalled_until_s))
            if number == max(self.groups):
                new = max(0.0, group.step - max(before, totals.steps))
                totals.progress_s += new / rate
                totals.useful_s += new * self._step_s(group) * len(group.at_work) / self.scenario.full_hosts
                totals.repeated_s += (group.step - before - new) / rate
                totals.steps = max(totals.steps, group.step)

    def stall(self, *, until_s: float) -> None:
        """No group does a step until then."""
        self.count()
        for group in self.groups.values():
            group.stalled_until_s = until_s

    def _step_s(self, group: GenerationGroup) -> float:
        fixed_s = self.costs.step_fixed_s
        return fixed_s + (self.costs.step_s - fixed_s) * self.scenario.full_hosts / len(group.generation.members)

    def _rate(self, group: GenerationGroup) -> float:
        """Steps a second, with the share of time that snapshots take."""
        return 1 / ((1.0 + self.costs.snapshot_stall_s / self.costs.snapshot_every_s) * self._step_s(group))

    def _end(self, group: GenerationGroup, *, orderly: bool) -> None:
        """Nobody trains in the group any more; what is left of it are its snapshots."""
        if group.over:
            return
        self.count()
        steps = max(1, round(self.costs.snapshot_every_s * self._rate(group)))
        done = group.step - group.first_step
        step = int(group.first_step + (done if orderly else done // steps * steps))
        if group.begun and step > group.first_step:
            self.state.ended(group.generation.number, group.hosts, step=step)
        group.over = True
        self.update()

    def stop(self, generation: Generation, *, orderly: bool) -> bool:
        """The workers of a host are asked to end, or killed; returns whether they had begun."""
        group = self.groups[generation.number]
        self._end(group, orderly=orderly and group.running)
        return group.begun

    def host_over(self, generation: Generation, host: str) -> None:
        group = self.groups.get(generation.number)
        if group is not None:
            self._end(group, orderly=False)
            group.at_work.discard(host)

    def host_gone(self, host: str, *, saved: bool = False) -> None:
        """Its memory is gone, unless it left with all of it saved."""
        if not saved:
            for save in self._saving:
                save.lost |= host in save.hosts
            for group in list(self.groups.values()):
                if host in group.at_work:
                    self._end(group, orderly=False)
                    group.at_work.discard(host)
        self.state.host_gone(host, saved=saved)

    def reaches_storage(self, host: str, *, reaches: bool) -> None:
        (self._cut.discard if reaches else self._cut.add)(host)
        self._reached_s = self.queue.now_s

    def _save(self, group: GenerationGroup) -> None:
        if group.over:
            return
        self.queue.at(self.queue.now_s + self.scenario.every_s, lambda: self._save(group))
        self.count()
        state = self.state
        if not group.running or not self._cut.isdisjoint(group.at_work) or group.step <= state.stored_step():
            return
        if group.generation.number < self._newest_begun:
            # Refused. Launchers that reach storage must have stopped it before.
            if self.queue.now_s > self._reached_s + _STOPPED_WITHIN_S:
                self.overtaken.append(group.generation.number)
            return
        if (save := state.begin_save(group.generation.number, group.hosts, step=int(group.step))) is not None:
            group.stalled_until_s = max(group.stalled_until_s, self.queue.now_s + self.costs.save_stall_s)
            self._saving.append(save)
            self.queue.at(self.queue.now_s + state.save_s, lambda: self._commit(save))

    def refuse_saves(self, *, until_s: float) -> None:
        """Saves that are under way or begin are tried until then, and a little longer."""
        self._saves_from_s = max(self._saves_from_s, until_s)

    def _commit(self, save: Save) -> None:
        """A checkpoint becomes durable; the ones that it supersedes are deleted."""
        if self.queue.now_s < self._saves_from_s:
            self.queue.at(self._saves_from_s + _TRIED_AGAIN_S + self.state.save_s, lambda: self._commit(save))
            return
        self._saving.remove(save)
        if (done := self.state.commit(save)) is not None:
            self.totals.saves += 1
            self.totals.writes += done.writes
            self.totals.deletes += done.deletes
