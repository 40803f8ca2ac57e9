"""Takes this rank's snapshots: what is asked for between two steps becomes a whole slot while the next step runs."""

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
    """A snapshot that is not whole yet: its bytes and its counters are still to come."""

    place: int
    slot: Slot
    step: int
    reason: str
    awaited: bool
    stall_s: float
    state: Mapping[str, JsonValue] | None = None


@dataclass
class Snapshots:
    """The slots of this rank and what is in them. All methods but the internal ones are called by the training thread."""

    arena: Arena
    copier: Copier
    link: SaverLink
    _: KW_ONLY
    facts: SnapshotFacts
    """Those of any snapshot that this rank takes, but for its step, time, reason and state."""

    steps: list[int | None]
    """Of the snapshots that the slots hold."""

    flush_records: Callable[[], None]
    record: Callable[[Event], None] | None
    """For the rank that speaks."""

    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._changed = threading.Condition()
        # These and the steps are guarded by the condition.
        self._told_free = [False] * len(self.steps)
        self._spared: frozenset[int] = frozenset()
        self._taking: dict[int, _Taking] = {}
        self._closing = False
        self._threads: list[threading.Thread] = []

    @property
    def unusable(self) -> str:
        """Why this rank can take no snapshots; empty if it can."""
        return self.link.broken or self.arena.broken

    def make_room(self) -> None:
        """Begin to make the slots, once the first step is through: until then the device has other things to do."""
        self.arena.start()

    def spare(self, steps: Iterable[int | None]) -> None:
        """From now on no rank begins a snapshot in the place of one of these steps: who sends them must get at them."""
        self._spared = frozenset(step for step in steps if step is not None)
        for place, step in enumerate(self.steps):
            if step in self._spared:
                self.let_go(place)

    def status(self, *, due: bool, none_had: bool = False) -> tuple[tuple[bool, ...], tuple[bool, ...]]:
        """Which slots are busy, so that they cannot be written now, and which are torn: they hold no whole snapshot.

        A slot that is not busy is locked for this rank, and stays so through the next call at least: what is said with one step
        is acted upon in the next.

        `due`: whether a snapshot may come soon; only then the newest one is given up, if nothing else can be had. `none_had`:
        the group has found no slot. A copy that fails on one rank leaves it another newest than the others: each would keep
        what the others offer, and all of them would wait for ever.
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
        """Take a snapshot of `parts` into a slot that is not busy. Its counters follow by `deliver`.

        `awaited`: all ranks `wait` for it, and so hear from each other if it fails.
        """
        began = self.clock()
        slot = self.arena.slot(place)
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
        taking.stall_s = self.clock() - began

    def deliver(self, step: int, state: Mapping[str, JsonValue]) -> None:
        """The counters of a step, for its snapshot if there is one."""
        with self._changed:
            for taking in self._taking.values():
                if taking.step == step:
                    taking.state = state
                    self._changed.notify_all()

    def before_update(self) -> None:
        """The state is about to change."""
        began = self.clock()
        self.copier.before_update()
        waited_s = self.clock() - began
        with self._changed:
            for taking in self._taking.values():
                taking.stall_s += waited_s

    def wait(self, step: int, *, timeout_s: float) -> None:
        """Until the snapshot of a step is whole, its counters delivered. Raises: CheckpointError."""
        with self._changed:
            if not self._changed.wait_for(lambda: all(one.step != step for one in self._taking.values()), timeout_s):
                raise CheckpointError(f"the snapshot of step {step} was not copied within {timeout_s:g} s")
            if step not in self.steps:
                raise CheckpointError(f"the snapshot of step {step} could not be copied")

    def close(self) -> None:
        """No more snapshots; what is being copied is waited for."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        deadline_s = time.monotonic() + _CLOSE_S
        for thread in self._threads:
            thread.join(timeout=max(0.0, deadline_s - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            # Bytes may still be on their way: what they are written to must stay where it is.
            logger.warning("a snapshot is still being copied; it is left to the end of this process")
            return
        self.arena.close()

    def _seize(self, place: int) -> bool:
        slot = self.arena.slot(place)
        with self._changed:
            step = self.steps[place]
            needed = step is not None and self.link.needs(self.arena.names[place].index, step)
            if slot is None or place in self._taking or step in self._spared or needed:
                return False
        if not slot.is_current():
            # Somebody has emptied the folder: nobody would ever find what we put there.
            self.arena.broken = f"{slot.path} was removed"
            return False
        return slot.locked or slot.lock(shared=False)

    def let_go(self, *places: int) -> None:
        """Others may have these slots; without `places` all of them, since no more snapshots are begun."""
        for place in places or range(len(self.steps)):
            slot = self.arena.slot(place)
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
            # In the order in which they were begun: the saver gives up a step that a newer one has overtaken.
            self._changed.wait_for(
                lambda: self._closing or (taking.state is not None and next(iter(self._taking.values()), None) is taking)
            )
        if taking.state is None:
            return
        try:
            self._complete(taking, taking.state, seconds=seconds)
        except Exception:
            # The edge of the thread: a snapshot less, and the run goes on.
            logger.exception("the snapshot of step %d could not be completed", taking.step)
            self._forget(taking)

    def _complete(self, taking: _Taking, state: Mapping[str, JsonValue], *, seconds: float) -> None:
        index = self.arena.names[taking.place].index
        # A step that is not repeated after a restart must have left its records behind.
        self.flush_records()
        facts = replace(self.facts, step=taking.step, created=time.time(), reason=taking.reason, state=state)
        taking.slot.complete(facts)
        # The saver locks it as soon as it hears of it; until then the place counts as taken, and nobody seizes it.
        taking.slot.unlock()
        self.link.announce(index, taking.step, durable=bool(taking.reason))
        with self._changed:
            self.steps[taking.place] = taking.step
            del self._taking[taking.place]
            self._changed.notify_all()
        if self.record is not None:
            size_bytes, stall_s = self.copier.size_bytes, taking.stall_s
            self.record(Snapshot(step=taking.step, slot=index, bytes=size_bytes, copy_s=seconds, stall_s=stall_s))

    def _forget(self, taking: _Taking) -> None:
        with self._changed:
            missed = self._taking.pop(taking.place, None) is taking
            self._changed.notify_all()
        if missed and taking.reason and not taking.awaited:
            # The saver finds nothing whole and gives the step up. Without a word it would hold the slots of the other ranks.
            self.link.announce(self.arena.names[taking.place].index, taking.step, durable=True)
