"""Sends snapshots of this host to the host that keeps its replicas, in its own thread, without blocking training."""

import logging
import random
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress

from elastictrain.checkpoint.memory.folder import Held
from elastictrain.checkpoint.memory.layout import RankDigests
from elastictrain.checkpoint.memory.records import compute_digests, load_digests, load_layout, store_digests
from elastictrain.checkpoint.memory.slot import Slot, SnapshotFacts, SnapshotId, facts_in
from elastictrain.checkpoint.peers.client import PeerConnection
from elastictrain.checkpoint.peers.pace import Pacer
from elastictrain.checkpoint.peers.placement import Peer
from elastictrain.checkpoint.peers.requests import Limits, Put
from elastictrain.errors import ElasticTrainError, TransientStorageError

logger = logging.getLogger(__name__)


DEADLINE_S = 600.0  # per replica of one rank, which is then broken off
QUIET_MOST_S = 30.0  # longest wait of a step's replicas for training steps to compare with
LOCKED_MOST_S = 60.0  # longest wait for a slot that its worker has locked to overwrite it
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 60.0


class _GoneError(Exception):
    """The snapshot cannot be sent: its slot holds another one, or its digests are missing."""


class _BrokenOffError(Exception):
    """Sending is broken off, because the replicator closes or a newer step has come."""


