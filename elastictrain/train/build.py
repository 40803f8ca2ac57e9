"""The only place where parts are put together: from a configuration to a loop that is ready to run."""

import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from elastictrain.checkpoint.checkpointer import Checkpointer
from elastictrain.checkpoint.exchange import gather_json
from elastictrain.checkpoint.memory.folder import run_folder
from elastictrain.checkpoint.saver.link import SaverLink
from elastictrain.config.composed import RunConfig
from elastictrain.config.digest import config_digest
from elastictrain.data.assignment import Share
from elastictrain.data.ledger import Ledger, ledger_key
from elastictrain.data.loader import Loader, ReadAhead
from elastictrain.distributed.group import limit_collectives
from elastictrain.distributed.mesh import mesh_shape
from elastictrain.distributed.wrapping import Wrapped, finish, share_copies, wrap
from elastictrain.events import Start
from elastictrain.fault.reasons import leave_begun
from elastictrain.identity import Identity
from elastictrain.liveness.progress import Phase, ProgressTracker
from elastictrain.train.bringup import Started, StopRequested, open_log
from elastictrain.train.evaluate import Evaluator
from elastictrain.train.keepers import meet_keepers
from elastictrain.train.leaving import left_s
from elastictrain.train.loop import LoopParts
from elastictrain.train.memory import make_saving
from elastictrain.train.observing import make_observer
from elastictrain.train.optimizer import describe_short_warmup, forget_steps, make_optimizer
from elastictrain.train.parameters import build_model, fill, fill_again
from elastictrain.train.replica_comparison import ReplicaComparison
from elastictrain.train.restoring import make_checkpointer, restore
from elastictrain.train.runfolder import store_config
from elastictrain.train.saving import SavingParts
from elastictrain.train.state import TrainState
from elastictrain.train.step import Stepper
from elastictrain.train.task import CountsFlops, HasBlocks, ShowsSample, Task
from elastictrain.version import __version__

_MUCH_FOR_A_CPU = 200_000_000


@dataclass(frozen=True, slots=True)
class Built:
    """A loop that is ready to run, and what has to be closed after it."""

    loop: LoopParts
    loader: Loader
    close_observer: Callable[[], None]
    show_sample: Callable[[], None]

    def close(self, *, finished: bool) -> None:
        """End the loader's workers and everything that writes. `finished`: the run is complete."""
        self.loop.saving.close(finished=finished)
        self.abandon()

    def abandon(self) -> None:
        """The same after a failure: the keeper finds out by itself that this worker is gone, and tells the others."""
        self.loader.close()
        if self.loop.ledger is not None:
            self.loop.ledger.close()
        self.close_observer()


@dataclass(frozen=True, slots=True)
class _Setting:
    """What all parts are made from."""

    config: RunConfig
    identity: Identity
    started: Started
    tracker: ProgressTracker
    stop_request: StopRequested


