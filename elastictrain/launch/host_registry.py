"""The launcher's storage threads: a stalled store must not keep the launcher from watching its workers."""

import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from elastictrain.errors import StorageError
from elastictrain.launch.membership.observation import ClusterState, observe, observe_datagrams, outdated
from elastictrain.launch.membership.records import End, Generation, HostRecord, HostState
from elastictrain.launch.membership.store import MembershipStore
from elastictrain.lease.chain import BEAT_S
from elastictrain.storage.bounded_read import run_concurrently
from elastictrain.storage.failures import reason_of

logger = logging.getLogger(__name__)

_HURRIED_S = 0.2  # seconds between reads while a group is forming: nobody trains meanwhile
_IDLE_SHARE = 4.0  # pause between reads of generations, in durations of one read: news then seldom wait for a read


class HostRegistry:
    """Exchanges records, reads generations and proposes them, each in its own thread."""

    def __init__(
        self,
        membership: MembershipStore,
        record: HostRecord,
        *,
        poll_s: float,
        lost_s: float,
        find_address: Callable[[], str] | None = None,
        on_generation: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`find_address` is called every `lost_s`, in a storage thread; None: the address in `record` stays. `on_generation` is
        called, in such a thread too, when a newer generation is known."""
        self._membership = membership
        self._poll_s = poll_s
        self._lost_s = lost_s
        self._clock = clock
        self._find_address = find_address
        self._on_generation = on_generation
        self._found_s = clock()
        self.attentive = True  # whether it reads other hosts' records; during training only a group's first host does
        self.hears: tuple[str, ...] = ()
        self._lock = threading.Lock()  # guards all fields below, which several threads change
        self.record = record
        self.known = ClusterState(me=record)
        self._proposal: Generation | None = None
        self._reads = {"records": 0, "generations": 0}
        self._troubles: dict[str, str] = {}

        self._written: HostRecord | None = None
        self._written_s = float("-inf")
        self._closed = threading.Event()
        turns = {"records": self._exchange_records, "generations": self._look_for_generations, "proposals": self._propose}
        self._awake = {name: threading.Event() for name in turns}
        self._threads = [
            threading.Thread(target=self._run, args=(name, turn), name=f"registry {name}", daemon=True)
            for name, turn in turns.items()
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def close(self, *, limit_s: float) -> None:
        """Write what is pending, within `limit_s`."""
        self._closed.set()
        for awake in self._awake.values():
            awake.set()
        until_s = time.monotonic() + limit_s
        for thread in self._threads:
            thread.join(timeout=max(0.0, until_s - time.monotonic()))

    def update(self, state: HostState, *, reason: str = "", **changes: Any) -> None:
        """Change this host's record; `changes` are its other fields that change."""
        with self._lock:
            self.record = replace(self.record, state=state, reason=reason, beat=self.record.beat + 1, **changes)
        self._awake["records"].set()

    def post(self, record: Generation | End) -> None:
        """Have a generation created, or an end published in this host's record.
        An end is always published. A generation is tried once; the caller may propose a newer one after it."""
        with self._lock:
            if isinstance(record, End):
                self.record = replace(self.record, end=record, beat=self.record.beat + 1)
                self._take_note(self.known)
            elif self._proposal is None or self._proposal.number != record.number:
                self._proposal = record
        self._awake["records" if isinstance(record, End) else "proposals"].set()

    def receive(self, records: Iterable[HostRecord]) -> None:
        """Merge records that arrived by datagram, before storage shows them."""
        now_s = self._clock()
        with self._lock:
            observed = observe_datagrams(self.known.observed, records, own=self.record.host, now_s=now_s)
            self._take_note(replace(self.known, observed=observed))

    def wake(self, generation: int = 0) -> None:
        """Read at once: another host has a new record, or knows this generation."""
        self._awake["records"].set()
        newest = self.known.newest
        if generation > (0 if newest is None else newest.number):
            self._awake["generations"].set()

    def _run(self, name: str, turn: Callable[[bool], None]) -> None:
        while True:
            # Clear before the turn: an event after this is either seen in the turn, or ends the wait after it.
            self._awake[name].clear()
            began_s = self._clock()
            last = self._closed.is_set()
            trouble = ""
            try:
                turn(last)
            except Exception as error:  # noqa: BLE001  # the edge of the thread: without it this host would wait for ever
                trouble = str(error) if isinstance(error, StorageError) else f"{type(error).__name__}: {reason_of(error)}"
            with self._lock:
                if trouble and trouble not in self._troubles.values():
                    logger.warning("the registry cannot be reached, and is tried again: %s", trouble)
                self._troubles[name] = trouble
                self.known = replace(self.known, trouble=next(filter(None, self._troubles.values()), ""))
            if last:
                return
            if trouble:
                # Requests that fail are repeated at once by their callers; storage must not be asked as often.
                self._closed.wait(self._poll_s)
                continue
            known, pause_s = self.known, self._poll_s
            if known.newest is None or known.newest.terminal or known.ends:
                # The interval counts from begin to begin: on slow storage one read of the records follows another.
                took_s = self._clock() - began_s
                pause_s = max(min(self._poll_s, _HURRIED_S) - took_s, 0.0 if name == "records" else _IDLE_SHARE * took_s)
            self._awake[name].wait(pause_s)

    def _exchange_records(self, last: bool) -> None:
        """One turn, in which no request waits for another, however many hosts exist."""
        if self._find_address is not None and self._clock() - self._found_s >= self._lost_s:
            address, self._found_s = self._find_address(), self._clock()
            with self._lock:
                if address != self.record.address:
                    self.record = replace(self.record, address=address, beat=self.record.beat + 1)
        records = None
        if last or not self.attentive:
            self._write_record()
        else:
            # What is read in parallel with a write of this host's record is not evidence about that record.
            _, records = run_concurrently([self._write_record, self._membership.records])
        now_s = self._clock()
        with self._lock:
            known = self.known
            if records is not None:
                observed = observe(known.observed, records, own=self.record.host, now_s=now_s)
                known = replace(known, observed=observed, read_s=now_s)
            self._reads["records"] += 1
            self._take_note(known)
            known = self.known
        there = {one.host for one in records or ()}
        for host in there.intersection(outdated(known.observed, now_s=now_s)):
            # How the newest generation ended is only in its members' records.
            if known.newest is None or known.newest.terminal or not known.newest.has(host):
                self._membership.remove(host)

    def _look_for_generations(self, last: bool) -> None:
        if last:
            return
        now_s = self._clock()
        self._learn(self._membership.newest(), now_s)
        with self._lock:
            self._reads["generations"] += 1
            self._take_note(self.known)

    def _propose(self, last: bool) -> None:
        if (generation := self._proposal) is not None:
            try:
                won = self._membership.create(generation)
            finally:
                # By the time that failing storage answers again, another generation may be due.
                with self._lock:
                    self._proposal = None
            with self._lock:
                self.known = replace(self.known, created=self.known.created | {generation.number})
            if won and self._reads["generations"]:
                self._learn(generation, self._clock())
            self._awake["generations"].set()
        # Last: the supervisor acts on what is known by now meanwhile.
        self._membership.settle()

    def _learn(self, newest: Generation | None, now_s: float) -> None:
        """Record `newest` as the newest generation, unless a newer one is known."""
        before = self.known.newest
        if newest is None or (before is not None and before.number >= newest.number):
            return
        if before is not None and before.number == newest.number - 1:
            follows = not before.terminal
        else:
            follows = self._membership.follows_another(newest.number)
        with self._lock:
            known = self.known
            if known.newest is None or known.newest.number < newest.number:
                slow, since_s = known.newest.slow if known.newest is not None else None, known.slow_since_s
                known = replace(known, newest=newest, newest_since_s=now_s, follows_another=follows)
                known = replace(known, slow_since_s=since_s if newest.slow == slow else now_s)
                self._take_note(replace(known, ends={}, ended_since_s=None))
        self._on_generation()

    def _take_note(self, known: ClusterState) -> None:
        """Publish the new state, with the ends from all records; an end once read stays, whatever a later read shows."""
        ends, since_s, now_s = dict(known.ends), known.ended_since_s, self._clock()
        if known.newest is not None and not known.newest.terminal:
            records = [self.record, *(one.record for one in known.observed.values())]
            told = [one.end for one in records if one.end is not None and one.end.host == one.host]
            ends |= {end.host: end for end in told if end.generation == known.newest.number}
        if ends and since_s is None:
            since_s = now_s
            # The next generation may exist soon.
            self._awake["generations"].set()
        reads = min(self._reads.values())
        began_s = now_s if reads and not known.reads else known.began_s
        self.known = replace(known, began_s=began_s, ends=ends, ended_since_s=since_s, reads=reads)

    def _write_record(self) -> None:
        now_s, before = self._clock(), self._written
        with self._lock:
            # During training heartbeats watch this host; only hosts that join read its record.
            interval_s = min(self._lost_s / 2, BEAT_S) if self.record.state is HostState.BUSY else self._poll_s
            record = replace(self.record, hears=self.hears)
            if record == before and now_s - self._written_s < interval_s:
                return
            if before is not None and record.beat == before.beat:
                record = replace(record, beat=record.beat + 1)
                self.record = replace(self.record, beat=record.beat)
        self._membership.write_record(record)
        self._written, self._written_s = record, now_s
