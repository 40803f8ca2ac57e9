"""Takes this rank's snapshots: copies the state between two steps into a slot while the next step runs."""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, replace

from torch import Tensor

from elastictrain.checkpoint.copier import Arena, Copier
from elastictrain.checkpoint.manifest import JsonValue
from elastictrain.checkpoint.memory.slot import Slot, SnapshotFacts
from elastictrain.checkpoint.saver.link import SaverLink
from elastictrain.errors import CheckpointError
from elastictrain.events import Event, Snapshot

logger = logging.getLogger(__name__)

_CLOSE_S = 5.0


@dataclass(slots=True)
class _Taking:
    """A snapshot that is still being copied, or still lacks its counters (`state`)."""

    place: int
    slot: Slot
    step: int
    reason: str
    awaited: bool
    stall_s: float
    state: Mapping[str, JsonValue] | None = None


@dataclass
class Snapshots:
    """The slots of this rank and their snapshots. Only the training thread calls the public methods."""

    arena: Arena
    copier: Copier
    link: SaverLink
    _: KW_ONLY
    facts: SnapshotFacts  # of any snapshot of this rank, but for step, time, reason and state
    steps: list[int | None]  # of the snapshots in the slots
    flush_records: Callable[[], None]
    record: Callable[[Event], None] | None  # set on the rank that logs

    def __post_init__(self) -> None:
        self._changed = threading.Condition()
        # The condition guards these and `steps`.
        self._told_free = [False] * len(self.steps)
        self._spared: frozenset[int] = frozenset()
        self._taking: dict[int, _Taking] = {}
        self._closing = self._dropping = False
        self._threads: list[threading.Thread] = []

    @property
    def unusable(self) -> str:
        """Why this rank can take no snapshots; empty if it can."""
        return self.link.broken or self.arena.broken

    @property
    def ready(self) -> bool:
        """Whether all slots are made."""
        return None not in self.arena.slots

    def spare(self, steps: Iterable[int | None]) -> None:
        """From now on no rank overwrites the snapshots of these steps: the saver must be able to read and send them."""
        self._spared = frozenset(step for step in steps if step is not None)
        for place, step in enumerate(self.steps):
            if step in self._spared:
                self.let_go(place)

    def status(self, *, due: bool, none_had: bool = False) -> tuple[tuple[bool, ...], tuple[bool, ...]]:
        """Which slots are busy (cannot be written now), and which are torn (hold no complete snapshot).

        A slot that is not busy is locked for this rank until the next call at least: the group acts on the flags a step later.

        `due`: a snapshot may come soon; only then the newest one is given up, if no other slot is free. `none_had`: the group
        has found no slot. A copy that fails on one rank leaves it another newest snapshot than the others: each would keep what
        the others offer, and all would wait for ever.
        """
        newest = max((step for step in self.steps if step is not None), default=None)
        protected = self.steps.index(newest) if newest is not None else -1
        free = [place != protected and self._seize(place) for place in range(len(self.steps))]
        if protected >= 0:
            if due and (none_had or not any(free)):
                free[protected] = self._seize(protected)
            elif not self._told_free[protected]:
                self.let_go(protected)
        self._told_free = list(free)
        with self._changed:
            torn = tuple(place in self._taking or step is None for place, step in enumerate(self.steps))
            return tuple(not one for one in free), torn

    def begin(self, place: int, step: int, *, reason: str, parts: Mapping[str, Tensor], awaited: bool = False) -> None:
        """Take a snapshot of `parts` into a slot that is not busy; `deliver` adds its counters.

        `awaited`: all ranks `wait` for it, and so learn of each other's failures.
        """
        began = time.monotonic()
        slot = self.arena.slots[place]
        assert slot is not None  # noqa: S101
        assert slot.locked  # noqa: S101
        slot.begin()
        taking = _Taking(place, slot, step, reason, awaited, 0.0)
        with self._changed:
            self.steps[place] = None
            self._taking[place] = taking

        copy = self.copier.start(slot, parts)
        thread = threading.Thread(target=self._take, args=(taking, copy), name="snapshot", daemon=True)
        self._threads = [*(one for one in self._threads if one.is_alive()), thread]
        thread.start()
        taking.stall_s = time.monotonic() - began

    def deliver(self, step: int, state: Mapping[str, JsonValue]) -> None:
        """Add the counters of a step to its snapshot, if there is one."""
        with self._changed:
            for taking in self._taking.values():
                if taking.step == step:
                    taking.state = state
                    self._changed.notify_all()

    def before_update(self) -> None:
        """Wait until the copies allow the state to change."""
        began = time.monotonic()
        self.copier.before_update()
        waited_s = time.monotonic() - began
        with self._changed:
            for taking in self._taking.values():
                taking.stall_s += waited_s

    def wait(self, step: int, *, timeout_s: float) -> None:
        """Wait until the snapshot of a step is complete, with its counters. Raises: CheckpointError."""
        with self._changed:
            if not self._changed.wait_for(lambda: all(one.step != step for one in self._taking.values()), timeout_s):
                raise CheckpointError(f"the snapshot of step {step} was not copied within {timeout_s:g} s")
            if step not in self.steps:
                raise CheckpointError(f"the snapshot of step {step} could not be copied")

    def close(self) -> None:
        """Take no more snapshots, wait for those that are being copied, and give the slots up."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        try:
            self._join()
        except CheckpointError as error:
            # The slots must stay mapped.
            logger.warning("%s; it is left to the end of this process", error)
            return
        self.arena.close()

    def stop(self) -> None:
        """Take no more snapshots, drop those that are not whole, and unlock the slots. Raises: CheckpointError if a copy
        still writes to a slot."""
        with self._changed:
            self._closing = self._dropping = True
            self._changed.notify_all()
        self._join()
        self._taking.clear()
        self.let_go()

    def _join(self) -> None:
        """Raises: CheckpointError."""
        deadline_s = time.monotonic() + _CLOSE_S
        for thread in self._threads:
            thread.join(timeout=max(0.0, deadline_s - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            raise CheckpointError("a snapshot is still being copied")

    def _seize(self, place: int) -> bool:
        slot = self.arena.slots[place]
        with self._changed:
            step = self.steps[place]
            needed = step is not None and self.link.needs(self.arena.names[place].index, step)
            if slot is None or place in self._taking or step in self._spared or needed:
                return False
        if not slot.is_current():
            # The folder was emptied: no process would find a snapshot in this file.
            self.arena.broken = f"{slot.path} was removed"
            return False
        return slot.locked or slot.lock(shared=False)

    def let_go(self, *places: int) -> None:
        """Unlock these slots; without `places` all of them, as no more snapshots are begun."""
        for place in places or range(len(self.steps)):
            slot = self.arena.slots[place]
            with self._changed:
                if slot is not None and slot.locked and place not in self._taking:
                    slot.unlock()

    def _take(self, taking: _Taking, copy: Callable[[], float]) -> None:
        try:
            seconds = copy()
        except BaseException as error:  # noqa: BLE001  # the edge of the thread
            logger.warning("the snapshot of step %d could not be copied: %s", taking.step, error)
            self._forget(taking)
            return
        with self._changed:
            # Snapshots are completed in the order of their steps: the saver gives up a step that a newer one has overtaken.
            self._changed.wait_for(
                lambda: self._closing or (taking.state is not None and next(iter(self._taking.values()), None) is taking)
            )
        # The end of a generation does not wait for records that go to slow storage first.
        if taking.state is None or self._dropping:
            return
        try:
            # A restart from this snapshot does not repeat its step, so the records of the step must be written before.
            self.flush_records()
            facts = replace(self.facts, step=taking.step, created=time.time(), reason=taking.reason, state=taking.state)
            taking.slot.complete(facts)
            # The saver locks the slot after the announcement; until then `_taking` keeps this rank from seizing it.
            taking.slot.unlock()
            index = self.arena.names[taking.place].index
            self.link.announce(index, taking.step, durable=bool(taking.reason))
            with self._changed:
                self.steps[taking.place] = taking.step
                del self._taking[taking.place]
                self._changed.notify_all()
            if self.record is not None:
                size_bytes, stall_s = self.copier.size_bytes, taking.stall_s
                self.record(Snapshot(step=taking.step, slot=index, bytes=size_bytes, copy_s=seconds, stall_s=stall_s))
        except Exception:
            # The edge of the thread: the run continues without this snapshot.
            logger.exception("the snapshot of step %d could not be completed", taking.step)
            self._forget(taking)

    def _forget(self, taking: _Taking) -> None:
        with self._changed:
            missed = self._taking.pop(taking.place, None) is taking
            self._changed.notify_all()
        if missed and taking.reason and not taking.awaited:
            # The saver finds no complete snapshot and gives the step up. Otherwise it would hold the slots of the other ranks.
            self.link.announce(self.arena.names[taking.place].index, taking.step, durable=True)
