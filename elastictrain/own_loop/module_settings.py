"""What modules have besides the state of a checkpoint, as it is before the first step of a process."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class ModuleSettings:
    """Training mode, what needs gradients, and buffers that a state_dict leaves out, copied to host memory. A process that
    goes on after a failure needs those of a new one: the failure may have interrupted an evaluation."""

    training: list[tuple[nn.Module, bool]]
    requires_grad: list[tuple[nn.Parameter, bool]]
    buffers: list[tuple[nn.Module, str, Tensor, Tensor]]  # each with its module, its name there, and its copy

    @classmethod
    def record(cls, modules: Iterable[nn.Module]) -> Self:
        """As they are now, of `modules` and all modules in them. Waits for the device: buffers are copied to the host."""
        settings = cls([], [], [])
        for module in modules:
            saved = module.state_dict().keys()
            settings.training.extend((one, one.training) for one in module.modules())
            settings.requires_grad.extend((one, one.requires_grad) for one in module.parameters())
            for name, buffer in module.named_buffers():
                if name not in saved:
                    path, _, own_name = name.rpartition(".")
                    settings.buffers.append((module.get_submodule(path), own_name, buffer, buffer.to("cpu", copy=True)))
        return settings

    @torch.no_grad()
    def restore(self) -> None:
        """In place; a buffer that was replaced since is the recorded tensor again."""
        for module, training in self.training:
            # Not `train()`, which changes the children, too, and which modules override.
            module.training = training
        for parameter, requires_grad in self.requires_grad:
            parameter.requires_grad_(requires_grad)
        for module, name, buffer, copy in self.buffers:
            setattr(module, name, buffer)
            buffer.copy_(copy)
