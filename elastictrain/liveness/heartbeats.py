"""Heartbeats of all ranks in the shared store, and the monitor that reads them: no backend reports which peer is missing."""

import logging
import time
from collections.abc import Callable
from dataclasses import KW_ONLY, InitVar, dataclass, field, replace
from datetime import timedelta

import torch.distributed as dist

from elastictrain.bounded_json import encode_record, parse_record
from elastictrain.config.composed import FaultGroup
from elastictrain.distributed.bounded import within
from elastictrain.fault.closable_thread import ClosableThread
from elastictrain.liveness.diagnosis import HangDiagnosis, RankStatus, diagnose
from elastictrain.liveness.flight_recorder import Entered
from elastictrain.liveness.progress import ProgressMark
from elastictrain.liveness.watchdog import LostPeer, bound_s

logger = logging.getLogger(__name__)

_READ_TIMEOUT = timedelta(seconds=2)
_READ_LIMIT_S = 3.0
_FALLEN = "fallen"
_GONE = "its host may be the one that is gone"

_SHARE = 0.5  # of its bound: a rank silent for so long publishes its last collectives and begins to watch the others
_BEATS = 3.0  # heartbeats that a rank may miss before it counts as frozen
_LATE_S = 0.5
_DUMP_LIMIT_S = 3.0


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """What a rank writes of itself. `time` and the times in the mark are by its host's clocks, which may differ from others."""

    status: RankStatus
    time: float
    number: int


@dataclass(eq=False)
class HeartbeatStore(ClosableThread):
    """Heartbeats through the shared store, written by a thread.

    A connection that is blocked in a wait blocks all its users, so the store is cloned twice: for writing, so that a
    blocked read delays no heartbeat, and for reading.
    """

    store: InitVar[dist.Store]
    _: KW_ONLY
    rank: int
    hosts: tuple[str, ...]  # by rank
    mark: Callable[[], ProgressMark]  # its times are by `stopwatch`
    options: FaultGroup
    clock: Callable[[], float] = time.time
    stopwatch: Callable[[], float] = time.monotonic
    entered: Entered = field(default_factory=Entered, init=False)  # goes into the next heartbeats

    def __post_init__(self, store: dist.Store) -> None:
        self._writing: dist.Store = store.clone()  # type: ignore[attr-defined]  # missing in the stub of torch
        self._reading: dist.Store = store.clone()  # type: ignore[attr-defined]
        for connection in (self._writing, self._reading):
            connection.set_timeout(_READ_TIMEOUT)
        self._names = [f"rank {number} on {host}" for number, host in enumerate(self.hosts)]
        self._seen: dict[int, tuple[int, float]] = {}
        self._prepare(self._write, name="heartbeat", close_s=2 * _READ_TIMEOUT.total_seconds())

    def own_status(self, mark: ProgressMark) -> RankStatus:
        silent_s = max(0.0, self.stopwatch() - mark.since_s)
        return RankStatus(self.rank, self.hosts[self.rank], mark, silent_s, bound_s(mark, self.options), entered=self.entered)

    def statuses(self) -> list[RankStatus]:
        """The status of each other rank that was heard. `still_s` is by this host's clock, since the first look.

        May take as long as the store takes to answer. Raises: RuntimeError.
        """
        statuses = []
        for rank, beat in self._read_all().items():
            if beat is None:
                continue
            now_s = self.stopwatch()
            number, since_s = self._seen.get(rank, (beat.number, now_s))
            self._seen[rank] = (beat.number, since_s if beat.number == number else now_s)
            still_s = now_s - self._seen[rank][1]
            statuses.append(replace(beat.status, silent_s=beat.status.silent_s + still_s, still_s=still_s))
        return statuses

    def last_heard(self) -> dict[str, str]:
        """Where each other rank was, and how long ago, oldest first. Bounded in time, never raises."""

        def read() -> dict[str, str]:
            """Ranks that were never heard come first; a store that fails is the only entry."""
            try:
                beats = self._read_all()
            except RuntimeError as error:
                return {"the shared store": f"does not answer ({type(error).__name__}): {_GONE}"}
            news = []
            for rank, beat in beats.items():
                age_s = float("inf") if beat is None else max(0.0, self.clock() - beat.time)
                text = "never heard in this generation" if beat is None else f"{beat.status.mark}, {age_s:.1f} s ago"
                news.append((age_s, self._names[rank], text))
            return {name: text for _, name, text in sorted(news, reverse=True)}

        # The store's host may have died silently: then a request to it never returns.
        heard = within(_READ_LIMIT_S, read)
        return {"the shared store": f"does not answer: {_GONE}"} if heard is None else heard

    def announce_failure(self) -> None:
        """Announce that this rank ends because of an error: a collective may never notice. Bounded, never raises."""
        # The first announcement stays: later failures follow from it.
        within(_READ_LIMIT_S / 2, lambda: self._reading.compare_set(_FALLEN, "", self._names[self.rank]))

    def failed_peer(self) -> str | None:
        """The name of another rank that announced a failure, if any. Blocks and raises as `statuses`."""
        told = self._reading.get(_FALLEN).decode() if self._reading.check([_FALLEN]) else ""
        return told if told not in ("", self._names[self.rank]) else None

    def _read_all(self) -> dict[int, Heartbeat | None]:
        """The newest heartbeat of each other rank; None if it has written none, or one of another release."""
        beats: dict[int, Heartbeat | None] = {rank: None for rank in range(len(self.hosts)) if rank != self.rank}
        for rank in beats:
            if self._reading.check([f"beat/{rank}"]):
                try:
                    beats[rank] = parse_record(self._reading.get(f"beat/{rank}"), Heartbeat)
                except ValueError as error:
                    logger.debug("heartbeat of rank %d: %s", rank, error)
        return beats

    def _write(self) -> None:
        number = 0
        while True:
            number += 1
            beat = encode_record(Heartbeat(self.own_status(self.mark()), self.clock(), number))
            try:
                self._writing.set(f"beat/{self.rank}", beat.decode())
            except RuntimeError as error:
                # The store's host may have died; then the collectives will notice.
                logger.debug("heartbeat not written: %s", error)
            if self._closed.wait(self.options.heartbeat_s):
                return


