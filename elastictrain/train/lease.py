"""Takes the run's lease as rank 0, whatever started it; and gives each start its number."""

import hashlib
import logging
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass

from elastictrain.checkpoint.lineage import number_of
from elastictrain.config.composed import RunConfig
from elastictrain.distributed.generation import say_waiting
from elastictrain.distributed.store import SharedStore
from elastictrain.errors import StorageError
from elastictrain.identity import Identity
from elastictrain.lease.chain import Chain
from elastictrain.lease.holder import Lease, Owner, Waiting, take
from elastictrain.lease.starts import StartRecord, Starts
from elastictrain.storage.opening import without_sync
from elastictrain.storage.store import Store
from elastictrain.storage.writers import Writer, start_of, this_writer

logger = logging.getLogger(__name__)

_DIGITS = 16
_KEY = "elastictrain/owner"


@dataclass(frozen=True, slots=True)
class Asking:
    """Who asks for a lease, and whom it concerns."""

    shared: SharedStore
    """The store that the ranks share."""

    parent: int
    """The process that started this one."""

    poll: Callable[[], None]
    """Called while another run is waited for; may raise to leave early."""

    on_lost: Callable[[str], None]
    """Called by a thread when another run has taken over."""


def take_lease(store: Store, config: RunConfig, identity: Identity, asking: Asking, *, used: int) -> Lease:
    """As rank 0 of a group that no launcher started. `used`: the largest number that this job has had.

    Raises: RunHeldError, StorageError, and what `poll` raises.
    """

    def look() -> None:
        say_waiting(asking.shared)
        asking.poll()

    def tell(text: str) -> None:
        sys.stderr.write(f"elastictrain: {text}\n")
        sys.stderr.flush()

    waiting = Waiting(on_held=config.run.on_held, url=config.run.dir, tell=tell, poll=look)
    owner = _owner(identity, asking.shared, asking.parent)
    return take(Chain(store), owner, waiting, on_lost=asking.on_lost, used=used)


def note_start(store: Store, *, incarnation: str, world_size: int) -> None:
    """As rank 0, when the ranks have met: later starts find this one by its number, what none needs any more goes, and the
    events of finished starts are merged.

    In a thread of its own: nobody waits for that.
    """
    number = number_of(incarnation)

    def note() -> None:
        starts = Starts(without_sync(store))
        try:
            starts.write(StartRecord(number, incarnation, world_size))
            starts.trim(number)
        except StorageError as error:
            logger.warning("the next start will know less of this one: %s", error)
            return
        try:
            # Synced: what is merged is deleted.
            Starts(store).merge_events(number)
        except StorageError as error:
            logger.info("events of earlier starts are merged by a later start: %s", error)

    threading.Thread(target=note, name="note-start", daemon=True).start()


def _owner(identity: Identity, shared: SharedStore, parent: int) -> Owner:
    """A torchrun is the same owner after each restart of its workers; a world of one is as old as its process."""
    here = this_writer()
    if here is None:
        writers: tuple[str, ...] = ()
    elif identity.launched:
        writers = (Writer(here.boot, here.namespace, parent, start_of(parent) or "0").name, here.name)
    else:
        writers = (here.name,)
    pid = parent if identity.launched else os.getpid()
    seed = writers[0] if writers else os.urandom(_DIGITS).hex()
    name = f"{'torchrun' if identity.launched else 'alone'}-{hashlib.sha256(seed.encode()).hexdigest()[:_DIGITS]}"
    if identity.launched:
        # The agent's store outlives its workers, and is the same where another host's rank becomes rank 0.
        name = shared.compare_set(_KEY, "", name).decode()
    return Owner(name, identity.host, pid, writers)
