"""The training loop: steps, and the actions that follow each of them."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice, tee

from elastictrain.data.assignment import Pass
from elastictrain.data.ledger import Ledger
from elastictrain.data.loader import Loader
from elastictrain.distributed.group import limit_collectives
from elastictrain.errors import NonFiniteError, StopRequestedError
from elastictrain.events import Evaluated, Skip, Step, StepSkipped
from elastictrain.fault.launcher_channel import LeaveOutSlow, tell_launcher
from elastictrain.fault.reasons import SlowRank
from elastictrain.liveness.progress import Phase
from elastictrain.train.attachment import Attachment
from elastictrain.train.compile_cache import CompileCache
from elastictrain.train.context import TrainContext
from elastictrain.train.evaluate import Evaluator
from elastictrain.train.evaluation_history import EvaluationHistory
from elastictrain.train.observing import Observer
from elastictrain.train.optimizer import learning_rate
from elastictrain.train.replica_comparison import ReplicaComparison
from elastictrain.train.saving import Reached
from elastictrain.train.snapshot_saving import Saving
from elastictrain.train.state import TrainState, count_step
from elastictrain.train.step import PendingStep, StepActions, StepFlags, Stepper, StepResult, after_step
from elastictrain.train.step_waits import StepWaits
from elastictrain.train.straggler import StragglerFinder, to_leave_out
from elastictrain.train.task import FollowsEvaluations, FollowsRestarts, FollowsSteps


@dataclass(slots=True)
class Loop:
    """Runs from the state's step to the last one, or to an agreed stop."""

    context: TrainContext
    state: TrainState
    stepper: Stepper
    loader: Loader
    saving: Saving
    comparison: ReplicaComparison
    evaluator: Evaluator | None
    ledger: Ledger | None
    observer: Observer
    tokens_per_sample: int | None  # None where the task does not count tokens
    in_storage: bool  # whether storage has the restored state, or nothing was restored
    skipped: Mapping[int, Sequence[Pass]] = field(default_factory=dict)  # what this rank would read in steps that are skipped
    compile_cache: CompileCache | None = None
    history: EvaluationHistory | None = None  # where a key asks for it
    stragglers: StragglerFinder | None = None  # None in a world of one
    clock: Callable[[], float] = time.monotonic
    waits: StepWaits = field(init=False)
    attachment: Attachment = field(init=False)
    _passes: int = field(init=False)
    _last_finished_s: float = field(init=False)
    _reported: SlowRank | None = field(default=None, init=False)  # of this host; the launcher has been told of it

    def __post_init__(self) -> None:
        self._passes = self.context.share.passes_per_step
        self.attachment = Attachment(self.context, self.state, self.saving, self.comparison, self.observer, self.clock)
        self.waits = StepWaits(self.context.group.device.type != "cpu", self.clock)
        self._last_finished_s = self.clock()

    @property
    def reached(self) -> Reached:
        """What the next start can resume from."""
        return self.attachment.reached

    def run(self) -> None:
        """Train. Collective: yes. Raises: StopRequestedError once state is saved; any error that ends a run."""
        if isinstance(self.context.task, FollowsRestarts):
            self.context.task.on_restart(self.state.step)
        state, total_steps = self.state, self.context.config.train.steps
        done = self._is_done()
        if done:
            why = f"`train.steps` is {total_steps}" if state.step >= total_steps else "evaluations brought no gain"
            self.observer.print_line(f"nothing left to do: step {state.step} is done, and {why}")
        # Restoring took time, and compiling will.
        asked = self.context.any_stop_reason()
        if not done and not asked and self._evaluation_is_missing():
            # The last generation was ended in it. Noted first: if it ends this one, too, the next one trains.
            self.context.job.evaluation_done(state.step)
            asked = "" if self._evaluate(state.step) else self.context.any_stop_reason()
            self._last_finished_s, done = self.clock(), self._is_done()
        if (done or asked) and not self.in_storage:
            # The state was restored from memory, which is released at the end of the run and lost with its host.
            self.saving.first_step_done()
            self.attachment.save_and_leave(state.step, "end" if done else "stop", reason=asked)
        elif asked and not done:
            raise StopRequestedError(asked)
        self._train()

    def close(self, *, finished: bool) -> None:
        """End the loader's workers and all writers. `finished`: the run is complete."""
        self.saving.close(finished=finished)
        if finished and self.compile_cache is not None:
            self.compile_cache.close()
        self.abandon()

    def abandon(self) -> None:
        """The same after a failure: the saver notices the death of this worker by itself, and informs the others."""
        self.loader.close()
        if self.ledger is not None:
            self.ledger.log.close()
        self.observer.close()

    def _train(self) -> None:
        context, config, state, saving = self.context, self.context.config, self.state, self.saving
        pending: PendingStep | None = None
        # Agreed flags of a step that was finished at once; they take effect after the next step, as after any other.
        deferred = StepFlags()
        while not self._is_done():
            step = state.step + 1
            if step in self.skipped:
                pending, deferred = None, self._skip(step, self._finish(pending) if pending else deferred)
                continue
            launched = self._launch(step)
            state.step = step
            self.comparison.step_launched(step)
            # The previous step's figures are on the host by now, or soon: reading them late keeps the device busy.
            agreed = self._finish(pending) if pending else deferred
            pending, deferred = launched, StepFlags()
            save_agreed = agreed.save or saving.save_pending
            actions = after_step(step, config, stop_agreed=agreed.stop, save_agreed=save_agreed)
            early = not actions.leave and not saving.requires_finished_step
            if early:
                self.attachment.save(step, actions.save)
            if step == self.attachment.first_step or actions.leave or actions.evaluate or (actions.save and not early):
                finished, pending = self._finish(pending), None
                deferred = StepFlags(finished.stop, finished.save and actions.save is None)
            if step == self.attachment.first_step:
                # Compilation and other one-time work is over: from now on limits are tight.
                limit_collectives(self.stepper.wrapped.groups, backend=context.backend, timeout_s=config.fault.step_timeout_s)
                self.attachment.first_step_done()
                if self.compile_cache is not None:
                    self.compile_cache.first_step_done()
                if not actions.leave and context.any_stop_reason():
                    # No step is in flight after the first one, so stop here instead of two steps later.
                    actions = after_step(step, config, stop_agreed=True, save_agreed=False)
            self._follow(step, actions, saved=early)

    def _skip(self, step: int, agreed: StepFlags) -> StepFlags:
        """Pass over a step, with no other in flight: it counts, and takes its samples, but nothing is read or updated.
        `agreed`: flags without effect yet; returns those that take effect after the next step. Raises: StopRequestedError."""
        context, batch = self.context, self.context.config.train.global_batch
        self.state.step = step
        if self.ledger is not None:
            self.ledger.record(step, consumed=[(one.portion, one.sample_ids) for one in self.skipped[step]], skipped=True)
        if context.identity.is_log_rank:
            context.journal.record(StepSkipped(step=step, positions=((step - 1) * batch, step * batch)))
            self.observer.print_line(f"step {step} is skipped: it failed again and again (`fault.on_poisoned=skip`)")
        actions = after_step(step, context.config, stop_agreed=agreed.stop, save_agreed=agreed.save)
        if step == self.attachment.first_step:
            # The next step is the first one that runs.
            self.attachment.first_step = step + 1
            if actions.leave:
                self.saving.first_step_done()
        # A save would wait for what the next step does anyway.
        self._follow(step, actions if actions.leave else replace(actions, save=None), saved=False)
        return StepFlags(save=actions.save is not None)

    def _launch(self, step: int) -> PendingStep:
        config, flags = self.context.config, partial(self.attachment.flags, step)
        rate = learning_rate(step, config.optim, total_steps=config.train.steps)
        batches = self.waits.batches(self.loader)
        if self.ledger is None:
            return self.stepper.run(step, batches, passes=self._passes, rate=rate, flags=flags)
        source, taken = tee(batches)
        pending = self.stepper.run(step, source, passes=self._passes, rate=rate, flags=flags)
        self.ledger.record(step, consumed=[(one.portion, one.sample_ids) for one in islice(taken, self._passes)])
        return pending

    def _finish(self, pending: PendingStep) -> StepFlags:
        """Take a step's figures: write events, count skips, return the agreed flags."""
        config, record = self.context.config, self.context.journal.record
        is_log_rank = self.context.identity.is_log_rank
        result = pending.result()
        # Aborting a group ends its collectives without a result.
        self.context.check_attached()
        now = self.clock()
        step_s, self._last_finished_s = now - self._last_finished_s, now
        batch, tokens_per_sample = config.train.global_batch, self.tokens_per_sample
        samples_per_s = batch / max(step_s, 1e-9)
        step = Step(
            step=result.step,
            loss=result.loss,
            lr=result.rate,
            grad_norm=result.grad_norm,
            positions=((result.step - 1) * batch, result.step * batch),
            samples_per_s=samples_per_s,
            tokens_per_s=samples_per_s * tokens_per_sample if tokens_per_sample is not None else None,
            metrics=result.metrics,
            mfu=self.observer.mfu_of(samples_per_s * (tokens_per_sample or 0)),
            waits=self.waits.take(result, self.stragglers.named if self.stragglers is not None else ()),
        )
        if is_log_rank:
            record(step)
        before = self.state.counters
        counters = self.state.counters = count_step(before, loss=step.loss, grad_norm=step.grad_norm)
        if counters.skipped_total > before.skipped_total and is_log_rank:
            record(
                Skip(
                    step=step.step,
                    loss=step.loss,
                    grad_norm=step.grad_norm,
                    positions=step.positions,
                    in_a_row=counters.skipped_in_a_row,
                )
            )
            self.observer.print_line(
                f"step {step.step}: loss or gradient is not finite, update left out ({counters.skipped_in_a_row} in a row)"
            )
        in_a_row, max_skipped = counters.skipped_in_a_row, config.train.max_skipped
        if in_a_row > max_skipped:
            # The next step is under way, and the failure is not one of that.
            self.context.tracker.set_phase(Phase.UPDATE, step=step.step)
            raise NonFiniteError(
                f"{in_a_row} steps in a row were not finite, the last is step {step.step} (loss {step.loss}); "
                f"`train.max_skipped` allows {max_skipped}. Lower optim.lr, or look at the data of these steps"
            )
        self.observer.on_step(step, step_s=step_s, skipped_total=counters.skipped_total)
        if isinstance(self.context.task, FollowsSteps):
            self.context.task.on_step(step)
        self._look_for_stragglers(result)
        return self.attachment.finish(step.step, result.flags)

    def _look_for_stragglers(self, result: StepResult) -> None:
        """Record who begins or ceases to hold up the others. If such a rank's host is to be left out, its launcher decides."""
        if self.stragglers is None:
            return
        context, identity, hosts = self.context, self.context.identity, self.context.generation.hosts
        for change in self.stragglers.add(result.times) if result.times is not None else ():
            if identity.is_log_rank:
                context.journal.record(change.event(step=result.step, host=hosts[change.rank]))
                self.observer.print_line(change.describe(host=hosts[change.rank]))
        chosen = to_leave_out(self.stragglers.named, after=context.config.fault.straggler_exclude_after)
        slow = None
        if chosen is not None and chosen.rank in identity.host_ranks:
            slow = SlowRank(chosen.rank, chosen.describe(host=hosts[chosen.rank]))
        is_told = (slow and slow.rank) == (self._reported and self._reported.rank)
        if is_told or identity.local_rank > 0:
            return
        self._reported = slow
        tell_launcher(identity, LeaveOutSlow(slow))

    def _follow(self, step: int, actions: StepActions, *, saved: bool) -> None:
        """`saved`: the save of this step is already under way. Raises: StopRequestedError."""
        if actions.evaluate and not self._evaluate(step):
            # A stop request interrupted the evaluation. No step is in flight, so the run stops at this one.
            actions = after_step(step, self.context.config, stop_agreed=True, save_agreed=False)
        elif actions.evaluate and not actions.leave and self._is_done():
            self.observer.print_line(f"step {step}: evaluations brought no gain for so long that training ends here")
            actions = StepActions("end", evaluate=True, leave=True)
        if actions.leave and actions.save:
            self.attachment.save_and_leave(step, actions.save, reason=self.context.any_stop_reason())
        elif actions.save and not saved:
            with self.waits.waiting("save"):
                self.attachment.save(step, actions.save)
        if actions.evaluate or (actions.save and not saved):
            self._last_finished_s = self.clock()

    def _evaluation_is_missing(self) -> bool:
        """Whether the evaluation after the restored step was not completed, as far as this job knows; the same on all ranks."""
        step, every_steps, evaluated = self.state.step, self.context.config.train.eval_every_steps, self.context.job.evaluated
        due = self.evaluator is not None and step > 0 and step % every_steps == 0
        unknown = self.history is not None and step not in self.history
        return due and (unknown or (evaluated is not None and evaluated < step))

    def _is_done(self) -> bool:
        """The same on all ranks."""
        return self.state.step >= self.context.config.train.steps or (self.history is not None and self.history.ended)

    def averaged(self) -> AbstractContextManager[None]:
        """The model has the averages of its weights in the block, if it keeps any."""
        # A snapshot may still be reading the weights.
        self.saving.before_update()
        return nullcontext() if self.state.average is None else self.state.average.in_place()

    def _evaluate(self, step: int) -> bool:
        """Whether the evaluation completed; if not, all ranks know of a stop request."""
        if self.evaluator is None:
            return True
        began = self.clock()
        with self.averaged():
            found = self.evaluator.run(step, leave=lambda: bool(self.context.any_stop_reason()))
        self.context.check_attached()
        if found is None:
            return False
        self.context.job.evaluation_done(step)
        if self.history is not None:
            self.history.add(step, found.loss)
        if self.context.identity.is_log_rank:
            seconds = self.clock() - began
            samples = self.evaluator.num_samples
            event = Evaluated(step=step, loss=found.loss, samples=samples, seconds=seconds, metrics=found.metrics)
            self.context.journal.record(event)
        self.observer.on_eval(step, found)
        if isinstance(self.context.task, FollowsEvaluations):
            self.context.task.on_eval(step, found.loss, found.metrics)
        return True
