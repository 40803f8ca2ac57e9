"""The state that makes a resumed run the same run: tensors and counters."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Protocol

from torch import Tensor, nn

from elastictrain.checkpoint.manifest import JsonValue, StateCounters
from elastictrain.train.optimizer import Optimizers
from elastictrain.train.parameters import saved_tensors
from elastictrain.train.weight_average import WeightAverage

JsonState = Mapping[str, JsonValue]


def count_step(counters: StateCounters, *, loss: float, grad_norm: float) -> StateCounters:
    """The counters after a step. The device has already left the update out by the same rule."""
    if math.isfinite(loss) and math.isfinite(grad_norm):
        return replace(counters, skipped_in_a_row=0)
    return replace(counters, skipped_in_a_row=counters.skipped_in_a_row + 1, skipped_total=counters.skipped_total + 1)


class SavedState(Protocol):
    """State that is saved and restored; its counters follow the steps."""

    step: int  # optimizer steps committed
    counters: StateCounters

    def tensors(self) -> dict[str, Tensor]:
        """Live tensors by their name in a checkpoint; loading into them restores the state."""

    def changed_by_forward(self) -> frozenset[str]:
        """Names of the tensors that may change before the next update."""

    def scalars(self, step: int, *, global_batch: int) -> JsonState:
        """What the manifest of step `step` holds."""

    def adopt(self, counters: StateCounters) -> None:
        """Take the counters of a checkpoint, but keep the data digest of this run."""


@dataclass(slots=True)
class TrainState:
    """Model, optimizer, average of the weights, and counters. Sample order and randomness are functions of (seed, step,
    position), so there is no state of a loader or generator to keep."""

    model: nn.Module  # the model under its own parameter names (not the DDP wrapper)
    optimizer: Optimizers
    average: WeightAverage | None = field(default=None, kw_only=True)
    # of the finished steps, and the digest of the data; step and positions are set when they are saved
    counters: StateCounters = field(default_factory=lambda: StateCounters(0))
    step: int = 0  # optimizer steps committed

    def tensors(self) -> dict[str, Tensor]:
        """Live tensors by their name in a checkpoint; loading into them restores the state."""
        named = {f"model.{name}": tensor for name, tensor in saved_tensors(self.model).items()}
        named |= {f"optim.{name}": tensor for name, tensor in self.optimizer.tensors(self.model.named_parameters())}
        if self.average is not None:
            named |= {f"ema.{name}": tensor for name, tensor in self.average.averages.items()}
        return named

    def changed_by_forward(self) -> frozenset[str]:
        """Names of the tensors that a forward pass may change, besides the update."""
        return frozenset(f"model.{name}" for name, _ in self.model.named_buffers())

    def scalars(self, step: int, *, global_batch: int) -> JsonState:
        """The counters for the manifest of step `step`, when it is finished and the next one is not."""
        return asdict(replace(self.counters, step=step, positions=step * global_batch))

    def adopt(self, counters: StateCounters) -> None:
        """Take the counters of a checkpoint, but keep the data digest of this run."""
        self.step, self.counters = counters.step, replace(counters, data_digest=self.counters.data_digest)
