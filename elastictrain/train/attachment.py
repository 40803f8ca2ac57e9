"""What ties a loop to its run: after each step, whoever has computed it, snapshots and saves, agreed stops and the records of a
recovery. The trainer's loop and loops of users (`elastictrain.attach`) have one each."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace

from elastictrain.checkpoint.save_interval import SaveTuner
from elastictrain.errors import StopRequestedError
from elastictrain.events import FirstStep, Recovery, SaveIntervalChosen, event_time
from elastictrain.fault.launcher_channel import Begun, tell_launcher
from elastictrain.train.context import TrainContext
from elastictrain.train.observing import Observer
from elastictrain.train.replica_comparison import ReplicaComparison
from elastictrain.train.saving import Reached
from elastictrain.train.snapshot_saving import Saving
from elastictrain.train.state import SavedState
from elastictrain.train.step import SaveReason, StepFlags


@dataclass(slots=True)
class Attachment:
    """All ranks make the same calls."""

    context: TrainContext
    state: SavedState
    saving: Saving
    comparison: ReplicaComparison
    observer: Observer
    clock: Callable[[], float] = time.monotonic
    reached: Reached = field(init=False)  # what the next start can resume from
    first_step: int = field(init=False)
    _last_save_s: float = field(init=False)
    _last_save_step: int = field(default=0, init=False)
    _tuner: SaveTuner | None = field(default=None, init=False)  # of rank 0, with `checkpoint.every_steps=auto`
    _last_finished_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.reached = Reached(self.state.step, "storage" if self.state.step else "nothing")
        self.first_step = self.state.step + 1
        self._last_save_s = self._last_finished_s = self.clock()
        options = self.context.config.checkpoint
        if options.every_steps == "auto" and self.context.identity.rank == 0:
            self._tuner = SaveTuner(self.context.job.memory.failures, max_lost_s=options.max_lost_s)

    def flags(self, step: int) -> StepFlags:
        """This rank's requests and the status of its saves in a step whose passes are launched."""
        since_save_s = self.clock() - self._last_save_s
        due = 0 < 60 * self.context.config.checkpoint.every_minutes <= since_save_s
        if self._tuner is not None:
            due = due or self._tuner.is_due(since_save_s)
        return replace(
            self.saving.flags(step),
            stop=self.context.stop_request() is not None,
            # One rank's clock decides, and the reduction sends it to the others.
            save=self.context.identity.rank == 0 and due,
        )

    def finish(self, step: int, flags: StepFlags) -> StepFlags:
        """The figures of a step are known, and the flags that all ranks had in it. Returns those that still count."""
        self.context.tracker.step_finished(step)
        # Before the saver counts the step as whole.
        self.comparison.check(step)
        self.saving.step_finished(step)
        self.saving.on_flags(step, flags)
        now_s = self.clock()
        took_s, self._last_finished_s = now_s - self._last_finished_s, now_s
        # The first step includes compilation and other one-time work.
        if self._tuner is not None and step > self.first_step:
            self._tuner.step_took(took_s, now_s=now_s, saving=flags.unsaved, failing=flags.failed_saves > 0)
            self._report_interval(self._tuner, step)
        # The last save has served every request from before it began.
        return replace(flags, save=flags.save and step > self._last_save_step)

    def _report_interval(self, tuner: SaveTuner, step: int) -> None:
        changed = tuner.take_change()
        if changed is None:
            return
        counts = tuner.counts
        self.context.job.trained(counts)
        self.context.journal.record(
            SaveIntervalChosen(
                step=step,
                seconds=changed.seconds,
                limited_by=changed.limited_by,
                mean_time_to_loss_s=counts.time_to_loss_s,
                losses=counts.losses,
                kept=counts.kept,
                trained_s=counts.trained_s,
                **asdict(tuner.costs),
            )
        )

    def first_step_done(self) -> None:
        """Compilation and other one-time work of this process is over."""
        context = self.context
        context.tracker.first_step_done()
        if context.identity.local_rank == 0:
            tell_launcher(context.identity, Begun(self.first_step - 1))
        self._record_first_step()
        if self._tuner is not None:
            self._tuner.recover_s = sum(context.times.seconds.values())
        self._record_recovery(resumed_step=self.first_step - 1)
        self.saving.first_step_done()

    def _record_first_step(self) -> None:
        context, launcher = self.context, self.context.identity.launcher
        context.times.end_part("first_step")
        if context.identity.is_log_rank and (launcher is None or launcher.recovery is None):
            context.journal.record(FirstStep(step=self.first_step, seconds=context.times.of_first_step()))

    def _record_recovery(self, *, resumed_step: int) -> None:
        """As one rank: after a failure, record how training has come to go on."""
        context, launcher = self.context, self.context.identity.launcher
        plan = launcher.recovery if launcher is not None else None
        if plan is None or context.identity.rank != context.generation.recovery_rank:
            return
        now = event_time()
        seconds = {"launcher": context.began - plan.since, **context.times.seconds, "total": now - plan.since}
        context.journal.record(
            Recovery(
                rung="restart" if plan.rung == "in_place" and not context.generation.hosts_that_stayed else plan.rung,
                reason=plan.reason,
                lost=plan.lost,
                seconds={name: round(value, 4) for name, value in seconds.items()},
                resumed_step=resumed_step,
                steps_repeated=max(0, plan.step - resumed_step),
                world_size=context.identity.world_size,
                pids=context.generation.pids,
            )
        )

    def save(self, step: int, reason: SaveReason | None) -> None:
        """After each step: take the snapshots that are due. `reason`: why the step must become durable, if it must."""
        if reason:
            # The time of the attempt, not of its success: a failing store is not tried again at each step.
            self._last_save_s, self._last_save_step = self.clock(), step
        self.saving.snapshot(step, reason=reason)
        if reason and self._tuner is not None:
            now_s = self.clock()
            self._tuner.save_began(now_s, stall_s=now_s - self._last_save_s)
            self.context.job.trained(self._tuner.counts)

    def save_now(self, step: int, reason: SaveReason) -> Reached:
        """Save, and wait until the step is durable, or the deadline of a stop is reached. Collective: yes."""
        self._last_save_s, self._last_save_step = self.clock(), step
        self.reached = self.saving.save_now(step, reason)
        return self.reached

    def save_and_leave(self, step: int, save: SaveReason, *, reason: str) -> None:
        """Raises: StopRequestedError if the run is not complete, or its last step not in storage."""
        if self.save_now(step, save) != Reached(step, "storage") or save == "stop":
            raise StopRequestedError(reason or self.context.any_stop_reason() or "another rank was asked to stop")