class PeerMonitor(ClosableThread):
    """Checks the other ranks when this one is silent for long: whether it waits in vain, and for which rank.

    It has a thread of its own, because the store may be what does not answer.
    """

    def __init__(self, heartbeats: HeartbeatStore, *, entered: Callable[[], Entered]) -> None:
        """`entered` asks the library of the collectives, which may hang."""
        self._heartbeats = heartbeats
        self._entered = entered
        self._told: ProgressMark | None = None
        self._found: tuple[ProgressMark, HangDiagnosis, float] | None = None  # the silent mark, its diagnosis, and when
        self.failed_peer: LostPeer | None = None  # a rank that announced a failure
        self._prepare(self._run, name="peer-monitor", close_s=1.0)

    @property
    def in_vain(self) -> bool:
        """Whether this rank, once silent beyond its bound, has nothing to wait for any more."""
        found = self._found
        return found is not None and found[0] is self._heartbeats.mark() and found[1].is_in_vain(self._heartbeats.rank)

    @property
    def diagnosis(self) -> HangDiagnosis | None:
        """The ranks that cause the current silence; None while it is too short, or the store does not answer."""
        found = self._found
        if found is None or found[0] is not self._heartbeats.mark():
            return None
        return found[1].later(self._heartbeats.stopwatch() - found[2])

    def turn(self) -> None:
        """Check once. Raises: RuntimeError if the store does not answer."""
        if self.failed_peer is None and (name := self._heartbeats.failed_peer()) is not None:
            self.failed_peer = LostPeer(name, self._heartbeats.stopwatch())
        mark = self._heartbeats.mark()
        if self._heartbeats.stopwatch() - mark.since_s < _SHARE * bound_s(mark, self._heartbeats.options):
            self._told, self._heartbeats.entered = None, Entered()
            return
        if self._told is not mark:
            self._heartbeats.entered = within(_DUMP_LIMIT_S, self._entered) or Entered()
            self._told = mark
        statuses = [self._heartbeats.own_status(mark), *self._heartbeats.statuses()]
        frozen_s = _BEATS * self._heartbeats.options.heartbeat_s + _LATE_S
        found = diagnose(sorted(statuses, key=lambda one: one.rank), frozen_s=frozen_s)
        self._found = (mark, found, self._heartbeats.stopwatch())

    def _run(self) -> None:
        while not self._closed.wait(self._heartbeats.options.heartbeat_s):
            try:
                self.turn()
            except (RuntimeError, ValueError) as error:
                # Nothing is known of the others then; the limits that need no knowledge hold.
                self._found = None
                logger.debug("the other ranks cannot be seen: %s", error)
