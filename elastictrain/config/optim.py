"""The keys `optim.*`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from elastictrain.config.constraints import NonEmpty, Range


@dataclass(frozen=True, slots=True)
class OptimGroup:
    """The optimizer, AdamW unless `_target_` says otherwise, and its learning-rate schedule, a function of the step alone."""

    _target_: Annotated[str, NonEmpty()] | None = None
    """Dotted path of another optimizer, e.g. `torch.optim.SGD`, or of a function that makes one or several; null for our AdamW.
    It is called with the parameter groups, `lr` and `arguments`."""

    arguments: Mapping[str, object] = field(default_factory=dict)
    """Further arguments for `_target_`, e.g. {momentum: 0.9}."""

    lr: Annotated[float, Range(0.0, exclusive=True)] = 3e-4
    """Peak learning rate."""

    beta1: Annotated[float, Range(0.0, 0.999999)] = 0.9
    """Decay of the first moment; of our AdamW, as `beta2`, `eps` and `weight_decay` are."""

    beta2: Annotated[float, Range(0.0, 0.999999)] = 0.95
    """Decay of the second moment."""

    eps: Annotated[float, Range(0.0, exclusive=True)] = 1e-8
    """Added to the denominator."""

    weight_decay: Annotated[float, Range(0.0)] = 0.1
    """Decoupled weight decay of parameters with two or more dimensions; others have none."""

    schedule: Literal["constant", "linear", "cosine"] | Mapping[str, object] = "cosine"
    """Shape of the learning rate after warm-up; or {_target_: package.module.function, ...}, which gets the step (from 1), and
    `total_steps` if it takes that, and returns the share of `lr`."""

    warmup_steps: Annotated[int, Range(0)] = 0
    """Steps over which the learning rate rises linearly from 0 to `lr`. In a run of fewer steps it rises over all of them
    (linear and cosine)."""

    final_lr_ratio: Annotated[float, Range(0.0, 1.0)] = 0.1
    """Learning rate at the last step, as a share of `lr` (linear and cosine)."""
