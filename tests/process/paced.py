"""A Llama that takes its time: a test can act between two steps of it, however slow the machine is that runs the test."""

import time

from torch import nn

from elastictrain.data.dataset import Batch
from elastictrain.train.task import LossOutput
from recipes.llama import LlamaTask
from recipes.llama.config import LlamaConfig


class PacedLlama(LlamaTask):
    """LlamaTask with a pause in every pass."""

    neutral_options = LlamaTask.neutral_options | {"pause_s"}

    def __init__(self, *, model: LlamaConfig, compile_loss: bool = False, pause_s: float = 0.0) -> None:
        super().__init__(model=model, compile_loss=compile_loss)
        self._pause_s = pause_s

    def loss(self, model: nn.Module, batch: Batch) -> LossOutput:
        time.sleep(self._pause_s)
        return super().loss(model, batch)
