"""Synchronous checkpoints: training waits for each save. `snapshot_saving` saves beside training, and falls back to this."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from elastictrain.bounded_json import as_record
from elastictrain.checkpoint.checkpointer import Checkpointer
from elastictrain.checkpoint.copier import Arena
from elastictrain.checkpoint.exchange import gather_json
from elastictrain.checkpoint.saver.final_save import KEPT_S
from elastictrain.data.ledger import Ledger
from elastictrain.errors import CheckpointError, SavesFailingError, StorageError
from elastictrain.events import CheckpointFailed
from elastictrain.liveness.progress import Phase
from elastictrain.train.context import TrainContext
from elastictrain.train.observing import Observer
from elastictrain.train.replica_comparison import ReplicaComparison
from elastictrain.train.state import JsonState, SavedState
from elastictrain.train.step import SaveReason, StepFlags

Tier = Literal["storage", "handover", "peer", "memory", "nothing"]

_LEAST_COPY_S = 5.0  # a snapshot in host memory takes 1 s at most; it is tried however late: the kill may be late, too


@dataclass(frozen=True, slots=True)
class Reached:
    """The newest step that the next start can resume from, and its safest place."""

    step: int
    tier: Tier


@dataclass(frozen=True, slots=True)
class SaveStatus:
    """One rank's status while all ranks wait for one save. All decide by the same statuses, and so alike."""

    left_s: float | None  # seconds until it must end; None: no stop was requested, or none with a deadline
    sending: bool = False  # whether its host still sends replicas
    unsent: bool = False  # whether replicas failed to arrive
    saved: bool = False  # whether the saver has committed the step; only rank 0 sets it
    error: str = ""  # why the save fails
    stays: bool = False  # whether its host takes part in the next generation
    keeps: tuple[int, ...] = ()  # ranks whose replicas its host keeps
    busy: tuple[bool, ...] = ()
    torn: tuple[bool, ...] = ()  # of its slots, as in `StepFlags`


def least(times_s: Sequence[float | None]) -> float | None:
    """The smallest limit; None if there is none."""
    return min((one for one in times_s if one is not None), default=None)


def copy_limit_s(left: float | None, *, most_s: float) -> float:
    return most_s if left is None else min(most_s, max(left, _LEAST_COPY_S))


@dataclass(frozen=True, slots=True)
class LeaveDecision:
    """The wait for the save of one step is over; the same on all ranks."""

    tier: Tier  # the safest place that has the step by now
    limited: bool  # whether this run has a deadline
    error: str = ""  # why the save failed, while there is time to try again


def judge(told: Sequence[SaveStatus], *, replicating: bool) -> LeaveDecision | None:
    """Decide from the statuses of one round whether the wait is over; None if not. `replicating`: whether replicas of the step
    were requested. Ranks wait for storage as long as there is time, unless hosts that stay have the whole step in memory."""
    left = least([one.left_s for one in told])
    limited = left is not None
    if any(one.saved for one in told):
        return LeaveDecision("storage", limited)
    tier: Tier = "peer" if replicating and not any(one.sending or one.unsent for one in told) else "memory"
    if is_handed_over(told, replicated=tier == "peer"):
        return LeaveDecision("handover", limited)
    if left is not None and left <= 0:
        return LeaveDecision(tier, limited)
    error = next((one.error for one in told if one.error), "")
    return LeaveDecision(tier, limited, error) if error else None


def is_handed_over(told: Sequence[SaveStatus], *, replicated: bool) -> bool:
    """Whether the hosts that take part in the next generation have the snapshots of all ranks."""
    there = {rank for rank, one in enumerate(told) if one.stays}
    if there and replicated:
        there |= {rank for one in told if one.stays for rank in one.keeps}
    return len(there) == len(told)


