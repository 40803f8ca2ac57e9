"""`elastictrain.attach`: snapshots, checkpoints, agreed stops and verified restores for training loops that users write."""

import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import wraps
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from elastictrain.checkpoint.copier import Arena
from elastictrain.data.samples import derive_seed
from elastictrain.distributed.reattach import exchange_groups, forget_step
from elastictrain.errors import EXIT_OK, EXIT_STOPPED, CheckpointError, ConfigError, Problem, StopRequestedError, UsageError
from elastictrain.identity import read_identity
from elastictrain.liveness.progress import Phase
from elastictrain.own_loop.agreement import StepAgreement
from elastictrain.own_loop.figures import CurveObserver, Figures, take_figures
from elastictrain.own_loop.loop_end import LoopEnd
from elastictrain.own_loop.module_settings import ModuleSettings
from elastictrain.own_loop.session import Session, init_process_group, present_session, report_exceptions
from elastictrain.own_loop.state import OwnState, own_state, plain
from elastictrain.telemetry.progress import write_above
from elastictrain.train.attachment import Attachment
from elastictrain.train.build import make_checkpointer, record_start, restore
from elastictrain.train.observing import Observer
from elastictrain.train.participant import OrderlyEnd
from elastictrain.train.replica_comparison import ReplicaComparison
from elastictrain.train.saving import Reached, SynchronousSaving
from elastictrain.train.snapshot_memory import SnapshotMemory, connect_savers, make_saving
from elastictrain.train.step import StepFlags, after_step

P = ParamSpec("P")
T = TypeVar("T")

_TOLD_S, _LOOK_S = 0.5, 0.01  # the launcher soon says that a rank is lost; a mistake of the program's is told of after that


