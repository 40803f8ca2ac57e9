"""The keeper's own event log, one per incarnation: what it does outlives the workers that could record it."""

import logging
import threading
from contextlib import suppress

from elastictrain.checkpoint.keeper.desk import Station
from elastictrain.checkpoint.keeper.facts import RunFacts
from elastictrain.errors import StorageError
from elastictrain.events import Event, Journal
from elastictrain.storage.appendlog import open_append_log
from elastictrain.storage.store import Store

logger = logging.getLogger(__name__)


def journal_key(incarnation: str, *, first_rank: int) -> str:
    """Beside the logs of the ranks."""
    return f"events/{incarnation}-k{first_rank:05d}.jsonl"


class Journals:
    """Opens a log when it is first needed; safe to use from several threads."""

    def __init__(self, store: Store, facts: RunFacts) -> None:
        self._store = store
        self._facts = facts
        self._lock = threading.Lock()
        self._first_rank: dict[str, int] = {}
        self._open: dict[str, Journal] = {}

    def move_to(self, station: Station) -> None:
        """Events of this incarnation may come from now on."""
        with self._lock:
            self._first_rank[station.incarnation] = min(station.ranks)

    def record(self, incarnation: str, event: Event) -> None:
        """Append one event; what cannot be recorded is logged."""
        with self._lock:
            first_rank = self._first_rank.get(incarnation)
            if first_rank is None:
                logger.warning("not recorded, as no worker of %r was ever here: %s", incarnation, event)
                return
            journal = self._open.get(incarnation)
            if journal is None:
                try:
                    log = open_append_log(
                        self._store,
                        journal_key(incarnation, first_rank=first_rank),
                        flush_s=self._facts.flush_s,
                        close_s=self._facts.grace_s / 2,
                    )
                except StorageError as error:
                    logger.warning("not recorded (%s): %s", error, event)
                    return
                journal = self._open[incarnation] = Journal(log, incarnation=incarnation, rank=first_rank)
        journal.record(event)

    def close(self) -> None:
        """Make everything durable."""
        with self._lock:
            for journal in self._open.values():
                with suppress(StorageError):
                    journal.close()
            self._open.clear()
