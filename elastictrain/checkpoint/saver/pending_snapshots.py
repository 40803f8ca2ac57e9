"""The snapshots of this host's ranks until they are saved: leased, digested, collected by step, handed over as a job."""

import logging
import threading
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from enum import StrEnum

from elastictrain.checkpoint.memory.layout import RankDigests, RankLayout
from elastictrain.checkpoint.memory.records import compute_digests, load_digests, load_layout, store_digests
from elastictrain.checkpoint.memory.slot import Slot, SnapshotFacts
from elastictrain.checkpoint.saver.commit_protocol import Deadline
from elastictrain.checkpoint.saver.messages import HostRanks, Message
from elastictrain.errors import ElasticTrainError, StorageError, StorageFullError, TransientStorageError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LeasedSnapshot:
    """A whole snapshot that cannot change until it is let go. `digests` are None until they are known."""

    slot: Slot
    facts: SnapshotFacts
    layout: RankLayout
    digests: RankDigests | None = None


class SlotLeases:
    """Hands out leased snapshots; safe to use from several threads."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._slots: dict[str, Slot] = {}
        self._count: dict[Slot, int] = {}
        self._layouts: dict[str, RankLayout] = {}

    def lease(self, name: str) -> LeasedSnapshot | None:
        """The snapshot in a slot; None if it is being written, or holds none that is whole.

        Raises: OSError if the slot cannot be opened; InvalidCheckpointError if its layout is not there.
        """
        with self._lock:
            slot = self._open(name)
            if not self._count.get(slot) and not slot.lock(shared=True):
                return None
            self._count[slot] = self._count.get(slot, 0) + 1
        try:
            facts = slot.facts
            if facts is not None:
                return LeasedSnapshot(slot, facts, self._layout(facts.layout))
        except BaseException:
            self._let_go(slot)
            raise
        self._let_go(slot)
        return None

    def release(self, leased: LeasedSnapshot) -> None:
        """Let go of it."""
        self._let_go(leased.slot)

    def close(self) -> None:
        """Unmap everything."""
        with self._lock:
            for slot in self._slots.values():
                slot.close()
            self._slots.clear()
            self._count.clear()

    def _open(self, name: str) -> Slot:
        slot = self._slots.get(name)
        if slot is not None and not slot.is_current():
            # Its writer has made another file under that name, for another layout. Who still reads the old one keeps it.
            del self._slots[name]
            if not self._count.get(slot):
                slot.close()
            slot = None
        if slot is None:
            slot = self._slots[name] = Slot.open(f"{self._folder}/{name}")
        return slot

    def _let_go(self, slot: Slot) -> None:
        with self._lock:
            left = self._count.pop(slot, 0) - 1
            if left > 0:
                self._count[slot] = left
            elif left == 0:
                slot.unlock()
                if slot not in self._slots.values():
                    slot.close()

    def _layout(self, digest: str) -> RankLayout:
        layout = self._layouts.get(digest)
        if layout is None:
            layout = self._layouts[digest] = load_layout(self._folder, digest)
        return layout


class DigestThread:
    """One thread; `done` is called in it, with the snapshot and its digests, or without them where that did not work."""

    def __init__(self, done: Callable[[LeasedSnapshot], None]) -> None:
        self._done = done
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="digest")

    def begin(self, leased: LeasedSnapshot) -> None:
        """Have it digested, unless its digests are kept already."""
        self._threads.submit(self._digest, leased)

    def close(self) -> None:
        """Nothing more is begun, and what is under way is not waited for."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _digest(self, leased: LeasedSnapshot) -> None:
        digests = None
        try:
            digests = load_digests(leased.slot.path, leased.facts)
            if digests is None:
                digests = compute_digests(leased.slot, leased.layout)
                store_digests(leased.slot.path, leased.facts, digests)
        except OSError as error:
            logger.warning("the digests of %s cannot be kept: %s", leased.slot.path, error)
        except Exception:
            # The edge of the thread. Digests are computed once more when it is written.
            logger.exception("%s cannot be digested", leased.slot.path)
        self._done(replace(leased, digests=digests))


@dataclass(frozen=True, slots=True, eq=False)
class SaveJob:
    """One step of this host's ranks that is to become durable."""

    snapshots: tuple[LeasedSnapshot, ...]
    leader: bool
    """Whether this host commits."""

    reason: str
    deadline: Deadline
    """With other hosts."""

    @property
    def incarnation(self) -> str:
        """Of the ranks that took the snapshots."""
        return self.snapshots[0].facts.incarnation

    @property
    def step(self) -> int:
        """Of the snapshots."""
        return self.snapshots[0].facts.step

    @property
    def world_size(self) -> int:
        """Of the group that took them."""
        return self.snapshots[0].facts.world_size

    @property
    def first_rank(self) -> int:
        """Names this host among the others."""
        return min(leased.facts.rank for leased in self.snapshots)

    @property
    def alone(self) -> bool:
        """Whether all ranks are on this host."""
        return len(self.snapshots) == self.world_size


