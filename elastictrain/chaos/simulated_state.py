"""The state of a simulated run, kept by the real modules: commits, restores and retention over a store in memory.

The store and the hosts' memory can be damaged, refuse, and be out of reach meanwhile.
"""

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random

from elastictrain.chaos.invariants import CommitFact, Invariant, ResumeFact, Violation, on_lineage
from elastictrain.chaos.memory_store import KilledError, MemoryStore
from elastictrain.chaos.simulated_group import TrainedGroup, incarnation_of, machine_of, set_tensors, tensors_of, value_of
from elastictrain.chaos.simulated_memory import RUN, SimulatedMemory, close
from elastictrain.checkpoint.checkpointer import Checkpointer
from elastictrain.checkpoint.folders import ROOT, clear_target, list_checkpoints
from elastictrain.checkpoint.manifest import MANIFEST_NAME, Manifest
from elastictrain.checkpoint.manifest_format import parse_manifest
from elastictrain.checkpoint.memory_restore import MemoryRestore
from elastictrain.checkpoint.saver.commit_protocol import CommitProtocol, Deadline
from elastictrain.checkpoint.saver.pending_snapshots import SaveJob
from elastictrain.checkpoint.saver.snapshot_writer import write_snapshots
from elastictrain.checkpoint.writer import Committer, Written
from elastictrain.config.composed import CheckpointGroup
from elastictrain.data.ledger import Row
from elastictrain.errors import ElasticTrainError, StorageError, StorageFullError, TransientStorageError
from elastictrain.lease.chain import StartRecord, Starts
from elastictrain.simulate.state import Committed, Restored, Save

KEEP_LAST = 3
SAVE_S = 8.0  # from the begin of a save to its commit; some take four times as long
STEPS_BETWEEN_SNAPSHOTS = 5
_OFTEN = 0.05  # share of `refused`: a save has some dozens of requests, and some saves must get through
_TORN = 0.5  # share of badly created manifests that are cut short, without an error
_EARLY = 0.5  # share of savers that write before the leader does


@dataclass(slots=True)
class PendingSave:
    jobs: dict[str, SaveJob]  # of hosts that have not written their part; the first one leads
    folder: str


@dataclass(slots=True)
class SimulatedFaults:
    """What is wrong with storage and memory now."""

    refused: float = 0.0  # share of requests that fail; of manifests, also after they were created, or created in part
    full: bool = False
    away: bool = False
    kill_at: str = ""  # the operation at which the saver that does it is killed
    killed: bool = False
    flips: list[tuple[str, int, int, float]] = field(default_factory=list)  # kind of slot, machine, its nth slot, share


