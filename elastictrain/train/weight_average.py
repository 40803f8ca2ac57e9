"""The exponential moving average of the weights, which evaluations use."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

from elastictrain.train.parameters import local


@dataclass(frozen=True, slots=True)
class WeightAverage:
    """Averages of the trained parameters by name, sharded like these; what is not trained is its own average."""

    decay: float
    parameters: dict[str, nn.Parameter]
    averages: dict[str, Tensor]

    @classmethod
    @torch.no_grad()
    def of(cls, model: nn.Module, *, decay: float) -> Self:
        """It begins with the parameters of `model`."""
        trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
        return cls(decay, trained, {name: one.detach().clone() for name, one in trained.items()})

    @torch.no_grad()
    def reset(self) -> None:
        """Begin again with the parameters as they are."""
        for name, parameter in self.parameters.items():
            self.averages[name].copy_(parameter)

    @torch.no_grad()
    def update(self, *, finite: Tensor) -> None:
        """After an update: move each average by 1 - `decay` of the way to its parameter, or not at all if the update was left
        out; no synchronization with the device."""
        share = (1.0 - self.decay) * finite
        for name, parameter in self.parameters.items():
            average = local(self.averages[name])
            average.lerp_(local(parameter.detach()), share.to(average.dtype))

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The model has the averages for its parameters in the block. Nothing may read the state meanwhile."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for name, parameter in self.parameters.items():
            mine, average = local(parameter.detach()), local(self.averages[name])
            kept = mine.clone()
            mine.copy_(average)
            average.copy_(kept)
