"""Builds everything between a process group and a loop that is ready to run. Parts are put together only here."""

import logging
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from elastictrain.checkpoint.checkpointer import Checkpointer, used_versions
from elastictrain.checkpoint.copier import Arena
from elastictrain.checkpoint.exchange import gather_json
from elastictrain.checkpoint.lineage import number_of
from elastictrain.checkpoint.manifest import StateCounters, counters_of
from elastictrain.checkpoint.saver.link import SaverLink
from elastictrain.checkpoint.signing import proof_of, signing_key
from elastictrain.config.digest import config_digest
from elastictrain.data.ledger import Ledger
from elastictrain.data.loader import Loader, WorkerPool
from elastictrain.distributed.clock import clock_of
from elastictrain.distributed.group import limit_collectives
from elastictrain.distributed.reattach import reattach
from elastictrain.distributed.wrapping import Wrapped, Wrapping, mesh_shape, share_copies
from elastictrain.errors import ConfigError, DataError, Problem
from elastictrain.events import Resume, Start
from elastictrain.liveness.progress import Phase
from elastictrain.storage.appendlog import open_append_log
from elastictrain.telemetry.progress import write_above
from elastictrain.torch_private import follow_compilations
from elastictrain.train.checks import store_config
from elastictrain.train.compile_cache import begin_compile_cache
from elastictrain.train.context import TrainContext
from elastictrain.train.evaluate import Evaluator
from elastictrain.train.evaluation_history import EvaluationHistory
from elastictrain.train.initial_weights import load_initial_weights
from elastictrain.train.loop import Loop
from elastictrain.train.metric_names import MetricNames
from elastictrain.train.observing import LogRankObserver, Observer
from elastictrain.train.optimizer import describe_short_warmup, make_optimizers
from elastictrain.train.parameters import build_model, fill, fill_again, float8_layers
from elastictrain.train.parked_memory import ParkedMemory
from elastictrain.train.replica_comparison import ReplicaComparison
from elastictrain.train.saving import SynchronousSaving
from elastictrain.train.snapshot_memory import SnapshotMemory, connect_savers, make_saving
from elastictrain.train.snapshot_saving import Saving
from elastictrain.train.state import SavedState, TrainState
from elastictrain.train.step import Stepper
from elastictrain.train.step_times import StepTimes
from elastictrain.train.straggler import StragglerFinder
from elastictrain.train.task import BringsDatasets, CountsFlops, HasBlocks, UpdatesInTurn
from elastictrain.train.weight_average import WeightAverage

logger = logging.getLogger(__name__)

_MUCH_FOR_A_CPU = 200_000_000


@dataclass(frozen=True, slots=True)
class BuiltState:
    """What a process keeps from one generation to the next; its tensors are given new values there."""

    wrapped: Wrapped
    state: TrainState
    arena: Arena | None = None
    pool: WorkerPool | None = None  # data workers
    parked: ParkedMemory | None = None  # what a standby has given back to the device


def detached(loop: Loop) -> BuiltState:
    """End a loop, and return what the next one in this process can use. Raises: CheckpointError if a copy to host memory does
    not end."""
    pool, wrapped = loop.loader.release(), loop.stepper.wrapped
    loop.saving.detach()
    return BuiltState(wrapped, loop.state, loop.saving.arena, pool)


def build(context: TrainContext, link: SaverLink | None, before: BuiltState | None = None) -> Loop:
    """Build model, state, loader and loop, and restore the state. `link` connects to this host's saver; `before` gets the new
    groups, and is not built anew. Collective: yes."""
    config, identity = context.config, context.identity
    # A process that has finished a step has compiled all that it needs.
    compile_cache = None if context.tracker.has_trained else begin_compile_cache(context)
    with context.timed("build", Phase.BUILD):
        wrapped, state = build_state(context, before)
    times = context.times
    # Where the optimizer has imported the compiler.
    follow_compilations(begins=lambda: times.compiling(begins=True), ends=lambda: times.compiling(begins=False))
    with context.timed("keeper"):
        memory = connect_savers(context, link, arena=before.arena if before is not None else None)
    checkpointer = make_checkpointer(context)
    try:
        resume = _restore_or_begin(context, checkpointer, state, wrapped=wrapped, memory=memory, before=before)
    except BaseException:
        if memory is not None and memory.others is not None:
            memory.others.close()
        raise
    tokens_per_sample, flops_per_token = _count(context, state)
    observer = LogRankObserver(context, resume, flops_per_token=flops_per_token) if identity.is_log_rank else Observer()
    if sentence := describe_short_warmup(config.optim, total_steps=config.train.steps):
        observer.print_line(sentence)
    context.times.end_part("loggers")
    ledger = None
    if config.data.ledger:
        key = f"ledger/{context.generation.name}-r{identity.rank:05d}.jsonl"
        ledger = Ledger(open_append_log(context.store, key, flush_s=config.telemetry.flush_s, close_s=config.fault.close_s))
    comparison = ReplicaComparison(context, state, wrapped.shape)
    in_storage = resume.tier in ("storage", "none")
    synchronous = SynchronousSaving(context, checkpointer, state, comparison, ledger, observer)
    with context.timed("slots"):
        arena = before.arena if before is not None else None
        saving = make_saving(memory, synchronous, in_storage=in_storage, arena=arena)
    evaluator, names = None, MetricNames(context.group.control)
    if context.samples.held_out is not None and config.train.eval_every_steps:
        evaluator = Evaluator(context, wrapped, context.samples.held_out, names.check)
    if compile_cache is not None:
        compile_cache.wait()
    context.times.end_part("compile_cache")
    with context.timed("preflight_group", Phase.RESTORE):
        context.await_group()
    return Loop(
        context=context,
        state=state,
        stepper=_make_stepper(context, wrapped, state, saving=saving, names=names),
        stragglers=StragglerFinder() if identity.world_size > 1 else None,
        loader=_make_loader(context, first_step=state.step, pool=before.pool if before is not None else None),
        saving=saving,
        comparison=comparison,
        evaluator=evaluator,
        ledger=ledger,
        observer=observer,
        tokens_per_sample=tokens_per_sample,
        in_storage=in_storage,
        skipped={step: tuple(context.plan_passes(step - 1, step)) for step in identity.poisoned.skipped},
        compile_cache=compile_cache,
        history=EvaluationHistory.resume(context, step=state.step) if evaluator is not None else None,
    )


