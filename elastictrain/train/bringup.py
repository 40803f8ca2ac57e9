"""Bring-up of one incarnation: what each rank checks alone, the agreement, and the process group."""

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, cast

import psutil
import torch
import torch.distributed as dist

from elastictrain.checkpoint.lineage import number_of
from elastictrain.checkpoint.memory.budget import group_limits
from elastictrain.config.composed import RunConfig
from elastictrain.config.digest import group_digest
from elastictrain.config.fault import FaultGroup
from elastictrain.config.task_signature import build_task
from elastictrain.distributed.answers import BoundedStore, StoreAnswers
from elastictrain.distributed.device import find_backend
from elastictrain.distributed.environment import Backend, plan_environment
from elastictrain.distributed.exchange import StoreExchange
from elastictrain.distributed.group import Group, connect, make_group
from elastictrain.distributed.incarnation import Incarnation, Introduction, agree, check_alike
from elastictrain.distributed.mesh import mesh_shape
from elastictrain.errors import ConfigError, HostUnfitError, Problem, StopRequestedError, StorageError
from elastictrain.events import AppendLog, Journal
from elastictrain.fault.exits import wait_for_previous_workers
from elastictrain.fault.stop import StopRequest
from elastictrain.identity import Identity
from elastictrain.lease.holder import Lease
from elastictrain.liveness.diagnosis import to_heartbeat
from elastictrain.liveness.heartbeats import HeartbeatStore
from elastictrain.liveness.progress import Phase, ProgressMark, ProgressTracker
from elastictrain.liveness.watchdog import bound_s
from elastictrain.storage.appendlog import LostLog, open_append_log
from elastictrain.storage.opening import open_store
from elastictrain.storage.private import temporary_folder
from elastictrain.storage.store import Store
from elastictrain.train.job_notes import JobNotes
from elastictrain.train.lease import Asking, note_start, take_lease
from elastictrain.train.preflight import RunPreflight
from elastictrain.train.runfolder import check_run_folder
from elastictrain.train.samples import Samples, open_samples
from elastictrain.train.signing import signing_key
from elastictrain.train.state_size import MemorySize, Spread, judge_fit, measure_state
from elastictrain.train.task import HasBlocks, Task

logger = logging.getLogger(__name__)

StopRequested = Callable[[], StopRequest | None]


@dataclass(slots=True)
class Timings:
    """Seconds of each phase of a start, by name."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time what is inside."""
        began = time.monotonic()
        yield
        self.seconds[name] = round(time.monotonic() - began, 4)


@dataclass(frozen=True, slots=True)
class Met:
    """The ranks have agreed on an incarnation: from here on what happens can be recorded, and others can be heard."""

    incarnation: Incarnation
    shared: dist.Store
    store: Store
    journal: Journal
    heartbeats: HeartbeatStore
    job: JobNotes
    lease: Lease | None
    """Of rank 0, unless a launcher has started it: those have a lease of their own."""

    unwritable: StorageError | None = None
    """Why this rank's records cannot be stored, if so. It ends the rank, but only when the others know which host it is on."""


@dataclass(frozen=True, slots=True)
class Started:
    """A group of ranks that has come up, with everything that does not depend on the model."""

    task: Task
    samples: Samples
    store: Store
    met: Met
    group: Group
    timings: Timings


