"""Begins a generation: each rank checks alone, the ranks agree, and the process group is made."""

import hashlib
import logging
import os
import sys
import threading
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from elastictrain.checkpoint.lineage import number_of
from elastictrain.config.digest import group_digest
from elastictrain.distributed.generation import Introduction, agree, check_alike, signal_waiting
from elastictrain.distributed.group import connect, make_group
from elastictrain.distributed.store import BoundedStore, StoreExchange
from elastictrain.errors import StorageError
from elastictrain.events import AppendLog, Journal
from elastictrain.fault.exits import wait_for_previous_workers
from elastictrain.lease.chain import Chain, LeaseClaim, StartRecord, Starts
from elastictrain.lease.holder import Lease, Waiting, take
from elastictrain.liveness.heartbeats import HeartbeatStore
from elastictrain.liveness.progress import Phase
from elastictrain.preflight.transport.settings import OWN_VARIABLES
from elastictrain.storage.appendlog import LostLog, open_append_log
from elastictrain.storage.opening import without_sync
from elastictrain.storage.store import Store
from elastictrain.storage.writers import process_name
from elastictrain.telemetry.progress import write_above
from elastictrain.train.checks import check_memory
from elastictrain.train.context import TrainContext
from elastictrain.train.job_notes import JobNotes
from elastictrain.train.parked_memory import ParkedMemory
from elastictrain.train.preflight import RunPreflight

logger = logging.getLogger(__name__)

_DIGITS = 16
_OWNER_KEY = "elastictrain/owner"
_NAMING_S, _NAMING_SHARE = 10.0, 0.1  # of the time in which the store must answer: what is left to ask who is missing


def claim_memory(context: TrainContext, *, parked: ParkedMemory | None = None) -> None:
    """Wait until the previous workers have released their memory, and check that there is room for the state. `parked`: what a
    standby has of it; then the device alone is asked."""
    identity = context.identity
    if parked is not None and torch.cuda.mem_get_info(identity.local_rank)[0] >= parked.peak_bytes:
        return
    with context.timed("predecessors", Phase.RENDEZVOUS):
        # Before the ranks meet: from then on, the other ranks wait for this one.
        left = wait_for_previous_workers(identity, poll=context.leave_if_asked)
        if left and identity.local_rank == 0:
            message = "process(es) %s of the generation before are not gone; they may hold devices that this one needs"
            logger.warning(message, ", ".join(map(str, left)))
    if parked is not None:
        return
    with context.timed("memory"):
        # Only now: the workers of the previous generation have released their memory.
        if identity.local_rank == 0:
            check_memory(context)


def meet(
    context: TrainContext,
    *,
    parent: int = 0,
    on_lost: Callable[[str], None] = lambda _: None,
) -> None:
    """Agree with the other ranks. Collective: yes."""
    # The limit of this phase starts with the first request to the store: the agreement itself names the missing ranks.
    with context.timed("rendezvous", Phase.RENDEZVOUS):
        _meet(context, parent=parent, on_lost=on_lost)


def form_group(context: TrainContext) -> None:
    """Check the hosts, make the process group, and check it. Collective: yes. Raises: ElasticTrainError."""
    config = context.config
    check_alike(context.generation)

    def begin_part(_: str) -> None:
        # Each part starts its own phase, so that the report of a hang gives the time of that part alone.
        context.tracker.set_phase(Phase.PREFLIGHT)
        context.leave_if_asked()

    with context.timed("preflight", Phase.PREFLIGHT):
        exchange = StoreExchange(dist.PrefixStore("preflight", context.shared), poll=context.leave_if_asked)
        preflight = RunPreflight(context, exchange)
        preflight.check_hosts()
    if context.unwritable is not None:
        raise context.unwritable
    with context.timed("group", Phase.GROUP):
        preflight.enable_nccl_log()
        context.group = make_group(
            context.shared,
            context.identity,
            backend=context.backend,
            on_gpu=context.on_gpu,
            connects_later=preflight.connects_later,
            init_timeout_s=config.fault.init_timeout_s,
            save_timeout_s=config.fault.save_timeout_s,
            poll=context.leave_if_asked,
        )
    with context.timed("preflight_group", Phase.PREFLIGHT):
        preflight.check_group(on_part=begin_part, in_background=context.prepare_compiler)


