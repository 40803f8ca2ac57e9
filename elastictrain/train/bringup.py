"""Bring-up of one generation: what each rank checks alone, the agreement of the ranks, and the process group."""

import hashlib
import logging
import os
import sys
import threading
from collections.abc import Callable
from functools import partial

import torch.distributed as dist

from elastictrain.checkpoint.lineage import number_of
from elastictrain.config.composed import RunConfig
from elastictrain.config.digest import group_digest
from elastictrain.distributed.generation import AgreedGeneration, Introduction, agree, check_alike, say_waiting
from elastictrain.distributed.group import connect, make_group
from elastictrain.distributed.store import BoundedStore, SharedStore, StoreExchange
from elastictrain.errors import StorageError
from elastictrain.events import AppendLog, Journal
from elastictrain.fault.exits import wait_for_previous_workers
from elastictrain.identity import Identity
from elastictrain.lease.chain import Chain, StartRecord, Starts
from elastictrain.lease.holder import Lease, Owner, Waiting, take
from elastictrain.liveness.heartbeats import HeartbeatStore
from elastictrain.liveness.progress import Phase, ProgressTracker
from elastictrain.storage.appendlog import LostLog, open_append_log
from elastictrain.storage.opening import without_sync
from elastictrain.storage.store import Store
from elastictrain.storage.writers import Writer, start_of, this_writer
from elastictrain.train.checks import OwnFacts, check_alone, check_memory
from elastictrain.train.context import StopRequested, Timings, TrainContext, leave_if_asked
from elastictrain.train.job_notes import JobNotes
from elastictrain.train.preflight import RunPreflight

logger = logging.getLogger(__name__)

_DIGITS = 16
_OWNER_KEY = "elastictrain/owner"


def meet_ranks(
    config: RunConfig,
    identity: Identity,
    *,
    tracker: ProgressTracker,
    stop_request: StopRequested,
    parent: int = 0,
    on_lost: Callable[[str], None] = lambda _: None,
) -> TrainContext:
    """Check everything that can be checked alone, then agree with the other ranks. Collective: yes.

    `parent` is the process that started this one. `on_lost` is called by a thread of rank 0 when another run has taken over.
    """
    timings, poll = Timings(), partial(leave_if_asked, stop_request)
    with timings.phase("checks"):
        own = check_alone(config, identity)
    tracker.set_phase(Phase.RENDEZVOUS)
    with timings.phase("predecessors"):
        # Before the ranks meet: from then on, others wait for this one.
        _wait_for_previous_workers(identity, poll=poll)
    with timings.phase("memory"):
        # Only now: the workers of the generation before have given theirs back.
        if identity.local_rank == 0:
            check_memory(own.task, config, identity, backend=own.backend)
    with timings.phase("rendezvous"):
        # The limit of this phase begins with the first question to the store: who is missing is told by the agreement itself.
        tracker.set_phase(Phase.RENDEZVOUS)
        meeting = _Meeting(config, identity, own, tracker=tracker, poll=poll)
        lease = None
        if identity.rank == 0 and identity.launcher is None:
            lease = meeting.take_lease(parent=parent, on_lost=on_lost)
        generation = meeting.agree(lease)
        shared = dist.PrefixStore(f"elastictrain/{generation.name}", meeting.store.unbounded)
        heartbeats = meeting.store.ask(
            lambda: HeartbeatStore(
                shared,
                rank=identity.rank,
                hosts=generation.hosts,
                mark=lambda: tracker.mark,
                options=config.fault,
            )
        )
        heartbeats.start()
        journal, unwritable = _open_journal(own.store, generation, config, identity)
    return TrainContext(
        config=config,
        identity=identity,
        tracker=tracker,
        stop_request=stop_request,
        task=own.task,
        samples=own.samples,
        store=own.store,
        backend=own.backend,
        generation=generation,
        shared=shared,
        journal=journal,
        unwritable=unwritable,
        heartbeats=heartbeats,
        job=meeting.job,
        lease=lease,
        timings=timings,
    )