def bring_up(
    config: RunConfig,
    identity: Identity,
    *,
    tracker: ProgressTracker,
    stop_request: StopRequested,
    on_meeting: Callable[[Met], None],
    parent: int = 0,
    on_lost: Callable[[str], None] = lambda _: None,
) -> Started:
    """Check everything that can be checked alone, then meet the other ranks. Collective: yes.

    `on_meeting` is told as soon as failures can be recorded; `on_lost`, by a thread of rank 0, when another run has taken over.
    `parent` is the process that started this one.
    """
    timings = Timings()
    with timings.phase("checks"):
        own = _check_alone(config, identity)
    tracker.set_phase(Phase.RENDEZVOUS)
    leave_if_asked = partial(_leave_if_asked, stop_request)
    with timings.phase("predecessors"):
        # Before the ranks meet: from then on, others wait for this one.
        _wait_for_predecessors(identity, poll=leave_if_asked)
    with timings.phase("memory"):
        # Only now: the workers of the generation before have given theirs back.
        if identity.local_rank == 0:
            _check_memory(own.task, config, identity, backend=own.backend)
    with timings.phase("rendezvous"):
        # The limit of this phase begins with the first question to the store: who is missing is told by the agreement itself.
        tracker.set_phase(Phase.RENDEZVOUS)
        way = _reach(config, identity, tracker=tracker, poll=leave_if_asked)
        lease = None
        if identity.rank == 0 and identity.launcher is None:
            lease = _take_lease(config, identity, own, way, parent=parent, on_lost=on_lost)
        met = _meet(config, identity, own, way, lease, tracker=tracker)
    on_meeting(met)
    check_alike(met.incarnation)

    def begin_part(_: str) -> None:
        # Marked anew with each part, so that a report tells how long the one that hangs has taken.
        tracker.set_phase(Phase.PREFLIGHT)
        leave_if_asked()

    tracker.set_phase(Phase.PREFLIGHT)
    with timings.phase("preflight"):
        preflight = RunPreflight(
            config,
            identity,
            met.incarnation,
            StoreExchange(dist.PrefixStore("preflight", met.shared), poll=leave_if_asked),
            store=own.store,
            record=met.journal.record,
            data_digest=own.samples.digest,
        )
        preflight.check_hosts()
    if met.unwritable is not None:
        raise met.unwritable
    tracker.set_phase(Phase.GROUP)
    preflight.listen_to_nccl(own.backend)
    with timings.phase("group"):
        group = make_group(
            met.shared,
            identity,
            backend=own.backend,
            init_timeout_s=config.fault.init_timeout_s,
            save_timeout_s=config.fault.save_timeout_s,
        )
    tracker.set_phase(Phase.PREFLIGHT)
    with timings.phase("preflight_group"):
        preflight.check_group(group, on_part=begin_part)
    return Started(own.task, own.samples, own.store, met, group, timings)


@dataclass(frozen=True, slots=True)
class _Own:
    """What a rank knows before it has met another."""

    backend: Literal["nccl", "gloo"]
    task: Task
    samples: Samples
    store: Store


def _check_alone(config: RunConfig, identity: Identity) -> _Own:
    """What can be checked without another rank; plans the environment, too. Raises: ElasticTrainError."""
    signing_key(config)
    backend, why_cpu = find_backend(config.parallel.backend, environment=os.environ, local_world_size=identity.local_world_size)
    if why_cpu and identity.local_rank == 0:
        logger.warning("the CPU is used, and no GPU: %s", why_cpu)
    # torch opens it without a look at what is there.
    dump_prefix = f"{temporary_folder()}/flight-r"
    for variable in plan_environment(config.fault, backend=backend, dump_prefix=dump_prefix, present=os.environ):
        os.environ[variable.name] = variable.value
    task = cast(Task, build_task(config))
    if config.train.activation_checkpointing != "none" and not isinstance(task, HasBlocks):
        message = "needs a task that names its blocks (method `blocks`); set it to none"
        raise ConfigError([Problem("train.activation_checkpointing", message)])
    store = open_store(config.run.dir)
    if identity.local_rank == 0:
        # Of several hosts the preflight tells which one cannot write; who left before would only be missed.
        untested = identity.only_host or config.preflight.level == "off" or config.preflight.checks.storage == "off"
        check_run_folder(store, config, task=task, try_writing=untested)
    return _Own(backend, task, open_samples(task, config), store)


def _check_memory(task: Task, config: RunConfig, identity: Identity, *, backend: Backend) -> None:
    """Raises: HostUnfitError if the state cannot fit here; ConfigError if it fits nowhere, or the model cannot be built."""
    size = measure_state(task)
    if size is None:
        return
    parallel, local_world_size = config.parallel, identity.local_world_size
    shape = mesh_shape(
        parallel.kind, world_size=identity.world_size, local_world_size=local_world_size, shard_size=parallel.shard_size
    )
    spread = Spread(
        kind=parallel.kind,
        shards=shape.shards,
        local_world_size=local_world_size,
        world_size=identity.world_size,
        snapshots=config.checkpoint.buffers,
    )
    device = None
    if backend == "nccl":
        total_bytes = torch.cuda.get_device_properties(identity.local_rank).total_memory
        device = MemorySize(torch.cuda.get_device_name(identity.local_rank), total_bytes, total_bytes)
    found = psutil.virtual_memory()
    # Of a control group only the limit counts: what its files take is given back, and it does not tell how much that is.
    total_bytes = min([int(found.total), *(limit for limit, _ in group_limits())])
    host = MemorySize("this host", total_bytes, min(total_bytes, int(found.available)))
    fit = judge_fit(size, spread, device=device, host=host)
    if fit.problem:
        raise ConfigError(fit.problem) if fit.nowhere else HostUnfitError(fit.problem)
    if fit.warning:
        logger.warning("%s", fit.warning)


