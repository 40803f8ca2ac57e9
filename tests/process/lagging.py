"""A Llama that is slower on one rank."""

import time

import torch.distributed as dist
from torch import Tensor, nn

from elastictrain.data.dataset import Batch
from elastictrain.train.task import LossOutput
from recipes.llama import LlamaTask
from recipes.llama.config import LlamaConfig


class LaggingLlama(LlamaTask):
    """LlamaTask with a pause in each pass, and a longer one, in the forward or in the backward pass, on the rank `lags`."""

    neutral_options = LlamaTask.neutral_options | {"pause_s", "lags", "longer_s", "backward"}

    def __init__(
        self,
        *,
        model: LlamaConfig,
        compile_loss: bool = False,
        pause_s: float = 0.02,
        lags: int = -1,
        longer_s: float = 0.0,
        backward: bool = False,
    ) -> None:
        super().__init__(model=model, compile_loss=compile_loss)
        self._pause_s, self._lags, self._longer_s, self._backward = pause_s, lags, longer_s, backward

    def loss(self, model: nn.Module, batch: Batch) -> LossOutput:
        longer_s = self._longer_s if dist.get_rank() == self._lags else 0.0
        time.sleep(self._pause_s if self._backward else self._pause_s + longer_s)
        output = super().loss(model, batch)
        if self._backward:
            output.loss_sum.register_hook(lambda gradient: pause(gradient, self._pause_s + longer_s))
        return output


def pause(gradient: Tensor, seconds: float) -> Tensor:
    time.sleep(seconds)
    return gradient
