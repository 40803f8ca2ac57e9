"""The group `optim`: AdamW and its learning-rate schedule."""

from dataclasses import dataclass
from typing import Annotated, Literal

from elastictrain.config.constraints import Range


@dataclass(frozen=True, slots=True)
class OptimGroup:
    """AdamW and its learning-rate schedule. The learning rate is a function of the step alone."""

    lr: Annotated[float, Range(0.0, exclusive=True)] = 3e-4
    """Peak learning rate."""

    beta1: Annotated[float, Range(0.0, 0.999999)] = 0.9
    """Decay of the first moment."""

    beta2: Annotated[float, Range(0.0, 0.999999)] = 0.95
    """Decay of the second moment."""

    eps: Annotated[float, Range(0.0, exclusive=True)] = 1e-8
    """Added to the denominator."""

    weight_decay: Annotated[float, Range(0.0)] = 0.1
    """Decoupled weight decay of parameters with two or more dimensions; others have none."""

    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    """Shape of the learning rate after warm-up."""

    warmup_steps: Annotated[int, Range(0)] = 0
    """Steps over which the learning rate rises linearly from 0 to `lr`. In a run of fewer steps it rises over all of them
    (linear and cosine)."""

    final_lr_ratio: Annotated[float, Range(0.0, 1.0)] = 0.1
    """Learning rate at the last step, as a share of `lr` (linear and cosine)."""