def _wait_for_predecessors(identity: Identity, *, poll: Callable[[], None]) -> None:
    left = wait_for_previous_workers(identity, poll=poll)
    if left and identity.local_rank == 0:
        logger.warning(
            "process(es) %s of the generation before are not gone; they may hold devices that this one needs",
            ", ".join(map(str, left)),
        )


@dataclass(frozen=True, slots=True)
class _Way:
    """The way to the other ranks."""

    store: dist.Store
    answers: StoreAnswers
    job: JobNotes
    limit_s: float
    put_off: Callable[[float], None]
    """Allow that much more time from now on."""

    poll: Callable[[], None]


def _reach(config: RunConfig, identity: Identity, *, tracker: ProgressTracker, poll: Callable[[], None]) -> _Way:
    """Raises: TransportError."""
    limit_s = config.fault.rendezvous_timeout_s
    answers = StoreAnswers(limit_s=limit_s, poll=poll)
    store = answers.ask(lambda: connect(identity, timeout_s=limit_s))

    def put_off(seconds: float) -> None:
        # As long as another run trains here there is no progress to be made.
        tracker.set_phase(Phase.RENDEZVOUS)
        answers.put_off(seconds)

    return _Way(store, answers, JobNotes(store, identity), limit_s, put_off, poll)


def _take_lease(
    config: RunConfig, identity: Identity, own: _Own, way: _Way, *, parent: int, on_lost: Callable[[str], None]
) -> Lease:
    """Raises: RunHeldError, StorageError, StopRequestedError, TransportError."""

    def wait_on() -> None:
        way.put_off(way.limit_s)
        way.poll()

    asking = Asking(BoundedStore(way.store, way.answers), parent, wait_on, on_lost)
    # Also where the run folder was deleted under a job that lives, the numbers go on.
    used = max(map(number_of, way.job.read().incarnations), default=0)
    return take_lease(own.store, config, identity, asking, used=used)


def _meet(config: RunConfig, identity: Identity, own: _Own, way: _Way, lease: Lease | None, *, tracker: ProgressTracker) -> Met:
    number = lease.number if lease is not None else identity.launcher.generation if identity.launcher is not None else 0
    digest = group_digest(config, data_digest=own.samples.digest)
    introduction = Introduction(identity.host, identity.local_world_size, own.backend, digest)
    answers = way.answers
    incarnation = agree(
        BoundedStore(way.store, answers),
        identity,
        introduction,
        number=number,
        timeout_s=answers.left_s,
        poll=way.poll,
        put_off=way.put_off,
        tell=_tell,
    )
    if identity.rank == 0:
        note_start(own.store, incarnation=incarnation.name, world_size=identity.world_size)
    shared = dist.PrefixStore(f"elastictrain/{incarnation.name}", way.store)
    heartbeats = answers.ask(
        lambda: HeartbeatStore(
            shared,
            rank=identity.rank,
            hosts=incarnation.hosts,
            tell=lambda: beat_of(tracker.mark, options=config.fault),
            interval_s=config.fault.heartbeat_s,
        )
    )
    heartbeats.start()
    key = f"events/{incarnation.name}-r{identity.rank:05d}.jsonl"
    unwritable = None
    try:
        log: AppendLog = open_log(own.store, key, config)
    except StorageError as error:
        log, unwritable = LostLog(), error
    journal = Journal(log, incarnation=incarnation.name, rank=identity.rank)
    return Met(incarnation, shared, own.store, journal, heartbeats, way.job, lease, unwritable)


def beat_of(mark: ProgressMark, *, options: FaultGroup) -> dict[str, object]:
    """What this rank tells the others of itself."""
    return to_heartbeat(mark, now_s=time.monotonic(), bound_s=bound_s(mark, options))


def _leave_if_asked(stop_request: StopRequested) -> None:
    """Raises: StopRequestedError."""
    if (request := stop_request()) is not None:
        raise StopRequestedError(f"asked to stop ({request.reason}) before training began")


def _tell(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def open_log(store: Store, key: str, config: RunConfig) -> AppendLog:
    """A log of this rank in the run's folder. Raises: StorageError."""
    return open_append_log(store, key, flush_s=config.telemetry.flush_s, close_s=config.fault.close_s)
