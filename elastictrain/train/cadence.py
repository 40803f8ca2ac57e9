"""What follows a step: pure functions of the step and of facts that all ranks share."""

from dataclasses import dataclass
from typing import Literal

SaveReason = Literal["interval", "time", "stop", "end"]


@dataclass(frozen=True, slots=True)
class Intervals:
    """How often things happen, in optimizer steps; 0 for never."""

    total_steps: int
    save_every: int
    eval_every: int


@dataclass(frozen=True, slots=True)
class StepActions:
    """What follows a step that is committed."""

    save: SaveReason | None
    evaluate: bool
    leave: bool


def after_step(step: int, intervals: Intervals, *, stop_agreed: bool, save_agreed: bool) -> StepActions:
    """What follows step `step`. The agreed flags come from a reduction, so they are the same on every rank."""
    end = step >= intervals.total_steps
    leave = end or stop_agreed
    reason: SaveReason | None = None
    if end:
        reason = "end"
    elif stop_agreed:
        reason = "stop"
    elif intervals.save_every and step % intervals.save_every == 0:
        reason = "interval"
    elif save_agreed:
        reason = "time"
    evaluate = bool(intervals.eval_every) and (end or step % intervals.eval_every == 0) and not (stop_agreed and not end)
    return StepActions(reason, evaluate, leave)


def is_logged(step: int, *, every_steps: int, first_step: int, total_steps: int) -> bool:
    """Whether a person is shown this step: each interval, the first step after a start, and the last one."""
    return step % every_steps == 0 or step in (first_step, total_steps)
