"""The loop: steps, and what follows each of them."""

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from elastictrain.config.composed import RunConfig
from elastictrain.data.assignment import Share
from elastictrain.data.ledger import Ledger
from elastictrain.data.loader import MicroBatch
from elastictrain.errors import StopRequestedError
from elastictrain.events import Evaluated, Event, Skip, Step
from elastictrain.fault.stop import StopRequest
from elastictrain.identity import Identity
from elastictrain.liveness.progress import ProgressTracker
from elastictrain.train.cadence import Following, Intervals, SaveReason, after_step
from elastictrain.train.evaluate import Evaluator
from elastictrain.train.leaving import Reached
from elastictrain.train.optimizer import learning_rate
from elastictrain.train.replica_comparison import ReplicaComparison
from elastictrain.train.saving import Saving
from elastictrain.train.skipping import check_skips, count_step
from elastictrain.train.state import TrainState
from elastictrain.train.step import Flags, PendingStep, Stepper

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StepReport:
    """One settled step, for people."""

    step: int
    loss: float
    rate: float
    grad_norm: float
    step_s: float
    tokens_per_s: float
    skipped_total: int


class Observer(Protocol):
    """Shows a person what happens; only rank 0 has one that does anything."""

    def on_step(self, report: StepReport) -> None:
        """A step is settled."""

    def on_eval(self, step: int, loss: float) -> None:
        """An evaluation is done."""

    def say(self, text: str) -> None:
        """Show a line of text."""


@dataclass(frozen=True, slots=True)
class Agreed:
    """What the ranks agreed on in one step."""

    stop: bool = False
    save: bool = False


@dataclass(frozen=True, slots=True)
class LoopParts:
    """What the loop works with; put together in build.py."""

    config: RunConfig
    identity: Identity
    state: TrainState
    stepper: Stepper
    micro_batches: Iterator[MicroBatch]
    saving: Saving
    comparison: ReplicaComparison
    evaluator: Evaluator | None
    ledger: Ledger | None
    observer: Observer
    record: Callable[[Event], None]
    tracker: ProgressTracker
    stop_request: Callable[[], StopRequest | None]
    any_reason: Callable[[str], str]
    """The first reason to stop that a rank has, of those that all pass (empty: none). Collective: yes."""

    in_storage: bool
    """Whether the state that was restored is there, or there is none."""

    on_first_step: Callable[[], None]
    tokens_per_sample: int
    clock: Callable[[], float] = time.monotonic


