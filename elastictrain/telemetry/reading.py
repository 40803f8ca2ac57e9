"""What the trainer knows at a logged step."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The figures of one logged step; speeds are means since the last logged one."""

    step: int
    loss: float
    lr: float
    grad_norm: float
    tokens_per_s: float
    """Of the whole group."""
    step_s: float
    mfu: float | None
    """Share of the dense peak, 0 to 1; None where the peak or the model's arithmetic is not known."""
    skipped: int
    """Steps of the run so far whose update was left out."""
