"""The snapshots of this host's ranks until they are saved: leased, digested, collected by step, handed over as a job."""

import logging
from collections import defaultdict
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import lru_cache

from elastictrain.checkpoint.memory.layout import RankDigests, RankLayout
from elastictrain.checkpoint.memory.records import compute_digests, load_digests, load_layout, store_digests
from elastictrain.checkpoint.memory.slot import Slot, SnapshotFacts
from elastictrain.checkpoint.saver.commit_protocol import Deadline
from elastictrain.checkpoint.saver.messages import HostRanks, ToWorker
from elastictrain.errors import ElasticTrainError, StorageError, StorageFullError, TransientStorageError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LeasedSnapshot:
    """A whole snapshot that cannot change until it is released. `digests` are None until they are known."""

    slot: Slot
    facts: SnapshotFacts
    layout: RankLayout
    digests: RankDigests | None = None

    def release(self) -> None:
        """Let go of the slot."""
        self.slot.close()


known_layout = lru_cache(maxsize=64)(load_layout)  # files are planned once for each layout, not for each snapshot


def lease(folder: str, name: str, *, wait_s: float = 0.0) -> LeasedSnapshot | None:
    """The snapshot in a slot, held through a descriptor of its own; None if it is being written for longer than `wait_s`, or
    the slot holds none that is whole.

    Raises: OSError if the slot cannot be opened; InvalidCheckpointError if its layout is not there.
    """
    slot = Slot.hold(f"{folder}/{name}", wait_s=wait_s)
    if slot is None:
        return None
    try:
        if (facts := slot.facts) is not None:
            return LeasedSnapshot(slot, facts, known_layout(folder, facts.layout))
    except BaseException:
        slot.close()
        raise
    slot.close()
    return None


def with_digests(leased: LeasedSnapshot) -> LeasedSnapshot:
    """The snapshot with its digests, which are stored beside it; without them where that does not work."""
    digests = None
    try:
        digests = load_digests(leased.slot.path, leased.facts)
        if digests is None:
            digests = compute_digests(leased.slot, leased.layout)
            store_digests(leased.slot.path, leased.facts, digests)
    except OSError as error:
        logger.warning("cannot store the digests of %s: %s", leased.slot.path, error)
    except Exception:
        # The edge of the thread. Digests are computed once more when it is written.
        logger.exception("%s cannot be digested", leased.slot.path)
    return replace(leased, digests=digests)


@dataclass(frozen=True, slots=True, eq=False)
class SaveJob:
    """One step of this host's ranks that is to become durable."""

    snapshots: tuple[LeasedSnapshot, ...]  # in the order of their ranks
    deadline: Deadline  # with other hosts

    @property
    def first(self) -> SnapshotFacts:
        """Of the first rank, which names this host among the others."""
        return self.snapshots[0].facts

    @property
    def incarnation(self) -> str:
        return self.first.incarnation

    @property
    def step(self) -> int:
        return self.first.step

    @property
    def leader(self) -> bool:
        """Whether this host commits."""
        return self.first.rank == 0

    @property
    def alone(self) -> bool:
        """Whether all ranks are on this host."""
        return len(self.snapshots) == self.first.world_size


class Cause(StrEnum):
    """Why a step could not be saved, as far as it tells what to do with the snapshots."""

    PASSING = "passing"  # may pass while nobody trains: a store comes back, somebody makes room
    REFUSED = "refused"  # storage does not take it, until a person mends that
    OTHER = "other"  # the snapshots are of no use, or other hosts lack their part


def cause_of(error: BaseException) -> Cause:
    """Pure."""
    if isinstance(error, TransientStorageError | StorageFullError):
        return Cause.PASSING
    known = isinstance(error, ElasticTrainError) and not isinstance(error, StorageError)
    return Cause.OTHER if known else Cause.REFUSED


_SENT_AGAIN = 8  # steps whose outcome is sent to a worker that comes again


@dataclass(slots=True)
class IncarnationSaves:
    """What one incarnation has to save: snapshots until all ranks of the host have theirs, and what became of each step."""

    host_ranks: HostRanks
    waiting: dict[int, dict[int, LeasedSnapshot]] = field(default_factory=lambda: defaultdict(dict))
    """By step and rank: snapshots that are to become durable."""

    newest: dict[int, int] = field(default_factory=dict)  # by rank: the step of its newest whole snapshot
    saved_step: int = -1  # the newest step that is in storage
    handed_over: set[int] = field(default_factory=set)  # steps that are being saved, or were
    done_here: set[int] = field(default_factory=set)  # steps of which this host has done its part, and gets no more news
    outcomes: dict[int, ToWorker] = field(default_factory=dict)
    """By step: what was sent to the workers that were connected, for one that was not."""

    def release_all(self) -> None:
        """Another incarnation has begun: what still waits for ranks of this one is given up."""
        for leased in (leased for ranks in self.waiting.values() for leased in ranks.values()):
            leased.release()
        self.waiting.clear()

    def is_wanted(self, facts: SnapshotFacts) -> bool:
        """Whether a snapshot is to become durable, and neither waits, nor is being saved, nor is older than what is."""
        known = facts.rank in self.waiting.get(facts.step, {}) or facts.step in self.handed_over
        return facts.durable and not known and facts.step > self.saved_step

    def arrived(self, leased: LeasedSnapshot) -> tuple[LeasedSnapshot, ...]:
        """A durable snapshot came; all of its step, if this was the last one that was missing."""
        of_step = self.waiting[leased.facts.step]
        of_step[leased.facts.rank] = leased
        if of_step.keys() >= set(self.host_ranks.ranks):
            del self.waiting[leased.facts.step]
            return tuple(of_step[rank] for rank in self.host_ranks.ranks)
        return ()

    def give_up(self, step: int) -> None:
        """A step will not be complete."""
        for leased in self.waiting.pop(step, {}).values():
            leased.release()

    def overtaken(self) -> list[int]:
        """Steps that wait, and that every rank of this host has passed: they will never be complete."""
        if len(self.newest) < len(self.host_ranks.ranks):
            return []
        oldest = min(self.newest.values())
        return sorted(step for step in self.waiting if step < oldest)

    def announced(self, step: int) -> None:
        """A step is to be saved, maybe once more: the attempt that this host has done its part of may have failed elsewhere."""
        self.outcomes.pop(step, None)
        if step in self.done_here:
            self.done_here.discard(step)
            self.handed_over.discard(step)

    def failed(self, step: int) -> None:
        """It may come again: the last save of a run cannot wait for a later step."""
        self.handed_over.discard(step)

    def sent(self, step: int, outcome: ToWorker) -> None:
        """What became of the step was sent to the workers that are connected."""
        self.outcomes[step] = outcome
        for old in sorted(self.outcomes)[:-_SENT_AGAIN]:
            del self.outcomes[old]
