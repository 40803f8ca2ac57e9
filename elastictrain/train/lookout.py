"""Looks at the other ranks when this one is silent for long: whether it waits in vain, and for whom."""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from elastictrain.config.fault import FaultGroup
from elastictrain.distributed.board import Board
from elastictrain.distributed.bounded import within
from elastictrain.distributed.entered import Entered
from elastictrain.fault.hang.guilty import Blame, blame
from elastictrain.fault.hang.standing import Standing, from_beat
from elastictrain.fault.watchdog import LostPeer, bound_s
from elastictrain.fault.whereabouts import Mark

logger = logging.getLogger(__name__)

_SHARE = 0.5
"""Of its bound: a rank that is silent for so long tells which collectives it entered, and begins to look at the others."""

_BEATS = 3.0
"""Heartbeats that may be missing of a rank that is not frozen."""

_LATE_S = 0.5
_DUMP_LIMIT_S = 3.0


@dataclass(frozen=True, slots=True)
class _Found:
    mark: Mark
    blame: Blame
    at_s: float


class Lookout:
    """A thread of its own: the store that it asks may be what does not answer."""

    def __init__(
        self,
        board: Board,
        *,
        rank: int,
        mark: Callable[[], Mark],
        entered: Callable[[], Entered],
        options: FaultGroup,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`entered` asks the library of the collectives, which may hang."""
        self._board = board
        self._rank = rank
        self._mark = mark
        self._entered = entered
        self._options = options
        self._clock = clock
        self._told: Mark | None = None
        self._own = Entered()
        self._found: _Found | None = None
        self._fallen: LostPeer | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lookout", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def close(self) -> None:
        """No more looking; one that is under way is not waited for."""
        self._closed.set()
        self._thread.join(timeout=1.0)

    @property
    def in_vain(self) -> bool:
        """Whether this rank has nothing to wait for any more, when it has been silent beyond its bound."""
        found = self._found
        return found is not None and found.mark is self._mark() and found.blame.is_in_vain(self._rank)

    @property
    def blame(self) -> Blame | None:
        """Whose fault the silence at hand is; None as long as it is too short for the question, or nobody answers."""
        found = self._found
        if found is None or found.mark is not self._mark():
            return None
        return found.blame.later(self._clock() - found.at_s)

    @property
    def fallen(self) -> LostPeer | None:
        """A rank that has said that it ends because of an error."""
        return self._fallen

    def turn(self) -> None:
        """Look once. Raises: RuntimeError, ValueError if the store does not answer."""
        if self._fallen is None and (name := self._board.fallen()) is not None:
            self._fallen = LostPeer(name, self._clock())
        mark = self._mark()
        silent_s = self._clock() - mark.since_s
        if silent_s < _SHARE * bound_s(mark, self._options):
            if self._told is not None:
                self._told = None
                self._board.add({})
            return
        if self._told is not mark:
            self._own = within(_DUMP_LIMIT_S, self._entered) or Entered()
            self._board.add({"sequences": dict(self._own.sequences), "collective": self._own.last})
            self._told = mark
        frozen_s = _BEATS * self._options.heartbeat_s + _LATE_S
        self._found = _Found(mark, blame(self._standings(mark), frozen_s=frozen_s), self._clock())

    def _standings(self, mark: Mark) -> list[Standing]:
        hosts = self._board.hosts
        own = Standing(
            self._rank,
            hosts[self._rank],
            mark,
            self._clock() - mark.since_s,
            bound_s(mark, self._options),
            sequences=self._own.sequences or None,
            collective=self._own.last,
        )
        standings = [own]
        for rank, beat in self._board.beats().items():
            if beat is not None:
                standing = from_beat(beat.told, rank=rank, host=hosts[rank], still_s=beat.still_s)
                standings += [standing] if standing is not None else []
        return sorted(standings, key=lambda one: one.rank)

    def _run(self) -> None:
        while not self._closed.wait(self._options.heartbeat_s):
            try:
                self.turn()
            except (RuntimeError, ValueError, KeyError, TypeError) as error:
                # Then nothing is known of the others, and the limits that need no knowledge hold.
                self._found = None
                logger.debug("the other ranks cannot be seen: %s", error)