@dataclass(slots=True)
class Run:
    """A run whose loop is the user's. All ranks make the same calls, in the same order. Made by `attach`.

        with elastictrain.attach("runs/mine", model=model, optimizer=optimizer) as run:
            for step in range(run.restore() + 1, 1001):
                ...                      # forward, backward, optimizer.step()
                run.step_done(step, metrics={"loss": loss})
                if run.should_stop:
                    break

    Left by an exception or a kill, the same command goes on from the newest step that every rank has."""

    _session: Session
    _state: OwnState
    _memory: SnapshotMemory | None = field(default=None, init=False)
    _synchronous: SynchronousSaving | None = field(default=None, init=False)  # once restored
    _in_storage: bool = field(default=True, init=False)
    _attachment: Attachment | None = field(default=None, init=False)  # once a step is done
    _agreement: StepAgreement | None = field(default=None, init=False)
    _unfinished: tuple[int, StepFlags] | None = field(default=None, init=False)
    _figures: Figures | None = field(default=None, init=False)
    _began_s: float = field(default=0.0, init=False)
    _stop_reason: str = field(default="", init=False)
    _ended: bool = field(default=False, init=False)
    _first_done: bool = field(default=False, init=False)
    _updated: bool = field(default=False, init=False)  # since the last step was done
    _ending: LoopEnd | None = field(default=None, init=False)  # once restored
    _hooked: bool = field(default=False, init=False)
    _generations: int = field(default=0, init=False)  # that this process has left
    _arena: Arena | None = field(default=None, init=False)  # slots of the generation before
    _settings: ModuleSettings | None = field(default=None, init=False)  # those of a new process; recorded if it may stay

    @property
    def step(self) -> int:
        """The newest step that is done; 0 for none."""
        return self._state.step

    @property
    def should_stop(self) -> bool:
        """Whether all ranks have agreed to stop after the last step, which is saved: leave the loop, and close the run."""
        return bool(self._stop_reason)

    def restore(self) -> int:
        """Load the newest step that is complete and verified, from host memory, another host's memory or storage, into model,
        optimizer and extras, in place. Call it once, before the first step. Returns the step; 0 if there is none: then nothing
        was changed. Collective: yes. Raises: CheckpointError, ConfigError if the checkpoint is of another model,
        StorageError."""
        self._check_open()
        if self._synchronous is not None:
            raise UsageError("run.restore() must be called once, but was called again")
        if not self._session.joined:
            self._session.join()
            if self._settings is None:
                self._settings = ModuleSettings.record(self._state.modules())
            self._settings.restore()
            exchange_groups(self._state.models.values(), fresh=not self._generations)
        context, state = self._session.context, self._state
        state.join(context.group.control)
        if context.identity.is_log_rank:
            record_start(context)
        self._memory = connect_savers(context, self._session.part.link, arena=self._arena)
        checkpointer = make_checkpointer(context)
        state.make_room()
        shape = state.mesh_shape(context.identity.world_size)
        resume = restore(
            context, checkpointer, state, memory=self._memory, reset=_refuse_changed_state, changed=self._generations > 0
        )
        if not resume.step:
            state.forget()
        first_step = resume.step + 1
        observer = CurveObserver(context, first_step=first_step) if context.identity.is_log_rank else Observer()
        self._ending = self._session.part.report.loop = LoopEnd(state, observer, lambda: self._attachment)
        observer.print_line(f"resumed at step {resume.step}" if resume.step else f"a new run in {context.store.url}: step 0")
        comparison = ReplicaComparison(context, state, shape)
        self._synchronous = SynchronousSaving(context, checkpointer, state, comparison, None, observer)
        self._in_storage = resume.tier in ("storage", "none")
        for optimizer in state.optimizers.values() if not self._hooked else ():
            optimizer.register_step_pre_hook(self._before_update)
        self._hooked = True
        if resume.step:
            # Not later: where only memory has this step it may have to be saved first, and it is still the one that is live.
            self._begin_saving(self._synchronous)
        self._begin_step(first_step)
        return resume.step

    def step_done(self, step: int, metrics: Mapping[str, float | Tensor] | None = None) -> None:
        """Call this after the update of `step`, which counts from 1. Takes a snapshot or saves where one is due, lets the ranks
        agree on a stop, and records `metrics`: numbers or tensors of one element; `loss`, `grad_norm` and `tokens` (of all
        ranks in this step) are known to reports. Tensors are not waited for. Collective: yes. Raises: UsageError;
        SavesFailingError, ReplicasDivergedError."""
        self._check_open()
        if self._synchronous is None:
            raise UsageError("run.restore() must be called before the first run.step_done()")
        if step != self._state.step + 1:
            raise UsageError(f"run.step_done() must be called with step {self._state.step + 1}, but was with {step}")
        if self._stop_reason:
            raise StopRequestedError(self._stop_reason)
        context = self._session.context
        first, self._first_done, self._updated = not self._first_done, True, False
        # In a new run only now: before its first update an optimizer may have no state.
        attachment = self._attachment or self._begin_saving(self._synchronous)
        agreement = self._agreement or self._ask(attachment.flags(step))
        flags = agreement.flags()
        seconds = time.monotonic() - self._began_s
        figures = take_figures(step, metrics or {}, optimizers=self._state.optimizers.values(), seconds=seconds)
        self._state.step = step
        attachment.comparison.step_launched(step)
        self._finish()
        self._figures, self._unfinished = figures, (step, flags)
        saving = attachment.saving
        actions = after_step(step, context.config, stop_agreed=flags.stop, save_agreed=flags.save or saving.save_pending)
        early = not actions.leave and not saving.requires_finished_step
        if early:
            attachment.save(step, actions.save)
        if first or not early:
            self._finish()
        if first:
            attachment.first_step_done()
        if actions.leave:
            attachment.save_now(step, "stop")
            self._stop_reason = context.any_stop_reason() or "another rank was asked to stop"
            return
        if not early:
            attachment.save(step, actions.save)
        self._agreement = self._ask(attachment.flags(step + 1))
        self._begin_step(step + 1)

    def save(self) -> None:
        """Save the last step, and wait until it is durable. Collective: yes. Raises: SavesFailingError."""
        self._check_open()
        if self._attachment is None:
            raise UsageError("run.save() must be called after a step is done")
        if self._updated:
            raise UsageError("run.save() must be called after run.step_done(), but an optimizer has made another update since")
        self._settle()
        self._attachment.save_now(self._state.step, "interval")
        self._agreement = self._ask(self._attachment.flags(self._state.step + 1))
        self._begin_step(self._state.step + 1)

    def close(self) -> int:
        """Save the last step unless a stop has done so, or an update has begun another one; wait until it is durable, and leave
        the run; returns the exit code that this process should end with: 0, or 75 if it was asked to stop, so that launchers
        start it again. Collective: yes. Raises: SavesFailingError."""
        if self._ended:
            return EXIT_STOPPED if self._stop_reason else EXIT_OK
        attachment, code = self._attachment, EXIT_OK
        if attachment is not None:
            self._settle()
            if self._updated and not self._stop_reason:
                text = f"the last update is not saved, as no run.step_done() followed it: the run goes on from step {self.step}"
                attachment.observer.print_line(text)
            elif not self._stop_reason and not (self._in_storage and attachment.reached == Reached(self.step, "storage")):
                attachment.save_now(self._state.step, "end")
                if attachment.reached != Reached(self._state.step, "storage"):
                    self._stop_reason = self._session.context.any_stop_reason() or "the last step is not in storage"
        if self._stop_reason:
            code = EXIT_STOPPED
        self._session.context.tracker.set_phase(Phase.END, step=self._state.step)
        finished = code == EXIT_OK and not self._updated
        end = OrderlyEnd(code, self._stop_reason or "done", finished=finished, keep=self._keep, free=self._forget_step)
        self._session.end(self._ending or LoopEnd(self._state, Observer(), lambda: None), end)
        self._ended = self._session.ended
        if not self._ended:
            self._reset()
        return code

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """After an error nothing is waited for: the process ends, and reports it. `sys.exit(0)` is none."""
        in_order = kind is None or (isinstance(error, SystemExit) and error.code in (0, None))
        if in_order and self.close() == EXIT_STOPPED:
            raise SystemExit(EXIT_STOPPED)

    def _check_open(self) -> None:
        if self._ended:
            raise UsageError("this run is closed")

    def _begin_saving(self, synchronous: SynchronousSaving) -> Attachment:
        """With the state of the newest step that is done."""
        context, state = self._session.context, self._state
        state.make_room()
        state.fix_shapes()
        saving = make_saving(self._memory, synchronous, in_storage=self._in_storage, arena=self._arena)
        self._arena = saving.arena
        observer, comparison = synchronous.observer, synchronous.comparison
        self._attachment = Attachment(context, state, saving, comparison, observer)
        return self._attachment

    def _before_update(self, optimizer: Optimizer, *_: object) -> None:
        self._updated = True
        if self._attachment is not None:
            self._attachment.saving.before_update()
        self._state.before_update(optimizer)

    def _ask(self, flags: StepFlags) -> StepAgreement:
        return StepAgreement.ask(flags, group=self._session.context.group.control)

    def _settle(self) -> None:
        """Wait for what is under way between two steps."""
        if self._agreement is not None:
            self._agreement.flags()
            self._agreement = None
        if self._attachment is not None:
            self._attachment.saving.before_update()
        self._finish()

    def _begin_step(self, step: int) -> None:
        """The user's code begins a step. Its random numbers depend on (seed, step, rank) alone."""
        context = self._session.context
        self._began_s = time.monotonic()
        self._session.step_seed = derive_seed(context.config.run.seed, "own loop", step, context.identity.rank)
        self._session.seed()
        context.tracker.set_phase(Phase.STEP, step=step)

    def _finish(self) -> None:
        """Take the figures of the last step, and let its snapshot count."""
        figures, self._figures = self._figures, None
        unfinished, self._unfinished = self._unfinished, None
        attachment, context = self._attachment, self._session.context
        if figures is None or unfinished is None or attachment is None:
            return
        values = figures.read()
        # Aborting a group ends its collectives without a result.
        context.check_attached()
        if context.identity.is_log_rank:
            context.journal.record(figures.event(values))
            if isinstance(attachment.observer, CurveObserver):
                attachment.observer.on_metrics(figures.step, values)
        attachment.finish(*unfinished)

    def _recover(self, error: Exception) -> bool:
        """Leave a generation that has failed, and wait for a rank in the next one; False if `error` is the program's own."""
        part = self._session.part
        if not part.may_stay(error):
            return False
        code = part.leave(error, self._session.context, free=self._free)
        until_s = time.monotonic() + _TOLD_S
        while not part.told_to_leave and time.monotonic() < until_s:
            time.sleep(_LOOK_S)
        if not part.told_to_leave:
            # What looks like a lost rank may be a mistake of the program's.
            trace = "".join(traceback.format_exception(error)).rstrip()
            write_above(sys.stderr, f"elastictrain: rank {part.identity.rank} waits for a rank in the next generation\n{trace}")
        self._reset()
        self._session.await_rank(code)
        return True

    def _free(self) -> None:
        self._keep()
        self._forget_step()

    def _keep(self) -> None:
        """End saving in this generation; the next one uses the slots again."""
        if self._attachment is not None:
            self._attachment.saving.detach()
        elif self._memory is not None and self._memory.others is not None:
            self._memory.others.close()
        self._attachment = self._memory = None

    def _forget_step(self) -> None:
        for model in self._state.models.values():
            forget_step(plain(model))

    def _reset(self) -> None:
        """Nothing is known of the generation that begins."""
        self._memory = self._synchronous = self._attachment = self._agreement = self._unfinished = self._figures = None
        self._stop_reason, self._first_done, self._updated = "", False, False
        self._generations += 1


