"""The board on which every rank writes where it is, read when a peer is gone: no backend tells who is missing."""

import json
import logging
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from elastictrain.distributed.bounded import within

logger = logging.getLogger(__name__)

_READ_TIMEOUT = timedelta(seconds=2)
_READ_LIMIT_S = 3.0


class Board:
    """Heartbeats through the shared store, from a thread of its own over a connection of its own.

    A connection blocked in a wait would hold back every other user of it, so the store is cloned.
    """

    def __init__(
        self,
        store: dist.Store,
        *,
        rank: int,
        hosts: tuple[str, ...],
        where: Callable[[], str],
        interval_s: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store: dist.Store = store.clone()  # type: ignore[attr-defined]  # missing in the stub of torch
        self._store.set_timeout(_READ_TIMEOUT)
        self._rank = rank
        self._hosts = hosts
        self._where = where
        self._interval_s = interval_s
        self._clock = clock
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._write, name="heartbeat", daemon=True)

    def start(self) -> None:
        """Begin to write."""
        self._thread.start()

    def close(self) -> None:
        """Stop writing."""
        self._closed.set()
        self._thread.join(timeout=2 * _READ_TIMEOUT.total_seconds())

    def last_heard(self) -> dict[str, str]:
        """For each other rank, oldest news first: where it was, and how long ago. Bounded in time, never raises."""
        # The host of the store may be the one that is gone, without a word: then a question to it never returns.
        heard = within(_READ_LIMIT_S, self._read)
        return {"the shared store": "does not answer: its host may be the one that is gone"} if heard is None else heard

    def _read(self) -> dict[str, str]:
        news: list[tuple[float, str, str]] = []
        for rank, host in enumerate(self._hosts):
            if rank == self._rank:
                continue
            name = f"rank {rank} on {host}"
            try:
                beat = json.loads(self._store.get(f"beat/{rank}")) if self._store.check([f"beat/{rank}"]) else None
            except (RuntimeError, ValueError) as error:
                return {"the shared store": f"does not answer ({type(error).__name__}): its host may be the one that is gone"}
            if beat is None:
                news.append((float("inf"), name, "never heard in this incarnation"))
            else:
                age_s = max(0.0, self._clock() - beat["time"])
                news.append((age_s, name, f"{beat['where']}, {age_s:.1f} s ago"))
        news.sort(reverse=True)
        return {name: text for _, name, text in news}

    def _write(self) -> None:
        while True:
            try:
                self._store.set(f"beat/{self._rank}", json.dumps({"time": self._clock(), "where": self._where()}))
            except RuntimeError as error:
                # The store's host may be gone; then the collectives will notice.
                logger.debug("heartbeat not written: %s", error)
            if self._closed.wait(self._interval_s):
                return
