"""What happens to snapshots when nobody is there any more: looked for in a thread, since storage may be slow, or away."""

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Protocol

from elastictrain.checkpoint.keeper.desk import Station
from elastictrain.checkpoint.keeper.facts import RunFacts
from elastictrain.checkpoint.keeper.flush import FlushLimits, choose_flush, last_station, still_there
from elastictrain.checkpoint.keeper.pins import Pinned, Pins
from elastictrain.checkpoint.memory.inventory import Held
from elastictrain.checkpoint.memory.records import load_digests
from elastictrain.errors import ElasticTrainError, InvalidCheckpointError
from elastictrain.storage.store import Store

logger = logging.getLogger(__name__)

_LETTING_GO_S = 2.0
AGAIN_S = 1.0
"""Until a step is tried again that storage refused."""


class Begin(Protocol):
    """Has the snapshots of one step written."""

    def __call__(self, snapshots: tuple[Pinned, ...], *, leader: bool, reason: str) -> None:
        """`leader`: this host commits."""


class Flushing:
    """One look after another, as long as nobody comes back. All but the search itself happens in the keeper's thread."""

    def __init__(
        self,
        store: Store,
        facts: RunFacts,
        pins: Pins,
        *,
        begin: Begin,
        later: Callable[[Callable[[], None]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`begin` is called in a task that is handed to `later`."""
        self._store = store
        self._facts = facts
        self._pins = pins
        self._begin = begin
        self._later = later
        self._clock = clock
        self._since_s: float | None = None
        self._tried: set[tuple[str, int]] = set()
        self._pause_s = 0.0
        self.busy = False
        self.over = False
        """Whether what was only in memory has been written, or cannot be."""

    def interrupt(self) -> None:
        """Somebody came back: what has to be saved is another question when they are gone again."""
        self._since_s = None
        self._tried.clear()
        self.over = False

    def look(self, station: Station | None, held: Sequence[Held]) -> None:
        """Begin to look for what is to be saved of what this host holds."""
        if station is None:
            # A keeper was killed with its workers, and this one has heard of none: what lies there tells whose it is.
            station = last_station(held, run=self._facts.run)
        if station is None:
            self.over = True
            return
        since_s = self._since_s = self._clock() if self._since_s is None else self._since_s
        own = [one for one in held if not one.replica and one.facts.run == self._facts.run]
        own = [one for one in own if (one.facts.incarnation, one.facts.step) not in self._tried]
        self.busy = True
        done = {step for incarnation, step in self._tried if incarnation == station.incarnation}
        pause_s, self._pause_s = self._pause_s, 0.0
        arguments = (station, own, done, since_s, pause_s)
        threading.Thread(target=self._choose, args=arguments, name="flush", daemon=True).start()

    def failed(self, incarnation: str, step: int, *, passing: bool) -> None:
        """A step could not be saved. `passing`: the reason may go away by itself, so it is tried again after a moment."""
        if passing and self._since_s is not None and self._clock() - self._since_s < self._facts.save_timeout_s:
            # Nobody is there who would try again, and an older step would fare no better.
            self._tried.discard((incarnation, step))
            self._pause_s = AGAIN_S

    def _choose(self, station: Station, own: Sequence[Held], done: Collection[int], since_s: float, pause_s: float) -> None:
        """The thread."""
        found: tuple[Held, ...] = ()
        time.sleep(pause_s)
        try:
            if still_there(self._store):
                found = choose_flush(
                    self._store,
                    station,
                    own,
                    done=done,
                    limits=FlushLimits(leader_s=self._facts.grace_s, storage_s=self._facts.save_timeout_s),
                    needed_no_more=lambda: self._since_s != since_s,
                )
        except ElasticTrainError as error:
            logger.warning("what is in memory only cannot be saved: %s", error)
        except Exception:
            # The edge of the thread.
            logger.exception("what is in memory only cannot be saved")
        self._later(lambda: self._on_found(found, since_s))

    def _on_found(self, found: Sequence[Held], since_s: float) -> None:
        self.busy = False
        if self._since_s != since_s:
            return
        if not found:
            self.over = True
            return
        self._tried.add((found[0].facts.incarnation, found[0].facts.step))
        self._save(found)

    def _save(self, chosen: Sequence[Held]) -> None:
        """Everybody is gone, and so will host memory be: the newest whole step goes to storage, or else the one before it."""
        pinned: list[Pinned] = []
        readable = True
        for held in chosen:
            try:
                one = self._pin_soon(held)
            except (OSError, InvalidCheckpointError) as error:
                logger.warning("%s cannot be read: %s", held.slot, error)
                one, readable = None, False
            if one is None:
                break
            pinned.append(one)
        if len(pinned) < len(chosen):
            for one in pinned:
                self._pins.release(one)
            # Who holds it lets go some time; what cannot be read stays so, and the step before it has waited long enough.
            self.failed(chosen[0].facts.incarnation, chosen[0].facts.step, passing=readable)
            return
        logger.warning("all workers are gone: step %d is saved from memory", chosen[0].facts.step)
        snapshots = tuple(replace(one, digests=load_digests(one.slot.path, one.facts)) for one in pinned)
        self._begin(snapshots, leader=chosen[0].facts.rank == 0, reason=chosen[0].facts.reason or "flush")

    def _pin_soon(self, held: Held) -> Pinned | None:
        """A worker that is being killed hangs up a moment before it lets go of its slots; None if it does not.

        Raises: OSError, InvalidCheckpointError if that snapshot is not there, or cannot be read.
        """
        deadline = self._clock() + _LETTING_GO_S
        while (pinned := self._pins.pin(held.slot)) is None and self._clock() < deadline:
            time.sleep(0.01)
        if pinned is not None and pinned.facts != held.facts:
            self._pins.release(pinned)
            raise InvalidCheckpointError(f"{held.slot} holds another snapshot now")
        return pinned