def _meet(context: TrainContext, *, parent: int, on_lost: Callable[[str], None]) -> None:
    """Collective: yes. Raises: RunHeldError, StopRequestedError, StorageError, TransportError."""
    config, identity, limit_s = context.config, context.identity, context.config.fault.rendezvous_timeout_s
    rendezvous = context.rendezvous = BoundedStore(
        lambda: connect(identity, timeout_s=limit_s), limit_s=limit_s, poll=context.leave_if_asked
    )
    context.job = JobNotes(rendezvous.unbounded, identity)
    if identity.rank == 0 and identity.launcher is None:
        context.lease = _take_lease(context, parent=parent, on_lost=on_lost)
    lease, launcher = context.lease, identity.launcher
    digest = group_digest(config, data_digest=context.samples.digest)
    margin_s = min(_NAMING_S, _NAMING_SHARE * rendezvous.left_s)
    generation = context.generation = agree(
        rendezvous,
        identity,
        Introduction(
            identity.host,
            identity.local_world_size,
            context.backend,
            digest,
            os.getpid(),
            stayed=context.tracker.has_trained,
            planned=OWN_VARIABLES in os.environ,
            recovers=launcher is not None and launcher.recovery is not None,
        ),
        number=lease.number if lease is not None else launcher.generation if launcher is not None else 0,
        # The rank names the missing ranks while the store still answers.
        timeout_s=rendezvous.left_s - margin_s,
        poll=context.leave_if_asked,
        extend_deadline=lambda seconds: _extend_deadline(context, seconds + margin_s),
        tell=partial(write_above, sys.stderr),
    )
    if identity.rank == 0:
        note_start(context.store, incarnation=generation.name, world_size=identity.world_size)
    shared = context.shared = dist.PrefixStore(f"elastictrain/{generation.name}", rendezvous.unbounded)
    context.heartbeats = rendezvous.ask(
        lambda: HeartbeatStore(
            shared, rank=identity.rank, hosts=generation.hosts, mark=lambda: context.tracker.mark, options=config.fault
        )
    )
    context.heartbeats.start()
    key = f"events/{generation.name}-r{identity.rank:05d}.jsonl"
    try:
        log: AppendLog = open_append_log(context.store, key, flush_s=config.telemetry.flush_s, close_s=config.fault.close_s)
    except StorageError as error:
        log, context.unwritable = LostLog(), error
    context.journal = Journal(log, incarnation=generation.name, rank=identity.rank)


def _take_lease(context: TrainContext, *, parent: int, on_lost: Callable[[str], None]) -> Lease:
    """Take the lease as rank 0 of a group without a launcher. Raises: RunHeldError, StorageError, StopRequestedError,
    TransportError."""
    run, rendezvous = context.config.run, context.rendezvous

    def wait_on() -> None:
        signal_waiting(rendezvous)
        _extend_deadline(context, context.config.fault.rendezvous_timeout_s)
        context.leave_if_asked()

    # Numbers keep rising even where the run folder was deleted during the job.
    used = max(map(number_of, context.job.read().incarnations), default=0)
    waiting = Waiting(
        on_held=run.on_held, url=run.dir, tell=lambda text: write_above(sys.stderr, f"elastictrain: {text}"), poll=wait_on
    )
    # A torchrun stays the same owner when its workers restart; a world of one is a new owner with each process.
    identity = context.identity
    writers = tuple(filter(None, [process_name(parent) if identity.launched else "", process_name()]))
    seed = writers[0] if writers else os.urandom(_DIGITS).hex()
    name = f"{'torchrun' if identity.launched else 'alone'}-{hashlib.sha256(seed.encode()).hexdigest()[:_DIGITS]}"
    if identity.launched:
        # The agent's store outlives its workers, and is the same one where a rank of another host becomes rank 0.
        name = rendezvous.compare_set(_OWNER_KEY, "", name).decode()
    draft = LeaseClaim(0, name, identity.host, parent if identity.launched else os.getpid())
    return take(Chain(context.store), draft, waiting, writers=writers, on_lost=on_lost, used=used)


def _extend_deadline(context: TrainContext, seconds: float) -> None:
    # While another run trains here, this one makes no progress.
    context.tracker.set_phase(Phase.RENDEZVOUS)
    context.rendezvous.extend_deadline(seconds)


def note_start(store: Store, *, incarnation: str, world_size: int) -> None:
    """As rank 0, in a thread: record this start for later starts, and merge the events of finished starts."""
    number = number_of(incarnation)

    def note() -> None:
        """Only logs a StorageError. Without a record of this start it merges nothing."""
        starts = Starts(without_sync(store))
        try:
            starts.write(StartRecord(number, incarnation, world_size))
            starts.trim(number)
        except StorageError as error:
            logger.warning("cannot record this start: %s", error)
            return
        try:
            # Synced: the merge deletes its sources.
            Starts(store).merge_events(number)
        except StorageError as error:
            logger.info("events of earlier starts are merged by a later start: %s", error)

    threading.Thread(target=note, name="note-start", daemon=True).start()
