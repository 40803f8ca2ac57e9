"""What steps of a user's loop come to: the metrics, on their way from the device to records and curves."""

import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from elastictrain.errors import UsageError
from elastictrain.events import Step
from elastictrain.telemetry.progress import write_above
from elastictrain.train.context import TrainContext
from elastictrain.train.observing import Curves, Observer
from elastictrain.train.replica_comparison import HostCopy


@dataclass(frozen=True, slots=True)
class Figures:
    """Those of one step. Made by `take_figures`."""

    step: int
    names: tuple[str, ...]
    values: HostCopy
    rate: float
    seconds: float

    def read(self) -> dict[str, float]:
        """The metrics by name; waits for the device."""
        return dict(zip(self.names, self.values.wait().tolist(), strict=True))

    def event(self, values: Mapping[str, float]) -> Step:
        """`values`: from `read`; a loss or gradient norm that is not among them becomes NaN."""
        return Step(
            step=self.step,
            loss=values.get("loss", math.nan),
            lr=self.rate,
            grad_norm=values.get("grad_norm", math.nan),
            positions=(self.step - 1, self.step),
            # Positions count steps here.
            samples_per_s=1.0 / self.seconds,
            tokens_per_s=values["tokens"] / self.seconds if "tokens" in values else None,
            metrics={name: value for name, value in values.items() if name not in ("loss", "grad_norm", "tokens")},
        )


class CurveObserver(Observer):
    """Prints sentences of the run, and writes the metrics of steps as curves."""

    def __init__(self, context: TrainContext, *, first_step: int) -> None:
        self._every_steps = context.config.telemetry.log_every_steps
        self._curves = Curves(context, first_step=first_step, total_steps=0)

    def on_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        if step % self._every_steps == 0 or step == 1:
            self._curves.log(step, metrics)

    def print_line(self, text: str) -> None:
        write_above(sys.stderr, text)

    def close(self) -> None:
        self._curves.close()


def take_figures(
    step: int, metrics: Mapping[str, float | Tensor], *, optimizers: Iterable[Optimizer], seconds: float
) -> Figures:
    """Nothing is waited for. Raises: UsageError naming the metric."""
    values = []
    for name, value in metrics.items():
        if not isinstance(value, int | float | Tensor) or (isinstance(value, Tensor) and value.is_complex()):
            raise UsageError(f"metrics[{name!r}] must be a number, but is {value!r}")
        tensor = torch.as_tensor(value.full_tensor() if isinstance(value, DTensor) else value, dtype=torch.float64).detach()
        if tensor.numel() != 1:
            raise UsageError(f"metrics[{name!r}] must be a number, but has the shape {list(tensor.shape)}")
        values.append(tensor.reshape(()))
    device = next((one.device for one in values if one.is_cuda), torch.device("cpu"))
    stacked = torch.stack([one.to(device, non_blocking=True) for one in values]) if values else torch.zeros(0)
    rates = [group["lr"] for optimizer in optimizers for group in optimizer.param_groups if "lr" in group]
    return Figures(step, tuple(metrics), HostCopy(stacked), float(rates[0]) if rates else math.nan, max(seconds, 1e-9))