def recoverable(train: Callable[Concatenate[Run, P], T]) -> Callable[Concatenate[Run, P], T]:
    """For a function that trains with a run, its first argument, and begins with `run.restore()`. When another process of the
    run dies, and `python -m elastictrain.launch` has started this one, then what the function waits for in a collective raises,
    and the function is called again once there are as many ranks as before: with the same process, models, wrappers (DDP,
    FSDP2) and compiled code. `elastictrain.init_process_group` must be called with `recoverable=True`."""

    @wraps(train)
    def again(run: Run, /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Raises: UsageError without a run; ConfigError if the run cannot recover; an error of the program's own as it is."""
        if not isinstance(run, Run):
            raise UsageError(f"a recoverable function must get the run of elastictrain.attach first, but got {run!r}")
        session = run._session
        if session.part.identity.launched and not session.recoverable:
            message = "must be called with recoverable=True where a recoverable function trains, but was not"
            raise ConfigError([Problem("elastictrain.init_process_group", message)])
        while True:
            try:
                result = train(run, *args, **kwargs)
                if not (run.should_stop and session.part.keeps_process):
                    return result
                run.close()
            except Exception as error:
                if not run._recover(error):
                    raise

    return again


def attach(
    url: str,
    *,
    model: nn.Module | Mapping[str, nn.Module],
    optimizer: Optimizer | Mapping[str, Optimizer] | None,
    extra: Mapping[str, object] | None = None,
    **options: Mapping[str, Any],
) -> Run:
    """Attach a loop to the run in the folder `url`, a path or any fsspec URL. A program that runs alone calls this once its
    model is there. Under torchrun each process calls `elastictrain.init_process_group(url, ...)` in the place of torch's
    function, wraps its model (DDP, FSDP2, HSDP, or not at all), and then calls this, with the same arguments on all ranks.

    `extra`: what else the run's state consists of, by name: modules, tensors, and objects with `state_dict` and
    `load_state_dict` (schedulers, averages of weights); equal on all ranks but for a `PerRank`, without pickle.
    `options`: keys of the groups `checkpoint`, `fault`, `parallel` (backend, device), `preflight`, `run` and `telemetry` of
    docs/configuration.md, as in `checkpoint={"every_steps": 500}`.

    Handlers for SIGTERM, SIGINT, SIGUSR1 and SIGUSR2 ask for a stop, and a `sys.excepthook` ends the process with an exit code
    which launchers know. Collective: yes. Raises: ConfigError naming the argument; StorageError."""
    session = present_session()
    if session is None:
        report_exceptions()
        if dist.is_initialized() or read_identity(os.environ).launched:  # type: ignore[no-untyped-call,unused-ignore]
            message = "must be called before attach, in the place of torch.distributed.init_process_group"
            raise ConfigError([Problem("elastictrain.init_process_group", message)])
        init_process_group(url, recoverable=False, **options)
        session = present_session()
    elif (url, options) != (session.context.config.run.dir, {}):
        given = f"{url!r} and {', '.join(options) or 'no options'}"
        message = (
            f"must be called with {session.context.config.run.dir!r} alone, as init_process_group was, but was with {given}"
        )
        raise ConfigError([Problem("elastictrain.attach", message)])
    assert session is not None  # noqa: S101
    if session.attached:
        message = "must be called once: give it all models and optimizers, as mappings of names"
        raise ConfigError([Problem("elastictrain.attach", message)])
    session.attached = True
    state = own_state(model, optimizer, extra)
    return Run(session, state)


def _refuse_changed_state() -> None:
    raise CheckpointError("no step can be loaded, and the state has changed already; start again: the run begins anew then")