def _make_stepper(context: TrainContext, wrapped: Wrapped, state: TrainState, *, saving: Saving, names: MetricNames) -> Stepper:
    timed = context.identity.world_size > 1 or context.on_gpu
    times = StepTimes(clock_of(context.group.device)) if timed else None
    return Stepper(
        context,
        wrapped,
        state.optimizer,
        before_update=saving.before_update,
        times=times,
        average=state.average,
        check_names=names.check,
    )


def _restore_or_begin(
    context: TrainContext,
    checkpointer: Checkpointer,
    state: TrainState,
    *,
    wrapped: Wrapped,
    memory: SnapshotMemory | None,
    before: BuiltState | None,
) -> Resume:
    """Restore the newest state; without one the state is that of a new run. Collective: yes. Raises: as `restore`."""
    if context.identity.is_log_rank:
        record_start(context)

    def begin_again() -> None:
        fill_again(state.model, context.task, seed=context.config.run.seed, device=context.group.device)
        share_copies(wrapped)
        state.optimizer.reset()

    # Nothing is loaded over the state of a generation that has ended before its first snapshot.
    resume = restore(context, checkpointer, state, memory=memory, reset=begin_again, changed=before is not None)
    if resume.tier == "none":
        _begin(context, state)
    return resume


def _count(context: TrainContext, state: TrainState) -> tuple[int | None, float | None]:
    """Tokens of a sample, and operations of a token; None where the task does not count them."""
    if not isinstance(context.task, CountsFlops):
        # A sample of token files has as many inputs.
        return None if isinstance(context.task, BringsDatasets) else context.config.train.seq_len, None
    sample = context.samples.train.read_one(0, position=0)
    tokens = context.task.tokens_per_sample(sample)
    return tokens, context.task.flops_per_sample(state.model, sample) / tokens


def make_checkpointer(context: TrainContext) -> Checkpointer:
    """Collective: yes. Raises: ConfigError if some rank has no key, or a different one."""
    config, identity, incarnation = context.config, context.identity, context.generation.name
    key = signing_key(config.checkpoint.key_env)
    if key is not None:
        proofs = gather_json(proof_of(key), group=context.group.control)
        others = [rank for rank, proof in enumerate(proofs) if proof != proofs[0]]
        if others:
            message = f"must name the same secret on all hosts, but {key.name} of rank {others[0]} is another"
            raise ConfigError([Problem("checkpoint.key_env", message)])
    return Checkpointer(
        context.store,
        options=config.checkpoint,
        group=context.group.control,
        rank=identity.rank,
        world_size=identity.world_size,
        incarnation=incarnation,
        config_digest=config_digest(config),
        record=context.journal.record,
        job=context.job.gather(context.group.control),
        generation=number_of(incarnation),
        signing=key,
        poisoned=identity.poisoned,
    )


