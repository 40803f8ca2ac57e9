"""The saver's own events: one log per incarnation, which outlives the workers; slow saves are reported once."""

import logging
import threading
from contextlib import suppress

from elastictrain.checkpoint.saver.messages import HostRanks
from elastictrain.checkpoint.saver.pending_snapshots import SaveJob
from elastictrain.checkpoint.saver.process import SaverConfig
from elastictrain.errors import StorageError
from elastictrain.events import CheckpointSlow, Event, Journal
from elastictrain.storage.appendlog import open_append_log
from elastictrain.storage.store import Store

logger = logging.getLogger(__name__)


class SaverEventLogs:
    """Opens each log at its first event; safe to use from several threads."""

    def __init__(self, store: Store, config: SaverConfig) -> None:
        self._store = store
        self._config = config
        self._lock = threading.Lock()
        self._first_rank: dict[str, int] = {}
        self._open: dict[str, Journal] = {}

    def move_to(self, host_ranks: HostRanks) -> None:
        """Accept events of this incarnation from now on."""
        with self._lock:
            self._first_rank[host_ranks.incarnation] = min(host_ranks.ranks)

    def record(self, incarnation: str, event: Event) -> None:
        """Append one event; failures are only logged."""
        with self._lock:
            first_rank = self._first_rank.get(incarnation)
            if first_rank is None:
                logger.warning("not recorded, no worker of %r was on this host: %s", incarnation, event)
                return
            journal = self._open.get(incarnation)
            if journal is None:
                # In the same folder as the logs of the ranks.
                key = f"events/{incarnation}-k{first_rank:05d}.jsonl"
                try:
                    log = open_append_log(self._store, key, flush_s=self._config.flush_s, close_s=self._config.grace_s / 2)
                except StorageError as error:
                    logger.warning("not recorded (%s): %s", error, event)
                    return
                journal = self._open[incarnation] = Journal(log, incarnation=incarnation, rank=first_rank)
        journal.record(event)

    def close(self) -> None:
        with self._lock:
            for journal in self._open.values():
                with suppress(StorageError):
                    journal.close()
            self._open.clear()


SLOW_S = 20.0  # a save that takes longer is reported; large ones on slow disks may


class SlowSaves(logging.Handler):
    """Watches the running save, and keeps the newest warning of the storage modules."""

    def __init__(self) -> None:
        super().__init__(level=logging.WARNING)
        self._told_step = -1
        self._warning: str | None = None
        logging.getLogger("elastictrain.storage").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self._warning = record.getMessage()

    def look(self, under_way: tuple[SaveJob, float] | None) -> CheckpointSlow | None:
        """Return an event if a running job is slow, once per job. `under_way`: the job, and for how many seconds it has run."""
        if under_way is None:
            self._told_step = -1
            return None
        job, seconds = under_way
        if seconds < SLOW_S or self._told_step == job.step:
            return None
        self._told_step = job.step
        trouble, self._warning = self._warning, None
        return CheckpointSlow(step=job.step, seconds=seconds, trouble=trouble)