@dataclass(frozen=True, slots=True, eq=False)
class RefusedSave:
    """One step that this host cannot take part in saving; the leader is told once it has begun."""

    incarnation: str
    step: int
    first_rank: int
    reason: str
    deadline: Deadline


class Cause(StrEnum):
    """Why a step could not be saved, as far as it tells what to do with the snapshots."""

    PASSING = "passing"
    """May pass while nobody trains: a store comes back, somebody makes room."""

    REFUSED = "refused"
    """Storage does not take it, until a person mends that."""

    OTHER = "other"
    """The snapshots are of no use, or other hosts lack their part."""


def cause_of(error: BaseException) -> Cause:
    """Pure."""
    if isinstance(error, TransientStorageError | StorageFullError):
        return Cause.PASSING
    known = isinstance(error, ElasticTrainError) and not isinstance(error, StorageError)
    return Cause.OTHER if known else Cause.REFUSED


@dataclass(slots=True)
class PendingSnapshots:
    """Collects the snapshots of one step until all ranks of the host have theirs."""

    host_ranks: HostRanks | None = None
    waiting: dict[int, dict[int, LeasedSnapshot]] = field(default_factory=lambda: defaultdict(dict))
    """By step and rank: snapshots that are to become durable."""

    newest: dict[int, int] = field(default_factory=dict)
    """By rank: the step of its newest whole snapshot in this incarnation."""

    saved_step: int = -1
    """The newest step of this incarnation that is in storage."""

    def move_to(self, host_ranks: HostRanks) -> list[LeasedSnapshot]:
        """A new incarnation: what still waited for ranks of the old one is given up."""
        if self.host_ranks is not None and self.host_ranks.incarnation == host_ranks.incarnation:
            self.host_ranks = host_ranks
            return []
        given_up = [leased for ranks in self.waiting.values() for leased in ranks.values()]
        self.host_ranks = host_ranks
        self.waiting.clear()
        self.newest.clear()
        # It may go on from an older step than the one before it has saved.
        self.saved_step = -1
        return given_up

    def arrived(self, leased: LeasedSnapshot) -> tuple[LeasedSnapshot, ...]:
        """A durable snapshot came; all of its step, if this was the last one that was missing."""
        assert self.host_ranks is not None  # noqa: S101
        of_step = self.waiting[leased.facts.step]
        of_step[leased.facts.rank] = leased
        if of_step.keys() >= set(self.host_ranks.ranks):
            del self.waiting[leased.facts.step]
            return tuple(of_step[rank] for rank in self.host_ranks.ranks)
        return ()

    def give_up(self, step: int) -> list[LeasedSnapshot]:
        """What waits for a step that will not be complete."""
        return list(self.waiting.pop(step, {}).values())

    def overtaken(self) -> list[int]:
        """Steps that wait, and that every rank of this host has passed: they will never be complete."""
        if self.host_ranks is None or len(self.newest) < len(self.host_ranks.ranks):
            return []
        oldest = min(self.newest.values())
        return sorted(step for step in self.waiting if step < oldest)


_TOLD_AGAIN = 8
"""Steps whose outcome is told to a worker that comes again."""


class StepOutcomes:
    """Which steps are in work or done, and what the workers were told of them."""

    def __init__(self) -> None:
        self._handed_over: set[int] = set()
        self._done_here: set[int] = set()
        self._told: dict[int, Message] = {}

    def clear(self) -> None:
        """Another incarnation has begun."""
        self._handed_over.clear()
        self._done_here.clear()
        self._told.clear()

    def announced(self, step: int) -> None:
        """A step is to be saved, maybe once more: the attempt that this host has done its part of may have failed elsewhere."""
        self._told.pop(step, None)
        if step in self._done_here:
            self._done_here.discard(step)
            self._handed_over.discard(step)

    def handed_over(self, step: int) -> None:
        """It is being saved."""
        self._handed_over.add(step)

    def is_handed_over(self, step: int) -> bool:
        """Whether it is being saved, or was."""
        return step in self._handed_over

    def done_here(self, step: int) -> None:
        """This host has done its part of it, and hears no more."""
        self._done_here.add(step)

    def failed(self, step: int) -> None:
        """It may come again: the last save of a run cannot wait for a later step."""
        self._handed_over.discard(step)

    def told(self, step: int, message: Message) -> None:
        """The workers that are connected have been told what became of it."""
        self._told[step] = message
        for old in sorted(self._told)[:-_TOLD_AGAIN]:
            del self._told[old]

    @property
    def to_tell_again(self) -> tuple[Message, ...]:
        """What a worker may have missed that was not connected."""
        return tuple(self._told.values())