def form_group(context: TrainContext) -> None:
    """Check the hosts, make the process group, and check it. Collective: yes. Raises: ElasticTrainError."""
    config, tracker, timings = context.config, context.tracker, context.timings
    check_alike(context.generation)
    poll = partial(leave_if_asked, context.stop_request)

    def begin_part(_: str) -> None:
        # Marked anew with each part, so that a report tells how long the one that hangs has taken.
        tracker.set_phase(Phase.PREFLIGHT)
        poll()

    tracker.set_phase(Phase.PREFLIGHT)
    with timings.phase("preflight"):
        exchange = StoreExchange(dist.PrefixStore("preflight", context.shared), poll=poll)
        preflight = RunPreflight(context, exchange)
        preflight.check_hosts()
    if context.unwritable is not None:
        raise context.unwritable
    tracker.set_phase(Phase.GROUP)
    preflight.listen_to_nccl()
    with timings.phase("group"):
        context.group = make_group(
            context.shared,
            context.identity,
            backend=context.backend,
            init_timeout_s=config.fault.init_timeout_s,
            save_timeout_s=config.fault.save_timeout_s,
        )
    tracker.set_phase(Phase.PREFLIGHT)
    with timings.phase("preflight_group"):
        preflight.check_group(on_part=begin_part)


class _Meeting:
    """The way to the other ranks, through the store that torchrun named."""

    def __init__(
        self,
        config: RunConfig,
        identity: Identity,
        own: OwnFacts,
        *,
        tracker: ProgressTracker,
        poll: Callable[[], None],
    ) -> None:
        """Raises: TransportError."""
        self._config = config
        self._identity = identity
        self._own = own
        self._tracker = tracker
        self._poll = poll
        self._limit_s = config.fault.rendezvous_timeout_s
        self.store = BoundedStore(lambda: connect(identity, timeout_s=self._limit_s), limit_s=self._limit_s, poll=poll)
        self.job = JobNotes(self.store.unbounded, identity)

    def take_lease(self, *, parent: int, on_lost: Callable[[str], None]) -> Lease:
        """As rank 0 of a group that no launcher started. Raises: RunHeldError, StorageError, what `poll` raises."""
        config, identity = self._config, self._identity

        def wait_on() -> None:
            say_waiting(self.store)
            self._put_off(self._limit_s)
            self._poll()

        # Also where the run folder was deleted under a job that lives, the numbers go on.
        used = max(map(number_of, self.job.read().incarnations), default=0)
        waiting = Waiting(
            on_held=config.run.on_held, url=config.run.dir, tell=lambda text: _tell(f"elastictrain: {text}"), poll=wait_on
        )
        return take(Chain(self._own.store), _owner(identity, self.store, parent), waiting, on_lost=on_lost, used=used)

    def agree(self, lease: Lease | None) -> AgreedGeneration:
        """With all other ranks. Collective: yes. Raises: StopRequestedError, TransportError."""
        own, identity = self._own, self._identity
        launcher = identity.launcher
        digest = group_digest(self._config, data_digest=own.samples.digest)
        generation = agree(
            self.store,
            identity,
            Introduction(identity.host, identity.local_world_size, own.backend, digest),
            number=lease.number if lease is not None else launcher.generation if launcher is not None else 0,
            timeout_s=self.store.left_s,
            poll=self._poll,
            put_off=self._put_off,
            tell=_tell,
        )
        if identity.rank == 0:
            note_start(own.store, incarnation=generation.name, world_size=identity.world_size)
        return generation

    def _put_off(self, seconds: float) -> None:
        # As long as another run trains here there is no progress to be made.
        self._tracker.set_phase(Phase.RENDEZVOUS)
        self.store.put_off(seconds)


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
        name = shared.compare_set(_OWNER_KEY, "", name).decode()
    return Owner(name, identity.host, pid, writers)


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


def _open_journal(
    store: Store, generation: AgreedGeneration, config: RunConfig, identity: Identity
) -> tuple[Journal, StorageError | None]:
    """The records of this rank, and why they cannot be stored, if so."""
    key, unwritable = f"events/{generation.name}-r{identity.rank:05d}.jsonl", None
    try:
        log: AppendLog = open_append_log(store, key, flush_s=config.telemetry.flush_s, close_s=config.fault.close_s)
    except StorageError as error:
        log, unwritable = LostLog(), error
    return Journal(log, incarnation=generation.name, rank=identity.rank), unwritable


def _wait_for_previous_workers(identity: Identity, *, poll: Callable[[], None]) -> None:
    left = wait_for_previous_workers(identity, poll=poll)
    if left and identity.local_rank == 0:
        logger.warning(
            "process(es) %s of the generation before are not gone; they may hold devices that this one needs",
            ", ".join(map(str, left)),
        )


def _tell(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
