"""Decides what becomes of a step that ends one generation after the other: a poisoned batch, or poisoned state."""

from collections.abc import Sequence
from dataclasses import replace
from signal import SIGKILL
from typing import Literal

from elastictrain.errors import EXIT_BUG
from elastictrain.identity import PoisonedSteps
from elastictrain.launch.membership.records import GenerationFailure
from elastictrain.liveness.progress import STEP_PHASES, Phase

TIMES = 3
MOST_SKIPPED = 10  # in a run: damage of so many batches is no accident, and a person must look at the data
_SIGNAL_BASE = 128
_KILLED = _SIGNAL_BASE + SIGKILL  # by a person, a scheduler, or the kernel without memory: not by what the step computes
_PHASES = STEP_PHASES - {Phase.EVAL}

OnPoisoned = Literal["stop", "skip", "back"]


def poisoned_step(failures: Sequence[GenerationFailure], *, max_failures: int) -> int:
    """The step at which the last three failures happened, all by errors or crashes of workers; 0 if they did not.
    `max_failures` of them are enough if that is fewer."""
    last = failures[-min(TIMES, max_failures) :]
    steps = {failure.step for failure in last}
    if len(last) < min(TIMES, max_failures) or len(steps) > 1:
        return 0
    own = all(failure.exit_code == EXIT_BUG or failure.exit_code > _SIGNAL_BASE for failure in last)
    of_step = all(failure.phase in _PHASES and failure.exit_code != _KILLED for failure in last)
    return steps.pop() if own and of_step else 0


def get_past(
    step: int, before: PoisonedSteps, *, mode: OnPoisoned, restored_step: int, generation: int
) -> PoisonedSteps | None:
    """How the run gets past a poisoned `step` from `generation` on; None if it must not, or that was tried in vain.
    `restored_step`: the one from which it failed.

    What fails beside a step that was skipped is no batch: else a mistake in the program would skip all of the run.
    """
    beside = {step - 1, step, step + 1} & set(before.skipped)
    if mode == "skip" and not beside and len(before.skipped) < MOST_SKIPPED:
        return replace(before, skipped=(*before.skipped, step))
    if mode == "back" and step not in before.went_back and restored_step > 0:
        return replace(before, went_back=(*before.went_back, step), before_step=restored_step, generation=generation)
    return None


def describe(step: int, mode: OnPoisoned) -> str:
    what = "its batch is skipped" if mode == "skip" else "the run goes back to the checkpoint before the newest one"
    return f"step {step} failed again and again, so {what} (`fault.on_poisoned={mode}`)"
