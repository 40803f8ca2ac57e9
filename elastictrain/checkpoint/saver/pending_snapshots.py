"""The snapshots of this host's ranks until they are saved: leased, digested, collected by step, passed on as a job."""

import logging
from collections import defaultdict
from contextlib import ExitStack
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
    """A whole snapshot that cannot change until its slot is closed. `digests`: None until computed."""

    slot: Slot
    facts: SnapshotFacts
    layout: RankLayout
    digests: RankDigests | None = None


known_layout = lru_cache(maxsize=64)(load_layout)  # files are planned once for each layout, not for each snapshot


def lease(folder: str, name: str, *, wait_s: float = 0.0) -> LeasedSnapshot | None:
    """Lease the snapshot in a slot; None if it is being written for longer than `wait_s`, or the slot holds no whole one.
    Raises: OSError if the slot cannot be opened; InvalidCheckpointError if its layout is missing."""
    slot = Slot.hold(f"{folder}/{name}", wait_s=wait_s)
    if slot is None:
        return None
    with ExitStack() as unless_leased:
        unless_leased.callback(slot.close)
        if (facts := slot.facts) is None:
            return None
        leased = LeasedSnapshot(slot, facts, known_layout(folder, facts.layout))
        unless_leased.pop_all()
    return leased


def with_digests(leased: LeasedSnapshot) -> LeasedSnapshot:
    """The snapshot with its digests, which are stored beside it; without them if that fails."""
    digests = None
    try:
        digests = load_digests(leased.slot.path, leased.facts)
        if digests is None:
            digests = compute_digests(leased.slot, leased.layout)
            store_digests(leased.slot.path, leased.facts, digests)
    except OSError as error:
        logger.warning("cannot store the digests of %s: %s", leased.slot.path, error)
    except Exception:
        # The edge of the thread. The digests are computed again when the snapshot is written.
        logger.exception("%s cannot be digested", leased.slot.path)
    return replace(leased, digests=digests)


@dataclass(frozen=True, slots=True, eq=False)
class SaveJob:
    """One step of this host's ranks that is to become durable."""

    snapshots: tuple[LeasedSnapshot, ...]  # in the order of their ranks
    deadline: Deadline  # limit for the other hosts

    @property
    def first(self) -> SnapshotFacts:
        """Facts of the first rank, which identifies this host to the others."""
        return self.snapshots[0].facts

    @property
    def incarnation(self) -> str:
        return self.first.incarnation

    @property
    def step(self) -> int:
        return self.first.step

    @property
    def leader(self) -> bool:
        return self.first.rank == 0

    @property
    def alone(self) -> bool:
        """Whether all ranks are on this host."""
        return len(self.snapshots) == self.first.world_size


class Cause(StrEnum):
    """Why a step could not be saved, as far as it decides about the snapshots."""

    PASSING = "passing"  # may pass without training: storage answers again, or its space is freed
    REFUSED = "refused"  # storage does not accept it until a person mends the cause
    OTHER = "other"  # the snapshots are unusable, or other hosts lack their part


def cause_of(error: BaseException) -> Cause:
    if isinstance(error, TransientStorageError | StorageFullError):
        return Cause.PASSING
    known = isinstance(error, ElasticTrainError) and not isinstance(error, StorageError)
    return Cause.OTHER if known else Cause.REFUSED


_SENT_AGAIN = 8  # steps whose outcome is sent to a worker that reconnects


@dataclass(slots=True)
class IncarnationSaves:
    """What one incarnation has to save: incomplete steps, and the outcomes of the others."""

    host_ranks: HostRanks
    # By step and rank: snapshots that are to become durable.
    waiting: dict[int, dict[int, LeasedSnapshot]] = field(default_factory=lambda: defaultdict(dict))
    newest: dict[int, int] = field(default_factory=dict)  # by rank: step of its newest whole snapshot
    saved_step: int = -1  # the newest step in storage
    handed_over: set[int] = field(default_factory=set)  # steps that are being saved, or were
    done_here: set[int] = field(default_factory=set)  # steps whose part of this host is done; it gets no more news of them
    outcomes: dict[int, ToWorker] = field(default_factory=dict)  # by step: sent to workers, kept for one that was away

    def is_wanted(self, facts: SnapshotFacts) -> bool:
        """Whether a durable snapshot is new: not waiting, not being saved, and newer than the last saved step."""
        known = facts.rank in self.waiting.get(facts.step, {}) or facts.step in self.handed_over
        return facts.reason != "" and not known and facts.step > self.saved_step

    def arrived(self, leased: LeasedSnapshot) -> tuple[LeasedSnapshot, ...]:
        """Add a durable snapshot; returns all of its step if it is now complete."""
        of_step = self.waiting[leased.facts.step]
        of_step[leased.facts.rank] = leased
        if of_step.keys() >= set(self.host_ranks.ranks):
            del self.waiting[leased.facts.step]
            return tuple(of_step[rank] for rank in self.host_ranks.ranks)
        return ()

    def give_up(self, step: int) -> None:
        """Release the snapshots of a step that will not be complete."""
        for leased in self.waiting.pop(step, {}).values():
            leased.slot.close()

    def overtaken(self) -> list[int]:
        """Waiting steps that every rank of this host has passed: they will never be complete."""
        oldest = min(self.newest.get(rank, -1) for rank in self.host_ranks.ranks)
        return sorted(step for step in self.waiting if step < oldest)

    def announced(self, step: int) -> None:
        """Accept a step, maybe again: an attempt whose part of this host was done may have failed elsewhere."""
        self.outcomes.pop(step, None)
        if step in self.done_here:
            self.done_here.discard(step)
            self.handed_over.discard(step)

    def failed(self, step: int) -> None:
        """Accept the step again: the last save of a run cannot wait for a later step."""
        self.handed_over.discard(step)

    def sent(self, step: int, outcome: ToWorker) -> None:
        """Keep an outcome that was sent to the connected workers."""
        self.outcomes[step] = outcome
        for old in sorted(self.outcomes)[:-_SENT_AGAIN]:
            del self.outcomes[old]