class Loop:
    """Runs from the state's step to the last one, or to an agreed stop."""

    def __init__(self, parts: LoopParts) -> None:
        self._parts = parts
        config = parts.config
        self._intervals = Intervals(
            total_steps=config.train.steps,
            save_every=config.checkpoint.every_steps,
            eval_every=config.train.eval_every_steps if parts.evaluator else 0,
            log_every=config.telemetry.log_every_steps,
        )
        identity = parts.identity
        share = Share(config.train.global_batch, config.train.micro_batch, identity.world_size, identity.rank)
        self._passes = share.passes_per_step
        self._last_save_s = parts.clock()
        self._last_save_step = 0
        self._last_settled_s = parts.clock()
        self._first_step = parts.state.step + 1
        self.reached = Reached(parts.state.step, "storage" if parts.state.step else "nothing")
        """What a next start can go on from."""

    def run(self) -> None:
        """Train. Collective: yes. Raises: StopRequestedError once state is saved; what ends a run otherwise."""
        state = self._parts.state
        done = state.step >= self._intervals.total_steps
        if done:
            self._parts.observer.say(
                f"nothing left to do: step {state.step} is done, and `train.steps` is {self._intervals.total_steps}"
            )
        # Restoring took time, and compiling will.
        asked = self._any_reason()
        if (done or asked) and not self._parts.in_storage:
            # It was restored from memory, which is given back when the run is done, or may be gone with its host.
            self._parts.saving.first_step_done()
            self._save_and_leave(state.step, "end" if done else "stop", reason=asked)
        elif asked and not done:
            raise StopRequestedError(asked)
        self._train()

    def _train(self) -> None:
        state, saving = self._parts.state, self._parts.saving
        pending: PendingStep | None = None
        # What the ranks agreed on in a step that was settled at once; it is acted upon after the next, like any other.
        carried = Agreed()
        while state.step < self._intervals.total_steps:
            step = state.step + 1
            started = self._launch(step)
            state.step = step
            self._parts.comparison.step_launched(step)
            # The figures of the step before are on the host by now, or soon: reading them late keeps the device busy.
            agreed = self._settle(pending) if pending else carried
            pending, carried = started, Agreed()
            following = after_step(step, self._intervals, stop_agreed=agreed.stop, save_agreed=agreed.save or saving.owes)
            early = not following.leave and not saving.needs_settled
            if early:
                self._save(step, following)
            if step == self._first_step or following.leave or following.evaluate or (following.save and not early):
                settled, pending = self._settle(pending), None
                carried = Agreed(settled.stop, settled.save and following.save is None)
            if step == self._first_step:
                self._parts.tracker.first_step_done()
                self._parts.on_first_step()
                saving.first_step_done()
                if not following.leave and self._any_reason():
                    # It took as long as many others, and with nothing under way leaving two steps later gains nothing.
                    following = after_step(step, self._intervals, stop_agreed=True, save_agreed=False)
            self._follow(step, following, saved=early)

    def _launch(self, step: int) -> PendingStep:
        parts = self._parts
        overdue_s = 60 * parts.config.checkpoint.every_minutes
        flags = Flags(
            stop=parts.stop_request() is not None,
            # One rank's clock decides, and the reduction tells the others.
            save=parts.identity.rank == 0 and overdue_s > 0 and parts.clock() - self._last_save_s >= overdue_s,
            notes=parts.saving.notes(step),
        )
        rate = learning_rate(step, parts.config.optim, total_steps=self._intervals.total_steps)
        taken: list[MicroBatch] = []
        source = parts.micro_batches if parts.ledger is None else _noting(parts.micro_batches, taken)
        pending = parts.stepper.run(step, source, passes=self._passes, rate=rate, flags=flags)
        if parts.ledger is not None:
            parts.ledger.record(step, consumed=[(one.portion, one.sample_ids) for one in taken])
        return pending

    def _settle(self, pending: PendingStep) -> Agreed:
        """Take a step's figures: events, skip counts, and what the ranks agreed on."""
        parts = self._parts
        facts = pending.facts()
        now = parts.clock()
        step_s, self._last_settled_s = now - self._last_settled_s, now
        batch = parts.config.train.global_batch
        positions = ((facts.step - 1) * batch, facts.step * batch)
        tokens_per_s = batch * parts.tokens_per_sample / max(step_s, 1e-9)
        before = parts.state.skips.total
        skips = parts.state.skips = count_step(parts.state.skips, loss=facts.loss, grad_norm=facts.grad_norm)
        if parts.identity.speaks:
            parts.record(
                Step(
                    step=facts.step,
                    loss=facts.loss,
                    lr=facts.rate,
                    grad_norm=facts.grad_norm,
                    positions=positions,
                    tokens_per_s=tokens_per_s,
                )
            )
        if skips.total > before and parts.identity.speaks:
            parts.record(
                Skip(
                    step=facts.step,
                    loss=facts.loss,
                    grad_norm=facts.grad_norm,
                    positions=positions,
                    in_a_row=skips.in_a_row,
                )
            )
            parts.observer.say(
                f"step {facts.step}: loss or gradient is not finite, update left out ({skips.in_a_row} in a row)"
            )
        check_skips(skips, max_skipped=parts.config.train.max_skipped, step=facts.step, loss=facts.loss)
        parts.observer.on_step(
            StepReport(facts.step, facts.loss, facts.rate, facts.grad_norm, step_s, tokens_per_s, skips.total)
        )
        # Before saving counts the step as whole.
        parts.comparison.check(facts.step)
        parts.saving.settled(facts.step)
        parts.saving.hear(facts.step, facts.notes)
        # Whoever asked before the last save began has been served by it.
        return Agreed(facts.stop, facts.save and facts.step > self._last_save_step)

    def _follow(self, step: int, following: Following, *, saved: bool) -> None:
        """`saved`: what is to be saved is on its way already. Raises: StopRequestedError."""
        if following.evaluate and not self._evaluate(step):
            # Asked to stop while it ran: nothing is under way, so this is the step.
            following = after_step(step, self._intervals, stop_agreed=True, save_agreed=False)
        if following.leave and following.save:
            self._save_and_leave(step, following.save, reason=self._any_reason())
        elif following.save and not saved:
            self._save(step, following)
        if following.evaluate or (following.save and not saved):
            self._last_settled_s = self._parts.clock()

    def _save(self, step: int, following: Following) -> None:
        if following.save:
            # Of the attempt, not of success: a store that fails is not asked again at each step.
            self._last_save_s, self._last_save_step = self._parts.clock(), step
        self._parts.saving.snapshot(step, reason=following.save)

    def _save_and_leave(self, step: int, save: SaveReason, *, reason: str) -> None:
        """Raises: StopRequestedError if the run is not complete, or its last step not in storage."""
        self.reached = self._parts.saving.save_now(step, save)
        if save == "stop" or self.reached != Reached(step, "storage"):
            raise StopRequestedError(reason or self._any_reason() or "another rank was asked to stop")

    def _any_reason(self) -> str:
        request = self._parts.stop_request()
        return self._parts.any_reason(request.reason if request is not None else "")

    def _evaluate(self, step: int) -> bool:
        """Whether it ran to its end; else all ranks know that they are asked to stop."""
        parts = self._parts
        evaluator = parts.evaluator
        if evaluator is None:
            return True
        began = parts.clock()
        loss = evaluator.run(step, leave=lambda: bool(self._any_reason()))
        if loss is None:
            return False
        if parts.identity.speaks:
            parts.record(Evaluated(step=step, loss=loss, samples=evaluator.num_samples, seconds=parts.clock() - began))
        parts.observer.on_eval(step, loss)
        return True


def _noting(source: Iterator[MicroBatch], taken: list[MicroBatch]) -> Iterator[MicroBatch]:
    for micro_batch in source:
        taken.append(micro_batch)
        yield micro_batch
