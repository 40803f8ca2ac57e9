"""Everything that makes a run the same run afterwards."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor, nn
from torch.optim import AdamW

from elastictrain.checkpoint.manifest import JsonValue, StateCounters
from elastictrain.errors import NonFiniteError
from elastictrain.train.optimizer import optimizer_tensors

JsonState = Mapping[str, JsonValue]


@dataclass(frozen=True, slots=True)
class SkipCounts:
    """Updates left out so far, because a loss or gradient was not finite."""

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


@dataclass(slots=True)
class TrainState:
    """Model, optimizer and the counters. Sample order and randomness are functions of (seed, step, position), so `step` says
    it all: there is no loader state and no generator state to keep."""

    model: nn.Module
    """The model under its own parameter names (not the DDP wrapper)."""

    optimizer: AdamW
    step: int = 0
    """Optimizer steps committed."""

    skips: SkipCounts = field(default_factory=SkipCounts)

    data_digest: str = ""
    """Names the data that the run is trained on; empty where it has no name."""

    def tensors(self) -> dict[str, Tensor]:
        """Handles to all live tensors by their name in a checkpoint; loading into them restores the state."""
        parameters = dict(self.model.named_parameters())
        named: dict[str, Tensor] = {f"model.{name}": parameter for name, parameter in parameters.items()}
        persistent = set(self.model.state_dict())
        for name, buffer in self.model.named_buffers():
            if name in persistent:
                named[f"model.{name}"] = buffer
        for name, tensor in optimizer_tensors(self.optimizer, parameters.items()):
            named[f"optim.{name}"] = tensor
        return named

    def changed_by_forward(self) -> frozenset[str]:
        """Names of the tensors that a forward pass may change, besides the update."""
        return frozenset(f"model.{name}" for name, _ in self.model.named_buffers())

    def scalars(self, step: int, *, global_batch: int) -> JsonState:
        """The counters for the manifest of step `step`, when it is settled and the next one is not."""
        return {
            "step": step,
            "positions": step * global_batch,
            "skipped_in_a_row": self.skips.in_a_row,
            "skipped_total": self.skips.total,
            "data_digest": self.data_digest,
        }

    def adopt(self, counters: StateCounters) -> None:
        """Take the counters of a checkpoint."""
        self.step = counters.step
        self.skips = SkipCounts(counters.skipped_in_a_row, counters.skipped_total)