class Replicator:
    """Replicates the snapshots of one host in one incarnation to one other host."""

    def __init__(
        self,
        folder: str,
        *,
        target: Peer,
        token: bytes,
        replicated: Callable[[int, int, int, float], None],
        failed: Callable[[int, int, str], None],
        pacer: Pacer,
        limits: Limits | None = None,
    ) -> None:
        """`folder`: of the run in host memory. `pacer`: keeps measurements of this network.

        Called in the replicator's thread: `replicated` with rank, step, bytes sent (0: the target had it already) and seconds;
        `failed` with rank, step and reason, once for each, however often it is retried.
        """
        self._folder = folder
        self._replicated = replicated
        self._failed = failed
        self._connection = PeerConnection(target, token=token, limits=limits)
        self._target = target
        self._condition = threading.Condition()
        self._waiting: tuple[Held, ...] = ()
        self._safe: SnapshotId | None = None
        self._failures = 0
        self._reported: tuple[int, int, str] | None = None
        self._not_before = 0.0
        self._closing = threading.Event()
        self._deadline = 0.0
        self._pacer = pacer
        self._thread = threading.Thread(target=self._run, name="replicator", daemon=True)
        self._thread.start()

    def send(self, held: Sequence[Held], *, safe: SnapshotId | None = None) -> None:
        """Send the whole snapshots of one step, one per rank; replaces an older step that still waits. The replicas of `safe`
        stay."""
        with self._condition:
            self._waiting, self._safe = tuple(held), safe
            self._condition.notify_all()

    def step_took(self, seconds: float) -> None:
        """Report a training step's duration, which sets the rate of replicas."""
        if reason := self._pacer.step_took(seconds):
            logger.debug("replicas are sent at %.0f MB/s from now on: %s", self._pacer.rate / 1e6, reason)
        with self._condition:
            self._condition.notify_all()

    def close(self, timeout_s: float = 5.0) -> bool:
        """Break off what is being sent; returns whether the thread ended within the time."""
        self._closing.set()
        with self._condition:
            self._condition.notify_all()
        self._connection.break_off()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while held := self._next_step():
            try:
                self._send_step(held)
            except _BrokenOffError:
                continue
            except _GoneError as error:
                # Not retried, so it is reported to the waiting workers even if the last reason was the same.
                self._reported = None
                self._fail(held[0].facts, str(error))
            except Exception as error:
                # The edge of the thread: one failed replica must not stop all later ones.
                if not isinstance(error, ElasticTrainError | OSError):
                    logger.exception("step %d could not be replicated", held[0].facts.step)
                self._failures += 1
                longest = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(self._failures - 1, 30))
                with self._condition:
                    self._waiting = self._waiting or held
                    self._not_before = time.monotonic() + longest * (0.5 + 0.5 * random.SystemRandom().random())
        self._connection.close()

    def _next_step(self) -> tuple[Held, ...]:
        """Wait for snapshots to send; empty when closing."""
        quiet_until_s = 0.0
        with self._condition:
            while not self._closing.is_set():
                wait_s = None
                if self._waiting:
                    now = time.monotonic()
                    quiet_until_s = quiet_until_s or now + QUIET_MOST_S
                    wait_s = max(self._not_before, quiet_until_s if self._pacer.needs_quiet else 0.0) - now
                    if wait_s <= 0:
                        held, self._waiting = self._waiting, ()
                        return held
                self._condition.wait(wait_s)
        return ()

    def _send_step(self, held: tuple[Held, ...]) -> None:
        """Lease all slots first: a step that loses one rank is useless."""
        digests = self._digests(held)
        with ExitStack() as stack:
            stack.callback(self._connection.close)
            stack.callback(self._pacer.switch, sending=False)
            slots = []
            for one in held:
                try:
                    slot = Slot.hold(f"{self._folder}/{one.slot}")
                except OSError as error:
                    raise _GoneError(f"{one.slot} cannot be read: {error}") from error
                if slot is not None:
                    stack.callback(slot.close)
                if slot is None or slot.facts != one.facts:
                    raise _GoneError(f"{one.slot} holds something else by now")
                slots.append(slot)
            for one, slot, of_slot in zip(held, slots, digests, strict=True):
                try:
                    put = Put(one.facts, load_layout(self._folder, one.facts.layout), of_slot, self._safe)
                    began = time.monotonic()
                    self._deadline = began + DEADLINE_S
                    sent = self._connection.put(put, slot, before_frame=self._before_frame)
                    size_bytes = put.layout.size_bytes if sent else 0
                    self._replicated(one.facts.rank, one.facts.step, size_bytes, time.monotonic() - began)
                except (ElasticTrainError, OSError) as error:
                    reason = str(error) if isinstance(error, ElasticTrainError) else f"{slot.path} cannot be read: {error}"
                    self._fail(one.facts, reason)
                    raise
        self._failures, self._reported = 0, None

    def _digests(self, held: tuple[Held, ...]) -> list[RankDigests]:
        """Digests of each snapshot, computed and stored where they are missing. The slot may still be locked by its worker."""
        give_up_s = time.monotonic() + LOCKED_MOST_S
        found = []
        for one in held:
            path = f"{self._folder}/{one.slot}"
            while (digests := load_digests(path, one.facts) or self._digest(path, one.facts)) is None:
                if time.monotonic() > give_up_s:
                    raise _GoneError(f"{one.slot} was not free to be read within {LOCKED_MOST_S:g} s")
                if self._closing.wait(FIRST_PAUSE_S / 2) or self._waiting:
                    raise _BrokenOffError
            found.append(digests)
        return found

    def _digest(self, path: str, facts: SnapshotFacts) -> RankDigests | None:
        """Compute and store the digests of a snapshot; None while its worker has locked the slot."""
        try:
            slot = Slot.hold(path)
            if slot is None:
                if facts_in(path) == facts:
                    return None
                raise _GoneError(f"{path} holds something else by now")
            with closing(slot):
                if slot.facts != facts:
                    raise _GoneError(f"{path} holds something else by now")
                digests = compute_digests(slot, load_layout(self._folder, facts.layout))
                with suppress(OSError):
                    # Host memory may have no room for them.
                    store_digests(path, facts, digests)
                return digests
        except (OSError, ElasticTrainError) as error:
            raise _GoneError(f"{path} cannot be digested: {error}") from error

    def _before_frame(self, count: int) -> None:
        self._pacer.switch(sending=True)
        self._pacer.take(count, sleep=self._nap)
        self._nap(0.0)

    def _nap(self, seconds: float) -> None:
        if self._closing.wait(seconds):
            raise _BrokenOffError
        if time.monotonic() > self._deadline:
            took = f"took longer than {DEADLINE_S:g} s at {self._pacer.rate / 1e6:.0f} MB/s"
            raise TransientStorageError(f"{self._target.place}: a replica {took}, and is broken off")

    def _fail(self, facts: SnapshotFacts, reason: str) -> None:
        reported = (facts.rank, facts.step, reason)
        if reported != self._reported and not self._closing.is_set():
            self._reported = reported
            self._failed(*reported)
