"""How the loop saves; here the simple way, in which training waits. The other one is in `snapshot_saving`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch.distributed as dist

from elastictrain.checkpoint.checkpointer import Checkpointer, FailedSaves
from elastictrain.checkpoint.exchange import gather_json
from elastictrain.checkpoint.manifest import JsonValue
from elastictrain.errors import CheckpointError, StorageError
from elastictrain.events import CheckpointFailed, Event
from elastictrain.liveness.progress import Phase, ProgressTracker
from elastictrain.train.cadence import SaveReason
from elastictrain.train.leaving import Reached, least
from elastictrain.train.replica_comparison import ReplicaComparison
from elastictrain.train.state import TrainState


class Saving(Protocol):
    """What the loop asks for. All ranks call alike."""

    @property
    def num_notes(self) -> int:
        """How many flags ride on each step's reduction."""

    @property
    def needs_settled(self) -> bool:
        """Whether a step has to be settled before it can be saved."""

    @property
    def owes(self) -> bool:
        """Whether a save that was due before has to follow the next step that is settled; the same on all ranks."""

    def first_step_done(self) -> None:
        """Start-up is over."""

    def notes(self, step: int) -> tuple[bool, ...]:
        """What this rank has to say when it begins a step."""

    def hear(self, step: int, notes: Sequence[bool]) -> None:
        """What any rank had to say when the step began; the same on all. Raises: SavesFailingError."""

    def snapshot(self, step: int, *, reason: SaveReason | None) -> None:
        """The step is launched. `reason`: it is to become durable. Raises: SavesFailingError."""

    def settled(self, step: int) -> None:
        """The counters of a step are known."""

    def before_update(self) -> None:
        """The state is about to change."""

    def save_now(self, step: int, reason: SaveReason) -> Reached:
        """Save, and return when it is durable, or when this run has to go: then host memory may be all that was reached.

        Collective: yes. Raises: SavesFailingError.
        """

    def close(self, *, finished: bool) -> None:
        """No more saves. `finished`: the run is complete, and needs no memory any more."""


def _ignore(_: int) -> None:
    """Nobody wants to know."""


@dataclass(frozen=True, slots=True)
class SavingParts:
    """What both ways of saving work with."""

    checkpointer: Checkpointer
    state: TrainState
    global_batch: int
    group: dist.ProcessGroup | None
    """The control group."""

    rank: int
    max_failed_saves: int
    comparison: ReplicaComparison
    save_timeout_s: float
    finish_timeout_s: float
    """How long the end of the run may wait for its keeper's."""

    left_s: Callable[[], float | None]
    """How long this rank may still wait for a save; None: as long as it takes."""

    tracker: ProgressTracker
    flush_records: Callable[[], None]
    record: Callable[[Event], None]
    say: Callable[[str], None]
    committed: Callable[[int], None] = _ignore
    """Told by rank 0 of each step that is in storage."""

    memory_place: str = "host memory"
    """Where the snapshots of this run are, for a person."""


class SynchronousSaving:
    """Training waits for each checkpoint."""

    num_notes = 0
    needs_settled = True
    owes = False

    def __init__(self, parts: SavingParts) -> None:
        self._parts = parts
        self._failed = FailedSaves(parts.max_failed_saves)

    def first_step_done(self) -> None:
        pass

    def notes(self, step: int) -> tuple[bool, ...]:
        return ()

    def hear(self, step: int, notes: Sequence[bool]) -> None:
        pass

    def snapshot(self, step: int, *, reason: SaveReason | None) -> None:
        if reason is not None:
            self._try(step, reason)

    def settled(self, step: int) -> None:
        pass

    def before_update(self) -> None:
        pass

    def save_now(self, step: int, reason: SaveReason) -> Reached:
        # Nothing else holds the state, so a save that has begun is not left alone, however late it is.
        while (error := self._try(step, reason)) is not None:
            left = least([_seconds(one) for one in gather_json(self._parts.left_s(), group=self._parts.group)])
            if left is not None and left <= 0:
                raise error
        return Reached(step, "storage")

    def close(self, *, finished: bool) -> None:
        pass

    def _try(self, step: int, reason: SaveReason) -> CheckpointError | StorageError | None:
        """Returns why it is not saved, if so."""
        parts = self._parts
        parts.tracker.set_phase(Phase.SAVE, step=step)
        # What the checkpoint covers is never done again, so its records must not be lost with this process.
        parts.flush_records()
        parts.comparison.begin(step)
        parts.comparison.check(step)
        try:
            parts.checkpointer.save(
                step,
                tensors=parts.state.tensors(),
                state=parts.state.scalars(step, global_batch=parts.global_batch),
                reason=reason,
            )
        except (CheckpointError, StorageError) as error:
            self._failed = self._failed.failed()
            if parts.rank == 0:
                tell_failure(parts, step, error=str(error), in_a_row=self._failed.in_a_row)
            self._failed.check(error)
            return error
        self._failed = self._failed.succeeded()
        if parts.rank == 0:
            parts.committed(step)
        return None


def _seconds(value: JsonValue) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def tell_failure(parts: SavingParts, step: int, *, error: str, in_a_row: int) -> None:
    """As the rank that speaks: record and show that a save failed."""
    parts.record(CheckpointFailed(step=step, error=error, in_a_row=in_a_row))
    parts.say(f"step {step}: checkpoint failed ({in_a_row} in a row): {error}")