def restore(
    context: TrainContext,
    checkpointer: Checkpointer,
    state: SavedState,
    *,
    memory: SnapshotMemory | None,
    reset: Callable[[], None],
    changed: bool = False,
) -> Resume:
    """Load the newest state of any tier, and record it; without one `reset` gives the state its first values if they are gone,
    as they are where it was `changed`. Collective: yes. Raises: CheckpointError, ConfigError, StorageError; with
    run.on_change=stop, DataError if it was trained on other data."""
    config, identity = context.config, context.identity
    context.tracker.set_phase(Phase.RESTORE)
    began = time.monotonic()
    recall = memory.restore if memory is not None else None
    result = checkpointer.restore(tensors=state.tensors(), reset=reset, recall=recall)
    if result is None:
        if identity.launcher is not None and any(gather_json(changed, group=context.group.control)):
            reset()
        seconds = {"total": round(time.monotonic() - began, 4)}
        resume = Resume(step=0, tier="none", checkpoint=None, bytes=0, seconds=seconds)
    else:
        # The restore has refused states whose counters are not sound.
        counters = counters_of(result.state, step=result.step)
        state.adopt(counters)
        trained, now = counters.data_digest, state.counters.data_digest
        if trained is not None and trained != now and config.run.on_change == "stop":
            message = (
                f"holds other data (digest {now}) than {result.checkpoint} was trained on ({trained}); put it "
                "back, or set run.on_change=continue"
            )
            raise DataError([Problem("data.path", message)])
        resume = Resume(
            step=state.step, tier=result.tier, checkpoint=result.checkpoint, bytes=result.bytes, seconds=result.seconds
        )
    context.times.end_part("restore")
    if identity.is_log_rank:
        context.journal.record(resume)
    if identity.local_rank == 0:
        context.job.begin(context.generation.name, step=resume.step, tier=resume.tier)
    return resume


def _begin(context: TrainContext, state: TrainState) -> None:
    """First weights from elsewhere, if there are any, and an average that begins with the weights. Raises: ConfigError."""
    url = context.config.train.init_from
    if url is not None:
        unused = load_initial_weights(url, state.model, context.task)
        if context.identity.is_log_rank:
            logger.info("first weights from %s; %d tensors there are not used", url, unused)
    if state.average is not None:
        state.average.reset()


def record_start(context: TrainContext) -> None:
    """Store the configuration, and record the event `start`; on the log rank alone. Raises: StorageError."""
    store_config(context.store, context.config)
    device = context.group.device
    start = Start(
        world_size=context.identity.world_size,
        hosts=tuple(dict.fromkeys(context.generation.hosts)),
        backend=context.group.backend,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        config_digest=config_digest(context.config),
        versions=used_versions(),
        seconds={**context.times.seconds},
        pids=context.generation.pids,
    )
    context.journal.record(start)


def build_state(context: TrainContext, before: BuiltState | None = None) -> tuple[Wrapped, TrainState]:
    """The model and its state, not restored yet; `before` with new groups, if there is one. Collective: yes."""
    config, identity = context.config, context.identity
    task, device = context.task, context.group.device
    local_world_size = context.generation.shared_local_size
    shape = mesh_shape(config.parallel, world_size=identity.world_size, local_world_size=local_world_size)
    wrapping = Wrapping(shape, config.parallel, config.train, device, in_part=isinstance(task, UpdatesInTurn))
    if before is not None:
        if before.parked is not None:
            before.parked.take()
        wrapped = reattach(wrapping, before.wrapped)
        model, optimizers, average = before.state.model, before.state.optimizer, before.state.average
    else:
        context.prepare_compiler()
        context.times.end_part("imports")
        model = build_model(task, seed=config.run.seed, device=device)
        if identity.is_log_rank and (warning := too_slow(sum(map(Tensor.numel, model.parameters())), device=device)):
            write_above(sys.stderr, f"elastictrain: {warning}")
        float8 = float8_layers(task, model) if config.train.precision == "fp8" else ()
        wrapping.wrap(model, task.blocks(model) if isinstance(task, HasBlocks) else (), float8=float8)
        fill(model, task, seed=config.run.seed, device=device)
        wrapped, optimizers = wrapping.finish(model), make_optimizers(model, config.optim, task)
        average = WeightAverage.of(model, decay=config.train.ema) if config.train.ema is not None else None
    limit_collectives(wrapped.groups, backend=context.group.backend, timeout_s=config.fault.init_timeout_s)
    return wrapped, TrainState(model, optimizers, StateCounters(0, data_digest=context.samples.digest), average=average)


def too_slow(num_parameters: int, *, device: torch.device) -> str:
    """A warning for a model that trains for hours on a CPU; empty if it does not."""
    if device.type != "cpu" or num_parameters < _MUCH_FOR_A_CPU:
        return ""
    return f"no GPU is used: a model of {num_parameters / 1e6:,.0f} M parameters takes minutes to make, and minutes a step"


def _make_loader(context: TrainContext, *, first_step: int, pool: WorkerPool | None) -> Loader:
    config, samples, skipped = context.config, context.samples.train, context.identity.poisoned.skipped
    planned = (one for one in context.plan_passes(first_step, config.train.steps) if one.step + 1 not in skipped)
    pin_memory = context.group.device.type == "cuda"
    return Loader(
        samples, planned, workers=config.data.workers, prefetch=config.data.prefetch, pin_memory=pin_memory, pool=pool
    )
