"""Sends the newest snapshots of this host to its buddy, in a thread of its own, and never holds anything up."""

import logging
import random
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field

from elastictrain.checkpoint.memory.records import load_digests, load_layout
from elastictrain.checkpoint.memory.slot import Slot, SnapshotFacts
from elastictrain.checkpoint.peers.client import PeerConnection
from elastictrain.checkpoint.peers.pace import Bucket, PaceOptions, StepTimes, decide_pace
from elastictrain.checkpoint.peers.placement import Peer
from elastictrain.checkpoint.peers.requests import Limits, Put
from elastictrain.errors import ElasticTrainError, TransientStorageError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReplicaOffer:
    """A snapshot that is ready, by the name of its slot."""

    slot: str
    facts: SnapshotFacts


def add_offer(waiting: Mapping[int, ReplicaOffer], offer: ReplicaOffer) -> dict[int, ReplicaOffer]:
    """What waits now, by rank: the newest of each."""
    rank = offer.facts.rank
    there = waiting.get(rank)
    if there is not None and there.facts.step > offer.facts.step:
        return dict(waiting)
    return {**waiting, rank: offer}


def complete_round(waiting: Mapping[int, ReplicaOffer], *, ranks: Iterable[int]) -> tuple[ReplicaOffer, ...]:
    """The offers of all `ranks`, in their order, if they are of one step; else none."""
    offers = tuple(waiting[rank] for rank in ranks if rank in waiting)
    steps = {offer.facts.step for offer in offers}
    return offers if len(steps) == 1 and len(offers) == len(tuple(ranks)) else ()


@dataclass(frozen=True, slots=True)
class ReplicatorOptions:
    """How insistently replicas are sent."""

    deadline_s: float = 600.0
    """For one rank's replica: after that it is broken off."""

    quiet_most_s: float = 30.0
    """How long a round waits at most for steps to compare with."""

    digest_limit_s: float = 60.0
    """How long the digests of a snapshot are waited for: host memory may have no room for them."""

    first_pause_s: float = 0.5
    longest_pause_s: float = 60.0
    pace: PaceOptions = field(default_factory=PaceOptions)
    limits: Limits = field(default_factory=Limits)


@dataclass(frozen=True, slots=True)
class Reports:
    """What a replicator tells, from its own thread."""

    replicated: Callable[[int, int, int, float], None]
    """Rank, step, bytes that were sent (0: the buddy had it already), seconds."""

    failed: Callable[[int, int, str], None]
    """Rank, step and reason; once for each, however often it is tried again."""


class _GoneError(Exception):
    """What was offered is not in its slot any more, or is being overwritten."""


class _NotYetError(Exception):
    """The digests are still being computed."""


class _ClosingError(Exception):
    """Sending is broken off because the replicator closes."""