class CheckedState:
    """`folder`: for the memory of hosts. Implements `TrainedState`."""

    def __init__(self, folder: Path, *, seed: int, workers: int, now_s: Callable[[], float]) -> None:
        self.slower_s = 0.0  # of each save
        self.store = MemoryStore(before=self._strike, after=self._created)
        self.faults = SimulatedFaults()
        self.violations: list[Violation] = []
        self.losses: dict[int, float] = {}
        self.ledger: list[Row] = []
        self.commits: list[CommitFact] = []
        self.resumes: list[ResumeFact] = []
        self.damaged: set[int] = set()
        self.over = False  # no checkpoint can be restored any more, and the plan has damaged them all
        self.keeps_memory: set[int] = set()  # machines whose saver outlives the next loss of their launcher
        self.clock_off: dict[int, float] = {}
        self._memory, self._seed, self._workers, self._now_s = SimulatedMemory(folder, workers=workers), seed, workers, now_s
        self._chance = Random(f"{seed} state")
        self._drawn = Counter[tuple[str, str, float]]()
        self._groups: dict[int, TrainedGroup] = {}
        self._committers: dict[int, Committer] = {}
        self._saves: dict[Save, PendingSave] = {}
        self._folders: dict[CommitFact, str] = {}
        self._memory_step = 0
        self._saver_acts = False
        self._hidden: dict[str, bytes] = {}

    # The store.

    def _strike(self, operation: str, key: str) -> None:
        faults = self.faults
        if faults.killed or (self._saver_acts and operation == faults.kill_at):
            faults.killed, faults.kill_at = True, ""
            raise KilledError(f"{operation} {key}")
        if faults.away or (faults.refused and self._draw(operation, key) < _OFTEN * faults.refused):
            raise TransientStorageError(f"{self.store.url}/{key}: storage does not answer")
        if faults.full and operation in ("write", "create", "open"):
            raise StorageFullError(f"{self.store.url}/{key}: no space")

    def _created(self, _: str, key: str) -> None:
        if key.endswith(MANIFEST_NAME) and self._draw("created", key) < self.faults.refused:
            if self._draw("torn", key) < _TORN:
                self.store.objects[key] = self.store.objects[key][:-1]
            else:
                raise TransientStorageError(f"{self.store.url}/{key}: the answer is lost")

    def _draw(self, what: str, key: str) -> float:
        """In [0, 1). Played again, a plan must draw the same: threads come in any order, and some names end at random."""
        place = (what, key.rpartition("-")[0], self._now_s())
        self._drawn[place] += 1
        return Random(f"{self._seed} {place} {self._drawn[place]}").random()

    def hide(self) -> None:
        """Storage shows no checkpoints, as where its disk is not mounted."""
        self._hidden |= {key: data for key, data in self.store.objects.items() if key.startswith(f"{ROOT}/")}
        for key in self._hidden:
            self.store.objects.pop(key, None)

    def show(self) -> None:
        self.store.objects.update(self._hidden)
        self._hidden.clear()

    def damage_newest(self, place: int = 0, share: float = 0.5) -> None:
        """Flip a bit in one object of the newest checkpoint, or cut it there; not in the last one that is whole."""
        whole = sorted((one for one in self.stored() if one.step not in self.damaged), key=lambda one: one.step)
        if len(whole) < 2:
            return
        folder = self._folders[whole[-1]]
        keys = sorted(key for key in self.store.objects if key.startswith(f"{ROOT}/{folder}/"))
        key = keys[place % len(keys)]
        data, at = bytearray(self.store.objects[key]), int(share * (len(self.store.objects[key]) - 1))
        if place % 2:
            del data[at:]
        else:
            data[at] ^= 1
        self.store.objects[key] = bytes(data)
        self.damaged.add(whole[-1].step)

    def stored(self) -> list[CommitFact]:
        """The commits that are in storage, on the lineage of the run."""
        keys = self.store.objects.keys()
        there = [one for one, folder in self._folders.items() if f"{ROOT}/{folder}/{MANIFEST_NAME}" in keys]
        return [one for one in there if on_lineage(one, self.resumes)]

    # What Training asks for.

    @property
    def save_s(self) -> float:
        return self.slower_s + SAVE_S * self._chance.choice((1, 1, 4))

    def stored_step(self) -> int:
        return max((one.step for one in self.stored()), default=0)

    def known_step(self) -> int:
        return max(self._memory_step, self.stored_step())

    def restore(self, generation: int, hosts: Sequence[str]) -> Restored | None:
        """None also if no checkpoint can be restored: a violation that ends the run, unless checkpoints are only hidden."""
        incarnation, tensors = incarnation_of(generation), tensors_of(0)
        world_size, looked_s = len(hosts) * self._workers, self._now_s()
        options = CheckpointGroup(keep_last=KEEP_LAST)
        try:
            with self._memory.union(hosts) as union:
                result = Checkpointer(
                    self.store,
                    options=options,
                    group=None,
                    rank=0,
                    world_size=world_size,
                    incarnation=incarnation,
                    config_digest="",
                    record=lambda _: None,
                    generation=generation,
                    clock=partial(self._clock, hosts[0]),
                ).restore(
                    tensors=tensors,
                    reset=partial(set_tensors, tensors, 0),
                    recall=MemoryRestore(union, run=RUN, host=0, lists_host_memory=True, group=None, remote=None),
                )
            Starts(self.store).write(StartRecord(generation, incarnation, world_size))
        except StorageError:
            return None
        except ElasticTrainError as error:
            # Where checkpoints are hidden, a person would mount them, and start again.
            self.over = not self._hidden
            if self.over:
                self._violated(Invariant.GOES_ON, f"generation {generation} restores nothing: {error}")
            return None
        step, value = (result.step, value_of(tensors)) if result is not None else (0, value_of(tensors))
        if value is None:
            self._violated(Invariant.SAME_LOSSES, f"generation {generation} restores a mix of steps as step {step}")
            value = int(tensors["model.0"][0])
        self.resumes.append(ResumeFact(looked_s, generation, step))
        self._groups[generation] = TrainedGroup(
            generation, world_size=world_size, first_step=step, value=value, seed=self._seed
        )
        self._memory_step = step
        return Restored(step, result is not None and result.tier != "storage")

    def ended(self, generation: int, hosts: Sequence[str], *, step: int) -> None:
        """The two newest snapshots are in memory, and replicas of one of them, or none that is new."""
        group, earlier = self._groups[generation], step - STEPS_BETWEEN_SNAPSHOTS
        group.train_to(step, losses=self.losses, ledger=self.ledger)
        replicated = self._chance.choice((step, earlier, 0))
        for one in (earlier, step):
            if one > group.first_step:
                for host in hosts:
                    self._snapshot(group, host, hosts, step=one)
                if one == replicated and len(hosts) > 1:
                    self._memory.replicate(hosts)
        self._flip()
        self._memory_step = step

    def begin_save(self, generation: int, hosts: Sequence[str], *, step: int) -> Save | None:
        """None also while the generation has another save. The savers of some hosts write at once, the others at `commit`."""
        group, save = self._groups[generation], Save(generation, step, hosts)
        if any(one.generation == generation for one in self._saves):
            return None
        group.train_to(step, losses=self.losses, ledger=self.ledger)
        try:
            listing = list_checkpoints(self.store)
            protocol = CommitProtocol(self.store, group.incarnation, step, first_rank=0)
            folder = protocol.prepare(lambda: clear_target(self.store, listing, step=step))
        except StorageError:
            return None
        jobs = {host: self._snapshot(group, host, hosts, step=step, reason="interval") for host in hosts}
        self._saves[save] = PendingSave(jobs, folder)
        self._flip()
        for host in hosts[1:]:
            if self._chance.random() < _EARLY:
                self._take_part(save, host)
        return save

    def _take_part(self, save: Save, host: str) -> None:
        """The saver of a host writes its ranks' files, and says so."""
        pending = self._saves[save]
        if (job := pending.jobs.pop(host, None)) is None:
            return
        with self._saver(job):
            protocol = CommitProtocol(self.store, job.incarnation, job.step, first_rank=job.first.rank)
            if (folder := protocol.find_prepared()) is not None:
                protocol.acknowledge(write_snapshots(self.store, job, folder, sha256=False, streams=1))

    @contextmanager
    def _saver(self, job: SaveJob) -> Iterator[None]:
        """What a saver does: it goes on after errors, and may be killed at any operation."""
        self._saver_acts = True
        try:
            yield
        except (ElasticTrainError, KilledError):
            pass
        finally:
            close(job)
            self._saver_acts = self.faults.killed = False

    def commit(self, save: Save) -> Committed | None:
        """None also if the leader's saver was killed. The manifest in storage counts, not what that saver reports."""
        pending, leader = self._saves[save], save.hosts[0]
        for host in save.hosts[1:]:
            self._take_part(save, host)
        del self._saves[save]
        if (job := pending.jobs.get(leader)) is None:
            return None
        reported = False
        with self._saver(job):
            reported = self._lead(save, job, pending.folder)
        # A later generation may have taken the folder.
        maker = maker_of(self.store.objects.get(f"{ROOT}/{pending.folder}/{MANIFEST_NAME}", b""))
        valid = maker == incarnation_of(save.generation)
        if reported and not valid:
            self._violated(Invariant.NEWEST_KEPT, f"step {save.step} is said to be committed, but its manifest is not whole")
        if not valid:
            # Otherwise a saver that was killed may have committed before.
            return None
        commit = CommitFact(self._now_s(), save.generation, save.step)
        self._folders[commit] = pending.folder
        self.commits.append(commit)
        # As the journal of rank 0 has it.
        key, row = f"events/{maker}-r00000.jsonl", {"event": "checkpoint_saved", "step": save.step, "rank": 0}
        self.store.objects[key] = self.store.objects.get(key, b"") + json.dumps(row).encode() + b"\n"
        if passed := [one for one in self.resumes if one.generation > save.generation and one.step < save.step]:
            self._violated(Invariant.ONE_COMMITTER, f"{commit}, though {passed[-1]} had gone on without it")
        return Committed(len(save.hosts), 0)

    def _lead(self, save: Save, job: SaveJob, folder: str) -> bool:
        """As the leading saver does once all have written; whether it says that it has committed."""
        listing = list_checkpoints(self.store)
        protocol = CommitProtocol(self.store, job.incarnation, job.step, first_rank=0)
        protocol.prepare(lambda: folder)
        parts: list[Written] = [*write_snapshots(self.store, job, folder, sha256=False, streams=1)]
        parts += protocol.wait_for_acknowledgements(job.first.world_size, own=parts, deadline=Deadline(0.0), wrote_s=0.0)
        facts = Manifest(
            step=job.step,
            world_size=job.first.world_size,
            incarnation=job.incarnation,
            created=job.first.created,
            config_digest="",
            versions={},
            state=job.first.state,
        )
        new = Committer(self.store, keep_last=KEEP_LAST, keep_every=0)
        committer = self._committers.setdefault(save.generation, new)
        manifest = committer.commit(parts, facts=facts, folder=folder)
        committer.tidy(folder, manifest, listing=listing, time_s=self._clock(save.hosts[0]), record=lambda _: None)
        protocol.clear()
        return True

    def host_gone(self, host: str, *, saved: bool) -> None:
        """The memory of a host that left in an orderly way is as good as lost: it has saved all of it before."""
        if saved or machine_of(host) in self.keeps_memory:
            self.keeps_memory.discard(machine_of(host))
            return
        self.kill_saver(machine_of(host))
        shutil.rmtree(self._memory.folder_of(host), ignore_errors=True)

    def kill_saver(self, machine: int) -> None:
        """What it was about to write is not written."""
        for pending in self._saves.values():
            for host in [host for host in pending.jobs if machine_of(host) == machine]:
                close(pending.jobs.pop(host))

    def _snapshot(self, group: TrainedGroup, host: str, hosts: Sequence[str], *, step: int, reason: str = "") -> SaveJob:
        return self._memory.snapshot(group, host, hosts, step=step, reason=reason, created=self._clock(host))

    def _flip(self) -> None:
        for kind, machine, place, share in self.faults.flips:
            self._memory.flip(kind, machine, place=place, share=share)
        self.faults.flips.clear()

    def _clock(self, host: str) -> float:
        return 1e9 + self._now_s() + self.clock_off.get(machine_of(host), 0.0)

    def _violated(self, invariant: Invariant, what: str) -> None:
        self.violations.append(Violation(invariant, what))


def maker_of(raw: bytes) -> str:
    """The incarnation that committed a manifest; empty if it is not whole."""
    try:
        return parse_manifest(raw, where="the manifest", key=None).incarnation
    except ElasticTrainError:
        return ""
