"""A Llama that fails in a step of its own choice, each time."""

from torch import nn

from elastictrain.data.dataset import Batch
from elastictrain.train.task import LossOutput
from recipes.llama import LlamaTask
from recipes.llama.config import LlamaConfig


class FailingLlama(LlamaTask):
    """LlamaTask that raises in the pass of number `fails_at`, counted from the start of the process."""

    neutral_options = LlamaTask.neutral_options | {"fails_at"}

    def __init__(self, *, model: LlamaConfig, compile_loss: bool = False, fails_at: int = 1) -> None:
        super().__init__(model=model, compile_loss=compile_loss)
        self._left = fails_at

    def loss(self, model: nn.Module, batch: Batch) -> LossOutput:
        self._left -= 1
        if self._left == 0:
            raise ZeroDivisionError("a batch that cannot be digested")
        return super().loss(model, batch)


class MistakenLlama(LlamaTask):
    """LlamaTask whose loss is a mean."""

    def loss(self, model: nn.Module, batch: Batch) -> LossOutput:
        output = super().loss(model, batch)
        return output.loss_sum / output.weight  # type: ignore[return-value]