def describe(reached: Reached, *, step: int, run_dir: str, several_hosts: bool) -> str:
    """Where the state of a run that stopped after step `step` is: continues a sentence that names this step."""
    if reached.tier == "nothing":
        return "; nothing is saved yet"
    hosts, they_live = ("these hosts", "they live") if several_hosts else ("this host", "it lives")
    memory = f"storage was not reached in time, and is still written to as long as {they_live}, for up to {KEPT_S / 3600:g} h"
    places = {
        "storage": f"saved in {run_dir}",
        "handover": "in the memory of the hosts that continue",
        "peer": f"only in the memory of {hosts}, but twice: {memory}",
        "memory": f"only in the memory of {hosts}: {memory}",
    }
    place = places[reached.tier]
    return f", which is {place}" if reached.step == step else f"; the newest step that is safe is {reached.step}, {place}"


@dataclass(slots=True)
class SynchronousSaving:
    """Training waits for each checkpoint. All ranks make the same calls."""

    context: TrainContext
    checkpointer: Checkpointer
    state: SavedState
    comparison: ReplicaComparison
    ledger: Ledger | None
    observer: Observer
    requires_finished_step: ClassVar[bool] = True  # whether only a finished step can be saved
    save_pending: ClassVar[bool] = False  # whether an overdue save follows the next finished step; alike on all ranks
    arena: ClassVar[Arena | None] = None  # slots that the next generation in this process can use
    _failed_saves: int = field(default=0, init=False)  # in a row

    def first_step_done(self) -> None:
        """Called when start-up is over."""

    def flags(self, step: int) -> StepFlags:
        """This rank's save flags when it begins a step."""
        return StepFlags()

    def on_flags(self, step: int, flags: StepFlags) -> None:
        """Called with the flags that all ranks had when the step began. Raises: SavesFailingError."""

    def snapshot(self, step: int, *, reason: SaveReason | None) -> None:
        """Called when the step is launched. `reason`: why it must become durable, if it must. Raises: SavesFailingError."""
        if reason is not None:
            self._try(step, reason)

    def step_finished(self, step: int) -> None:
        """Called when the counters of a step are known."""

    def before_update(self) -> None:
        """Called when the state is about to change."""

    def save_now(self, step: int, reason: SaveReason) -> Reached:
        """Save, and return when the save is durable or the deadline is reached; then host memory may be the only place.
        Collective: yes. Raises: SavesFailingError."""
        # Nothing else holds the state, so a save that has begun is completed, however late it is.
        while (error := self._try(step, reason)) is not None:
            left = least(as_record(gather_json(self.context.left_s(), group=self.context.group.control), list[float | None]))
            if left is not None and left <= 0:
                raise error
        return Reached(step, "storage")

    def close(self, *, finished: bool) -> None:
        """End saving. `finished`: the run is complete and needs no host memory any more."""

    def detach(self) -> None:
        """End saving in this generation; the next one in this process uses the slots again. Raises: CheckpointError if a copy
        still writes to them."""

    def flush_records(self) -> None:
        """Flush before a save: steps that a checkpoint covers never run again, so their records must not be lost."""
        self.context.journal.flush()
        if self.ledger is not None:
            self.ledger.log.flush()

    def record_failure(self, step: int, *, error: str, in_a_row: int) -> None:
        """As rank 0: record and show that a save failed."""
        self.context.journal.record(CheckpointFailed(step=step, error=error, in_a_row=in_a_row))
        self.observer.print_line(f"step {step}: checkpoint failed ({in_a_row} in a row): {error}")

    def check_failures(self, in_a_row: int, *, cause: Exception, kept: str = "") -> None:
        """Raises: SavesFailingError after `checkpoint.max_failed_saves` in a row. `kept`: where the newest state is then."""
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
        """Returns the error if the save failed."""
        first = self.context.identity.rank == 0
        self.context.tracker.set_phase(Phase.SAVE, step=step)
        self.flush_records()
        self.comparison.begin(step)
        self.comparison.check(step)
        try:
            tensors, of_first = self.state.tensors(), self.state.changed_by_forward()
            self.checkpointer.save(step, tensors=tensors, state=self.scalars(step), reason=reason, of_first=of_first)
        except (CheckpointError, StorageError) as error:
            self._failed_saves += 1
            if first:
                self.record_failure(step, error=str(error), in_a_row=self._failed_saves)
            self.check_failures(self._failed_saves, cause=error)
            return error
        self._failed_saves = 0
        if first:
            self.context.job.committed(step)
        return None
