"""What to do about a step whose loss or gradient is not finite."""

import math
from dataclasses import dataclass

from elastictrain.errors import NonFiniteError


@dataclass(frozen=True, slots=True)
class SkipCounts:
    """Updates left out so far; part of the run's state."""

    in_a_row: int = 0
    total: int = 0


def count_step(counts: SkipCounts, *, loss: float, grad_norm: float) -> SkipCounts:
    """The counts after a step. The device has left the update out already by the same rule."""
    if math.isfinite(loss) and math.isfinite(grad_norm):
        return SkipCounts(0, counts.total)
    return SkipCounts(counts.in_a_row + 1, counts.total + 1)


def check_skips(counts: SkipCounts, *, max_skipped: int, step: int, loss: float) -> None:
    """Raises: NonFiniteError at one more than `max_skipped` in a row; `step` and its `loss` are the last."""
    if counts.in_a_row > max_skipped:
        raise NonFiniteError(
            f"{counts.in_a_row} steps in a row were not finite, the last is step {step} (loss {loss}); "
            f"`train.max_skipped` allows {max_skipped}. Lower optim.lr, or look at the data of these steps"
        )
