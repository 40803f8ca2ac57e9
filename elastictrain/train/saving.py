"""Saving while training waits. The other way, beside training, is in `snapshot_saving`; it comes back to this one in need."""

from dataclasses import dataclass, field
from typing import ClassVar

from elastictrain.checkpoint.checkpointer import Checkpointer
from elastictrain.checkpoint.exchange import gather_json
from elastictrain.data.ledger import Ledger
from elastictrain.errors import CheckpointError, SavesFailingError, StorageError
from elastictrain.events import CheckpointFailed
from elastictrain.liveness.progress import Phase
from elastictrain.train.cadence import SaveReason
from elastictrain.train.context import TrainContext
from elastictrain.train.leaving import Reached, least
from elastictrain.train.observing import Observer
from elastictrain.train.replica_comparison import ReplicaComparison
from elastictrain.train.state import JsonState, TrainState
from elastictrain.train.step import StepFlags


@dataclass(slots=True)
class SynchronousSaving:
    """Training waits for each checkpoint. All ranks call alike."""

    context: TrainContext
    checkpointer: Checkpointer
    state: TrainState
    comparison: ReplicaComparison
    ledger: Ledger | None
    observer: Observer
    requires_finished_step: ClassVar[bool] = True
    """Whether a step has to be finished before it can be saved."""

    save_pending: ClassVar[bool] = False
    """Whether a save that was due before has to follow the next step that is finished; the same on all ranks."""

    _failed_saves: int = field(default=0, init=False)
    """In a row."""

    def first_step_done(self) -> None:
        """Start-up is over."""

    def flags(self, step: int) -> StepFlags:
        """What this rank has to say of saving when it begins a step."""
        return StepFlags()

    def on_flags(self, step: int, flags: StepFlags) -> None:
        """What any rank had to say when the step began; the same on all. Raises: SavesFailingError."""

    def snapshot(self, step: int, *, reason: SaveReason | None) -> None:
        """The step is launched. `reason`: it is to become durable. Raises: SavesFailingError."""
        if reason is not None:
            self._try(step, reason)

    def step_finished(self, step: int) -> None:
        """The counters of a step are known."""

    def before_update(self) -> None:
        """The state is about to change."""

    def save_now(self, step: int, reason: SaveReason) -> Reached:
        """Save, and return when it is durable, or when this run has to go: then host memory may be all that was reached.

        Collective: yes. Raises: SavesFailingError.
        """
        # Nothing else holds the state, so a save that has begun is not left alone, however late it is.
        while (error := self._try(step, reason)) is not None:
            told = gather_json(self.context.left_s(), group=self.context.group.control)
            left = least([float(one) if isinstance(one, int | float) else None for one in told])
            if left is not None and left <= 0:
                raise error
        return Reached(step, "storage")

    def close(self, *, finished: bool) -> None:
        """No more saves. `finished`: the run is complete, and needs no memory any more."""

    def flush_records(self) -> None:
        """What a checkpoint covers is never done again, so its records must not be lost with this process."""
        self.context.journal.flush()
        if self.ledger is not None:
            self.ledger.log.flush()

    def tell_failure(self, step: int, *, error: str, in_a_row: int) -> None:
        """As rank 0: record and show that a save failed."""
        self.context.journal.record(CheckpointFailed(step=step, error=error, in_a_row=in_a_row))
        self.observer.say(f"step {step}: checkpoint failed ({in_a_row} in a row): {error}")

    def check_failures(self, in_a_row: int, *, cause: Exception, kept: str = "") -> None:
        """Raises: SavesFailingError once as many saves in a row have failed as may. `kept`: where the newest state is then."""
        limit = self.context.config.checkpoint.max_failed_saves
        if in_a_row >= limit:
            raise SavesFailingError(
                f"{in_a_row} checkpoints in a row could not be saved (`checkpoint.max_failed_saves` is {limit}); "
                f"the last reason: {cause}{'; ' if kept else ''}{kept}"
            ) from cause

    def scalars(self, step: int) -> JsonState:
        """The counters of a step, for its manifest."""
        return self.state.scalars(step, global_batch=self.context.config.train.global_batch)

    def _try(self, step: int, reason: SaveReason) -> CheckpointError | StorageError | None:
        """Returns why it is not saved, if so."""
        first = self.context.identity.rank == 0
        self.context.tracker.set_phase(Phase.SAVE, step=step)
        self.flush_records()
        self.comparison.begin(step)
        self.comparison.check(step)
        try:
            self.checkpointer.save(step, tensors=self.state.tensors(), state=self.scalars(step), reason=reason)
        except (CheckpointError, StorageError) as error:
            self._failed_saves += 1
            if first:
                self.tell_failure(step, error=str(error), in_a_row=self._failed_saves)
            self.check_failures(self._failed_saves, cause=error)
            return error
        self._failed_saves = 0
        if first:
            self.context.job.committed(step)
        return None
