"""A Llama that takes its time: a test can act between two steps of it, however slow the machine is that runs the test."""

import os
import time

from torch import nn

from elastictrain.data.dataset import Batch
from elastictrain.train.task import LossOutput
from recipes.llama import LlamaTask
from recipes.llama.config import LlamaConfig


class PacedLlama(LlamaTask):
    """LlamaTask with a pause in every pass, and as long as the file `gate` is there."""

    neutral_options = LlamaTask.neutral_options | {"pause_s", "gate"}

    def __init__(self, *, model: LlamaConfig, compile_loss: bool = False, pause_s: float = 0.0, gate: str = "") -> None:
        super().__init__(model=model, compile_loss=compile_loss)
        self._pause_s = pause_s
        self._gate = gate

    def loss(self, model: nn.Module, batch: Batch) -> LossOutput:
        tried = next(iter(batch.values())).is_meta  # before any group exists
        time.sleep(0.0 if tried else self._pause_s)
        while not tried and self._gate and os.path.exists(self._gate):  # noqa: PTH110
            time.sleep(0.05)
        return super().loss(model, batch)
