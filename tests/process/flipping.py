"""A Llama in one of whose ranks a bit flips, in a parameter or in the optimizer's state."""

import os

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from recipes.llama import LlamaTask
from recipes.llama.config import LlamaConfig


class FlippingLlama(LlamaTask):
    """LlamaTask in which one bit is flipped on rank `flips_on` right after its update of number `flips_at`, counted from the
    start of the process; in a `flips` of `parameter` or `exp_avg`."""

    neutral_options = LlamaTask.neutral_options | {"flips_on", "flips_at", "flips"}

    def __init__(
        self,
        *,
        model: LlamaConfig,
        compile_loss: bool = False,
        flips_on: int = 0,
        flips_at: int = 0,
        flips: str = "parameter",
    ) -> None:
        super().__init__(model=model, compile_loss=compile_loss)
        self._left = flips_at
        self._flips = flips
        if flips_at and os.environ.get("RANK") == str(flips_on):
            register_optimizer_step_post_hook(self._after_update)

    def _after_update(self, optimizer: Optimizer, *_: object) -> None:
        self._left -= 1
        if self._left == 0:
            parameter = optimizer.param_groups[0]["params"][0]
            _flip(parameter.detach() if self._flips == "parameter" else optimizer.state[parameter][self._flips])


def _flip(tensor: Tensor) -> None:
    part = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    bits = part.view(-1).view(torch.int32)
    # The lowest bit of the last element.
    bits[-1] ^= 1
