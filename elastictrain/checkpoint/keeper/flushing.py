"""What happens to snapshots when nobody is there any more: looked for in a thread, since storage may be slow, or away."""

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Protocol

from elastictrain.checkpoint.keeper.desk import Station
from elastictrain.checkpoint.keeper.facts import RunFacts
from elastictrain.checkpoint.keeper.flush import FlushLimits, choose_flush, last_station
from elastictrain.checkpoint.keeper.jobs import Cause, cause_of
from elastictrain.checkpoint.keeper.lifetime import KEPT_S
from elastictrain.checkpoint.keeper.pins import Pinned, Pins
from elastictrain.checkpoint.keeper.run_folder import RunFolder
from elastictrain.checkpoint.memory.inventory import Held
from elastictrain.checkpoint.memory.records import load_digests
from elastictrain.errors import ElasticTrainError, InvalidCheckpointError
from elastictrain.storage.store import Store

logger = logging.getLogger(__name__)

_LETTING_GO_S = 2.0
_RETRY_S, _RETRY_AT_MOST_S = 5.0, 60.0
"""Between two tries to write what storage refused: each pause is twice the one before."""

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
        self._run_folder = RunFolder(store)
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
        """Whether what was only in memory has been written, or cannot be now."""

        self.unsaved = False
        """Whether storage refused it, and it is kept to be tried again."""

        self._refused = ""
        """Why storage refused a step since the last time that all steps were tried; empty if it did not."""

        self._retry_s = _RETRY_S
        self._next_s = 0.0

    def interrupt(self) -> None:
        """Somebody came back: what has to be saved is another question when they are gone again."""
        self._since_s = None
        self._retry_s = _RETRY_S
        self._begin_round()

    def try_again(self) -> None:
        """Nobody came back. Look again for what is to be saved, if it is time."""
        if self._clock() >= self._next_s:
            self._begin_round()

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

    def _begin_round(self) -> None:
        self._tried.clear()
        self._refused = ""
        self.over = self.unsaved = False

    def failed(self, incarnation: str, step: int, *, cause: Cause, error: str = "") -> None:
        """A step could not be saved."""
        if cause is Cause.PASSING and self._since_s is not None and self._clock() - self._since_s < self._facts.save_timeout_s:
            # Nobody is there who would try again, and an older step would fare no better.
            self._tried.discard((incarnation, step))
            self._pause_s = AGAIN_S
        elif cause is not Cause.OTHER:
            self._refused = error or self._refused

    def _choose(self, station: Station, own: Sequence[Held], done: Collection[int], since_s: float, pause_s: float) -> None:
        """The thread."""
        found: tuple[Held, ...] = ()
        refused = ""
        time.sleep(pause_s)
        try:
            if self._run_folder.is_there():
                found = choose_flush(
                    self._store,
                    station,
                    own,
                    done=done,
                    limits=FlushLimits(leader_s=self._facts.grace_s, storage_s=self._facts.save_timeout_s),
                    needed_no_more=lambda: self._since_s != since_s,
                )
        except Exception as error:
            # The edge of the thread.
            if not isinstance(error, ElasticTrainError):
                logger.exception("what is in memory only cannot be saved")
            logger.warning("what is in memory only cannot be saved: %s", error)
            refused = str(error) if cause_of(error) is not Cause.OTHER else ""
        self._later(lambda: self._on_found(found, since_s, refused))

    def _on_found(self, found: Sequence[Held], since_s: float, refused: str) -> None:
        self.busy = False
        if self._since_s != since_s:
            return
        self._refused = refused or self._refused
        if not found:
            self._end_round(since_s)
            return
        self._tried.add((found[0].facts.incarnation, found[0].facts.step))
        self._save(found)

    def _end_round(self, since_s: float) -> None:
        """All steps were tried. What storage refused stays in memory for a while: it is nowhere else."""
        self.over = True
        left_s = since_s + KEPT_S - self._clock()
        self.unsaved = bool(self._refused) and left_s > 0
        if self._refused:
            what = f"is kept for {left_s / 3600:.1f} h more" if self.unsaved else "is given up"
            logger.warning("what storage refused %s: %s", what, self._refused)
        self._next_s = self._clock() + self._retry_s
        self._retry_s = min(2 * self._retry_s, _RETRY_AT_MOST_S)

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
            self.failed(chosen[0].facts.incarnation, chosen[0].facts.step, cause=Cause.PASSING if readable else Cause.OTHER)
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
