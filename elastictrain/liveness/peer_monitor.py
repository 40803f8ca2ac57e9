"""Looks at the other ranks when this one is silent for long: whether it waits in vain, and for whom."""

import logging
import threading
import time
from collections.abc import Callable

from elastictrain.config.composed import FaultGroup
from elastictrain.distributed.bounded import within
from elastictrain.liveness.diagnosis import Entered, HangDiagnosis, diagnose
from elastictrain.liveness.heartbeats import HeartbeatStore
from elastictrain.liveness.progress import ProgressMark
from elastictrain.liveness.watchdog import LostPeer, bound_s

logger = logging.getLogger(__name__)

_SHARE = 0.5
"""Of its bound: a rank that is silent for so long tells which collectives it entered, and begins to look at the others."""

_BEATS = 3.0
"""Heartbeats that may be missing of a rank that is not frozen."""

_LATE_S = 0.5
_DUMP_LIMIT_S = 3.0


class PeerMonitor:
    """A thread of its own: the store that it asks may be what does not answer."""

    def __init__(
        self,
        heartbeats: HeartbeatStore,
        *,
        rank: int,
        mark: Callable[[], ProgressMark],
        entered: Callable[[], Entered],
        options: FaultGroup,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`entered` asks the library of the collectives, which may hang."""
        self._heartbeats = heartbeats
        self._rank = rank
        self._mark = mark
        self._entered = entered
        self._options = options
        self._clock = clock
        self._told: ProgressMark | None = None
        self._found: tuple[ProgressMark, HangDiagnosis, float] | None = None
        """Of the silence of this mark, and when it was found."""
        self.failed_peer: LostPeer | None = None
        """A rank that has said that it ends because of an error."""
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="peer-monitor", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """No more looking; one that is under way is not waited for."""
        self._closed.set()
        self._thread.join(timeout=1.0)

    @property
    def in_vain(self) -> bool:
        """Whether this rank has nothing to wait for any more, when it has been silent beyond its bound."""
        found = self._found
        return found is not None and found[0] is self._mark() and found[1].is_in_vain(self._rank)

    @property
    def diagnosis(self) -> HangDiagnosis | None:
        """Whose fault the silence at hand is; None as long as it is too short for the question, or nobody answers."""
        found = self._found
        return found[1].later(self._clock() - found[2]) if found is not None and found[0] is self._mark() else None

    def turn(self) -> None:
        """Look once. Raises: RuntimeError, ValueError if the store does not answer."""
        if self.failed_peer is None and (name := self._heartbeats.failed_peer()) is not None:
            self.failed_peer = LostPeer(name, self._clock())
        mark = self._mark()
        if self._clock() - mark.since_s < _SHARE * bound_s(mark, self._options):
            self._told, self._heartbeats.entered = None, Entered()
            return
        if self._told is not mark:
            self._heartbeats.entered = within(_DUMP_LIMIT_S, self._entered) or Entered()
            self._told = mark
        statuses = [self._heartbeats.own_status(mark), *self._heartbeats.statuses()]
        frozen_s = _BEATS * self._options.heartbeat_s + _LATE_S
        found = diagnose(sorted(statuses, key=lambda one: one.rank), frozen_s=frozen_s)
        self._found = (mark, found, self._clock())

    def _run(self) -> None:
        while not self._closed.wait(self._options.heartbeat_s):
            try:
                self.turn()
            except (RuntimeError, ValueError, KeyError, TypeError) as error:
                # Then nothing is known of the others, and the limits that need no knowledge hold.
                self._found = None
                logger.debug("the other ranks cannot be seen: %s", error)