def build(
    config: RunConfig,
    identity: Identity,
    started: Started,
    *,
    tracker: ProgressTracker,
    stop_request: StopRequested,
    link: SaverLink | None,
) -> Built:
    """Model, state, loader and loop; the state is restored. `link` leads to this host's keeper. Collective: yes."""
    setting = _Setting(config, identity, started, tracker, stop_request)
    record = started.met.journal.record
    tracker.set_phase(Phase.BUILD)
    with started.timings.phase("build"):
        wrapped, state = _build_state(setting)
    with started.timings.phase("keeper"):
        memory = meet_keepers(config, identity, started, link)
    if identity.speaks:
        store_config(started.store, config)
        record(_start_event(setting))
    checkpointer = make_checkpointer(config, identity, started)
    tracker.set_phase(Phase.RESTORE)
    recall = memory.recall if memory is not None else None
    resume = restore(
        checkpointer,
        state,
        on_change=config.run.on_change,
        recall=recall,
        reset=lambda: _begin_again(setting, state, wrapped=wrapped),
    )
    if identity.speaks:
        record(resume)
    if identity.local_rank == 0:
        started.met.job.begin(started.met.incarnation.name, step=resume.step)
    loader = _make_loader(setting, first_step=state.step)
    tokens, flops = _arithmetic(started, state.model)
    observer = make_observer(
        config,
        identity,
        started.store,
        device=started.group.device,
        resume=resume,
        flops_per_token=None if flops is None else flops / tokens,
    )
    if sentence := describe_short_warmup(config.optim, total_steps=config.train.steps):
        observer.say(sentence)
    ledger = _make_ledger(setting)

    def tighten() -> None:
        limit_collectives(wrapped.groups, backend=started.group.backend, timeout_s=config.fault.step_timeout_s)
        if identity.launcher is not None and identity.local_rank == 0:
            leave_begun(identity.launcher.folder, resumed_step=resume.step)

    comparison = _make_comparison(setting, state, wrapped=wrapped)
    in_storage = resume.tier in ("storage", "none")
    saving = make_saving(
        memory,
        _saving_parts(setting, checkpointer, state, comparison=comparison, ledger=ledger, say=observer.say),
        config=config,
        identity=identity,
        started=started,
        in_storage=in_storage,
    )
    parts = LoopParts(
        config=config,
        identity=identity,
        state=state,
        stepper=_make_stepper(setting, state, wrapped=wrapped, before_update=saving.before_update),
        micro_batches=iter(loader),
        saving=saving,
        comparison=comparison,
        evaluator=_make_evaluator(setting, wrapped=wrapped),
        ledger=ledger,
        observer=observer,
        record=record,
        tracker=tracker,
        stop_request=stop_request,
        any_reason=lambda own: next((str(one) for one in gather_json(own, group=started.group.control) if one), ""),
        in_storage=in_storage,
        on_first_step=tighten,
        tokens_per_sample=tokens,
    )

    return Built(
        parts,
        loader,
        observer.close,
        lambda: show_sample(started.task, wrapped, device=started.group.device, seed=config.run.seed, say=observer.say),
    )


def _saving_parts(
    setting: _Setting,
    checkpointer: Checkpointer,
    state: TrainState,
    *,
    comparison: ReplicaComparison,
    ledger: Ledger | None,
    say: Callable[[str], None],
) -> SavingParts:
    config, journal, identity = setting.config, setting.started.met.journal, setting.identity
    host = f"host {identity.host}" if identity.only_host else "the hosts"

    def flush_records() -> None:
        journal.flush()
        if ledger is not None:
            ledger.flush()

    return SavingParts(
        checkpointer=checkpointer,
        state=state,
        global_batch=config.train.global_batch,
        group=setting.started.group.control,
        rank=setting.identity.rank,
        max_failed_saves=config.checkpoint.max_failed_saves,
        comparison=comparison,
        save_timeout_s=config.fault.save_timeout_s,
        finish_timeout_s=config.fault.close_s,
        left_s=lambda: left_s(setting.stop_request(), now_s=time.monotonic(), grace_s=config.fault.shutdown_grace_s),
        tracker=setting.tracker,
        flush_records=flush_records,
        record=journal.record,
        say=say,
        committed=setting.started.met.job.committed,
        memory_place=f"the memory of {host} ({run_folder(config.checkpoint.memory_dir, config.run.dir)})",
    )


def show_sample(task: Task, wrapped: Wrapped, *, device: torch.device, seed: int, say: Callable[[str], None]) -> None:
    """Let the task show what the model has learnt, if it can; a failure is shown too, and raises nothing. Collective: yes."""
    if not isinstance(task, ShowsSample):
        return
    try:
        with wrapped.precision_context():
            text = task.show_sample(wrapped.module, device=device, seed=seed)
    except Exception as error:  # noqa: BLE001  # the run is complete and saved: a text is not worth its exit code
        text = f"the task could not show a sample: {type(error).__name__}: {error}"
    say(text)


def _build_state(setting: _Setting) -> tuple[Wrapped, TrainState]:
    config, identity, started = setting.config, setting.identity, setting.started
    task, device = started.task, started.group.device
    model = build_model(task, seed=config.run.seed, device=device)
    if identity.speaks and (warning := too_slow(sum(map(Tensor.numel, model.parameters())), device=device)):
        sys.stderr.write(f"elastictrain: {warning}\n")
        sys.stderr.flush()
    shape = mesh_shape(
        config.parallel.kind,
        world_size=identity.world_size,
        local_world_size=started.met.incarnation.shared_local_size,
        shard_size=config.parallel.shard_size,
    )
    blocks = task.blocks(model) if isinstance(task, HasBlocks) else ()
    wrap(model, blocks, shape=shape, parallel=config.parallel, train=config.train, device=device)
    fill(model, task, seed=config.run.seed, device=device)
    wrapped = finish(
        model,
        shape=shape,
        parallel=config.parallel,
        train=config.train,
        device=device,
        world_size=identity.world_size,
    )
    limit_collectives(wrapped.groups, backend=started.group.backend, timeout_s=config.fault.init_timeout_s)
    return wrapped, TrainState(model, make_optimizer(model, config.optim), data_digest=started.samples.digest)