class Replicator:
    """Replicates the snapshots of one host in one incarnation to one buddy."""

    def __init__(
        self,
        folder: str,
        *,
        own: Peer,
        buddy: Peer,
        token: bytes,
        reports: Reports,
        rate: float | None = None,
        options: ReplicatorOptions | None = None,
    ) -> None:
        """`folder`: of the run in host memory. `rate`: where to begin, in bytes/s, such as where a predecessor ended."""
        self._folder = folder
        self._ranks = own.ranks
        self._reports = reports
        self._options = options or ReplicatorOptions()
        self._connection = PeerConnection(buddy, token=token, limits=self._options.limits)
        self._buddy = buddy
        self._condition = threading.Condition()
        self._waiting: dict[int, ReplicaOffer] = {}
        self._failures = 0
        self._told: tuple[int, int, str] | None = None
        self._undigested = (-1, 0.0)
        """The step whose digests are waited for, and since when."""
        self._not_before = self._quiet_until = 0.0
        self._closing = threading.Event()
        self._deadline = 0.0
        pace = self._options.pace
        self._times = StepTimes(pace)
        self._bucket = Bucket(pace.first if rate is None else rate, sleep=self._nap)
        self._thread = threading.Thread(target=self._run, name="replicator", daemon=True)

    @property
    def rate(self) -> float:
        """What it has found to be no burden, in bytes/s."""
        return self._bucket.rate

    def start(self) -> None:
        """Begin to wait for offers."""
        self._thread.start()

    def offer(self, slot: str, facts: SnapshotFacts) -> None:
        """A whole snapshot lies in the slot of that name; an older one of its rank that still waits is given up."""
        with self._condition:
            self._waiting = add_offer(self._waiting, ReplicaOffer(slot, facts))
            self._condition.notify_all()

    def step_took(self, seconds: float) -> None:
        """A step of training ended; tells how fast replicas may be sent."""
        options = self._options.pace
        with self._condition:
            self._times.took(seconds)
            if len(self._times.sending) >= options.window:
                pace = decide_pace(
                    self._bucket.rate,
                    sending=self._times.sending,
                    quiet=self._times.quiet,
                    limited=self._bucket.limited,
                    options=options,
                )
                self._times.sending.clear()
                if pace.rate != self._bucket.rate:
                    logger.debug("replicas are sent at %.0f MB/s from now on: %s", pace.rate / 1e6, pace.reason)
                    self._bucket.set_rate(pace.rate)
            self._condition.notify_all()

    def close(self, timeout_s: float = 5.0) -> bool:
        """Break off what is being sent; whether the thread ended within the time."""
        self._closing.set()
        with self._condition:
            self._condition.notify_all()
        self._connection.break_off()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while offers := self._next_round():
            try:
                self._carry_out(offers)
            except _ClosingError:
                break
            except _GoneError as error:
                self._give_up(offers, str(error))
            except _NotYetError:
                self._wait_for_digests(offers)
            except Exception as error:
                # The edge of the thread: a replica that cannot be sent is no reason to send none any more.
                if not isinstance(error, ElasticTrainError | OSError):
                    logger.exception("step %d could not be replicated", offers[0].facts.step)
                self._failures += 1
                longest = min(self._options.longest_pause_s, self._options.first_pause_s * 2.0 ** min(self._failures - 1, 30))
                self._put_back(offers, pause_s=longest * (0.5 + 0.5 * random.random()))
        self._connection.close()

    def _next_round(self) -> tuple[ReplicaOffer, ...]:
        """Waits for all ranks' offers of one step; none when closing."""
        with self._condition:
            while not self._closing.is_set():
                now = time.monotonic()
                offers = complete_round(self._waiting, ranks=self._ranks)
                if not offers:
                    self._quiet_until = 0.0
                    self._condition.wait()
                    continue
                self._quiet_until = self._quiet_until or now + self._options.quiet_most_s
                wait_until = max(self._not_before, self._quiet_until if self._times.needs_quiet else 0.0)
                if now >= wait_until:
                    self._waiting = {rank: offer for rank, offer in self._waiting.items() if offer not in offers}
                    self._quiet_until = 0.0
                    return offers
                self._condition.wait(wait_until - now)
        return ()

    def _put_back(self, offers: tuple[ReplicaOffer, ...], *, pause_s: float) -> None:
        """For another attempt, unless newer ones have come."""
        with self._condition:
            for offer in offers:
                self._waiting = add_offer(self._waiting, offer)
            self._not_before = time.monotonic() + pause_s

    def _wait_for_digests(self, offers: tuple[ReplicaOffer, ...]) -> None:
        step, now = offers[0].facts.step, time.monotonic()
        if self._undigested[0] != step:
            self._undigested = (step, now)
        if now - self._undigested[1] > self._options.digest_limit_s:
            self._give_up(offers, f"its digests were not stored within {self._options.digest_limit_s:g} s")
        else:
            self._put_back(offers, pause_s=self._options.first_pause_s / 2)

    def _give_up(self, offers: tuple[ReplicaOffer, ...], reason: str) -> None:
        """It is not tried again, so whoever waits for it must be told, also if the last word was the same."""
        self._told = None
        self._fail(offers[0], reason)

    def _carry_out(self, offers: tuple[ReplicaOffer, ...]) -> None:
        """One round. All its slots are held from the beginning: a step that loses one rank is of no use."""
        with ExitStack() as stack:
            stack.callback(self._connection.close)
            stack.callback(self._switch, sending=False)
            slots = [self._hold(offer, stack) for offer in offers]
            for offer, slot in zip(offers, slots, strict=True):
                try:
                    self._send(offer, slot)
                except ElasticTrainError as error:
                    self._fail(offer, str(error))
                    raise
                except OSError as error:
                    self._fail(offer, f"{slot.path} cannot be read: {error}")
                    raise
        self._failures, self._told = 0, None

    def _hold(self, offer: ReplicaOffer, stack: ExitStack) -> Slot:
        try:
            slot = Slot.hold(f"{self._folder}/{offer.slot}")
        except OSError as error:
            raise _GoneError(f"{offer.slot} cannot be read: {error}") from error
        if slot is not None:
            stack.callback(slot.close)
        if slot is None or slot.facts != offer.facts:
            raise _GoneError(f"{offer.slot} holds something else by now")
        return slot

    def _send(self, offer: ReplicaOffer, slot: Slot) -> None:
        facts = offer.facts
        digests = load_digests(slot.path, facts)
        if digests is None:
            raise _NotYetError
        put = Put(facts, load_layout(self._folder, facts.layout), digests)
        began = time.monotonic()
        self._deadline = began + self._options.deadline_s
        sent = self._connection.put(put, slot, before_frame=self._before_frame)
        size_bytes = put.layout.size_bytes if sent else 0
        self._reports.replicated(facts.rank, facts.step, size_bytes, time.monotonic() - began)

    def _before_frame(self, count: int) -> None:
        self._switch(sending=True)
        self._bucket.take(count)
        self._check_time()

    def _switch(self, *, sending: bool) -> None:
        with self._condition:
            self._times.switch(sending=sending)

    def _nap(self, seconds: float) -> None:
        self._closing.wait(seconds)
        self._check_time()

    def _check_time(self) -> None:
        if self._closing.is_set():
            raise _ClosingError
        if time.monotonic() > self._deadline:
            limit_s, rate = self._options.deadline_s, self._bucket.rate
            message = (
                f"{self._buddy.place}: a replica took longer than {limit_s:g} s at {rate / 1e6:.0f} MB/s, and is broken off"
            )
            raise TransientStorageError(message)

    def _fail(self, offer: ReplicaOffer, reason: str) -> None:
        told = (offer.facts.rank, offer.facts.step, reason)
        if told != self._told and not self._closing.is_set():
            self._told = told
            self._reports.failed(*told)
