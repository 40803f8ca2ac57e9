"""The board on which every rank writes where it is, read when a peer is gone: no backend tells who is missing."""

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from elastictrain.distributed.bounded import within

logger = logging.getLogger(__name__)

_READ_TIMEOUT = timedelta(seconds=2)
_READ_LIMIT_S = 3.0
_FALLEN = "fallen"


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The newest heartbeat of a rank."""

    told: Mapping[str, object]
    """What it said of itself; it may come from another release."""

    age_s: float
    """By the clocks of the two hosts, which may differ."""

    still_s: float
    """How long no newer one has come, as far as this rank has looked; by its own clock."""


class HeartbeatStore:
    """Heartbeats through the shared store, from a thread of its own over a connection of its own.

    A connection blocked in a wait would hold back every other user of it, so the store is cloned: once for writing, so that
    others hear of this rank whatever it reads, and once for reading.
    """

    def __init__(
        self,
        store: dist.Store,
        *,
        rank: int,
        hosts: tuple[str, ...],
        tell: Callable[[], Mapping[str, object]],
        interval_s: float,
        clock: Callable[[], float] = time.time,
        stopwatch: Callable[[], float] = time.monotonic,
    ) -> None:
        """`tell` says where this rank is: JSON, with a text for people under `where`."""
        self._writing: dist.Store = store.clone()  # type: ignore[attr-defined]  # missing in the stub of torch
        self._reading: dist.Store = store.clone()  # type: ignore[attr-defined]
        for connection in (self._writing, self._reading):
            connection.set_timeout(_READ_TIMEOUT)
        self._rank = rank
        self._hosts = hosts
        self._tell = tell
        self._interval_s = interval_s
        self._clock = clock
        self._stopwatch = stopwatch
        self._number = 0
        self._also: Mapping[str, object] = {}
        self._seen: dict[int, tuple[object, float]] = {}
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._write, name="heartbeat", daemon=True)

    @property
    def hosts(self) -> tuple[str, ...]:
        """The host of each rank."""
        return self._hosts

    def start(self) -> None:
        """Begin to write."""
        self._thread.start()

    def add(self, told: Mapping[str, object]) -> None:
        """What is told from now on besides where this rank is; JSON. Replaces what was told so far."""
        self._also = told

    def close(self) -> None:
        """Stop writing."""
        self._closed.set()
        self._thread.join(timeout=2 * _READ_TIMEOUT.total_seconds())

    def last_heard(self) -> dict[str, str]:
        """For each other rank, oldest news first: where it was, and how long ago. Bounded in time, never raises."""
        # The host of the store may be the one that is gone, without a word: then a question to it never returns.
        heard = within(_READ_LIMIT_S, self._read_texts)
        return {"the shared store": "does not answer: its host may be the one that is gone"} if heard is None else heard

    def beats(self) -> dict[int, Heartbeat | None]:
        """The newest beat of each other rank (None: it never said a word).

        May take as long as the store takes to answer. Raises: RuntimeError, ValueError.
        """
        beats: dict[int, Heartbeat | None] = {}
        for rank in range(len(self._hosts)):
            if rank != self._rank:
                key = f"beat/{rank}"
                told = json.loads(self._reading.get(key)) if self._reading.check([key]) else None
                beats[rank] = self._beat(rank, told) if isinstance(told, dict) else None
        return beats

    def announce_failure(self) -> None:
        """Tell the others that this rank ends because of an error: a collective may never notice. Bounded, never raises."""
        word = json.dumps({"rank": self._rank, "host": self._hosts[self._rank]})
        # The first word stays: who falls after it falls because of it.
        within(_READ_LIMIT_S / 2, lambda: self._reading.compare_set(_FALLEN, "", word))

    def failed_peer(self) -> str | None:
        """The name of another rank that said that it ends because of an error, if one did. As `beats`."""
        if not self._reading.check([_FALLEN]):
            return None
        told = json.loads(self._reading.get(_FALLEN))
        return f"rank {told['rank']} on {told['host']}" if told["rank"] != self._rank else None

    def _beat(self, rank: int, told: dict[str, object]) -> Heartbeat:
        now_s = self._stopwatch()
        number, since_s = self._seen.get(rank, (None, now_s))
        if told.get("number") != number:
            since_s = now_s
        self._seen[rank] = (told.get("number"), since_s)
        written = told.get("time")
        age_s = max(0.0, self._clock() - written) if isinstance(written, int | float) else 0.0
        return Heartbeat(told, age_s, now_s - since_s)

    def _read_texts(self) -> dict[str, str]:
        try:
            beats = self.beats()
        except (RuntimeError, ValueError) as error:
            return {"the shared store": f"does not answer ({type(error).__name__}): its host may be the one that is gone"}
        news = []
        for rank, beat in beats.items():
            text = "never heard in this incarnation" if beat is None else f"{beat.told.get('where')}, {beat.age_s:.1f} s ago"
            news.append((float("inf") if beat is None else beat.age_s, f"rank {rank} on {self._hosts[rank]}", text))
        news.sort(reverse=True)
        return {name: text for _, name, text in news}

    def _write(self) -> None:
        while True:
            self._number += 1
            try:
                beat = {**self._tell(), **self._also, "time": self._clock(), "number": self._number}
                self._writing.set(f"beat/{self._rank}", json.dumps(beat))
            except RuntimeError as error:
                # The store's host may be gone; then the collectives will notice.
                logger.debug("heartbeat not written: %s", error)
            if self._closed.wait(self._interval_s):
                return