def too_slow(num_parameters: int, *, device: torch.device) -> str:
    """Said before a person waits for something that will take hours; empty if it will not. Pure."""
    if device.type != "cpu" or num_parameters < _MUCH_FOR_A_CPU:
        return ""
    return f"no GPU is used: a model of {num_parameters / 1e6:,.0f} M parameters takes minutes to make, and minutes a step"


def _begin_again(setting: _Setting, state: TrainState, *, wrapped: Wrapped) -> None:
    """Every tensor gets its first value again. Collective: yes."""
    started = setting.started
    fill_again(state.model, started.task, seed=setting.config.run.seed, device=started.group.device)
    share_copies(wrapped)
    forget_steps(state.optimizer)


def _make_stepper(setting: _Setting, state: TrainState, *, wrapped: Wrapped, before_update: Callable[[], None]) -> Stepper:
    return Stepper(
        setting.started.task,
        wrapped,
        state.optimizer,
        clip_norm=setting.config.train.clip_norm,
        seed=setting.config.run.seed,
        tracker=setting.tracker,
        before_update=before_update,
    )


def _make_comparison(setting: _Setting, state: TrainState, *, wrapped: Wrapped) -> ReplicaComparison:
    identity, met = setting.identity, setting.started.met
    return ReplicaComparison(
        state,
        shape=wrapped.shape,
        rank=identity.rank,
        hosts=met.incarnation.hosts,
        every_steps=setting.config.fault.compare_every_steps,
        record=met.journal.record if identity.speaks else None,
    )


def _make_loader(setting: _Setting, *, first_step: int) -> Loader:
    config, identity, started = setting.config, setting.identity, setting.started
    return Loader(
        started.samples.train,
        share=Share(
            global_batch=config.train.global_batch,
            micro_batch=config.train.micro_batch,
            world_size=identity.world_size,
            rank=identity.rank,
        ),
        seed=config.run.seed,
        shuffle=config.data.shuffle,
        first_step=first_step,
        last_step=config.train.steps,
        read_ahead=ReadAhead(
            workers=config.data.workers,
            prefetch=config.data.prefetch,
            pin_memory=started.group.device.type == "cuda",
        ),
    )


def _make_evaluator(setting: _Setting, *, wrapped: Wrapped) -> Evaluator | None:
    config, started = setting.config, setting.started
    if started.samples.held_out is None or not config.train.eval_every_steps:
        return None
    return Evaluator(
        started.task,
        wrapped,
        started.samples.held_out,
        num_samples=config.train.eval_samples,
        micro_batch=config.train.micro_batch,
        identity=setting.identity,
        device=started.group.device,
        tracker=setting.tracker,
    )


def _make_ledger(setting: _Setting) -> Ledger | None:
    if not setting.config.data.ledger:
        return None
    key = ledger_key(incarnation=setting.started.met.incarnation.name, rank=setting.identity.rank)
    return Ledger(open_log(setting.started.store, key, setting.config))


def _arithmetic(started: Started, model: nn.Module) -> tuple[int, float | None]:
    """Tokens and floating-point operations per sample; a sample counts as one token if the task does not know."""
    if not isinstance(started.task, CountsFlops):
        return 1, None
    sample = started.samples.train[0]
    return started.task.tokens_per_sample(sample), started.task.flops_per_sample(model, sample)


def _start_event(setting: _Setting) -> Start:
    started = setting.started
    device = started.group.device
    return Start(
        world_size=setting.identity.world_size,
        hosts=tuple(dict.fromkeys(started.met.incarnation.hosts)),
        backend=started.group.backend,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        config_digest=config_digest(setting.config),
        versions={"elastictrain": __version__, "torch": torch.__version__, "python": platform.python_version()},
        seconds=started.timings.seconds,
    )
