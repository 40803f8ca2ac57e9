"""A Llama that one batch, or one checkpoint, keeps from going on."""

import zlib
from dataclasses import replace
from pathlib import Path

from torch import nn

from elastictrain.data.dataset import Batch
from elastictrain.train.task import LossOutput
from recipes.llama import LlamaTask
from recipes.llama.config import LlamaConfig


class PoisonedLlama(LlamaTask):
    """`how`: `not_finite` (the loss of pass `at_pass` of the run is not a number, and the file `mark` gets the digest of its
    batch), `batch` (raises for the batch with the digest in `mark`), or `state` (raises in pass `at_pass` of the run, unless
    that has resumed between its beginning and `from_step`). A step has four passes."""

    neutral_options = LlamaTask.neutral_options | {"how", "at_pass", "mark", "from_step"}

    def __init__(
        self,
        *,
        model: LlamaConfig,
        compile_loss: bool = False,
        how: str = "",
        at_pass: int = 0,
        mark: str = "",
        from_step: int = 0,
    ) -> None:
        super().__init__(model=model, compile_loss=compile_loss)
        self._how, self._at_pass, self._mark, self._from_step = how, at_pass, Path(mark), from_step
        self._passes, self._innocent = 0, False

    def on_restart(self, step: int) -> None:
        self._passes, self._innocent = 4 * step, 0 < step < self._from_step

    def loss(self, model: nn.Module, batch: Batch) -> LossOutput:
        self._passes += 1
        digest = str(zlib.crc32(batch["tokens"].numpy().tobytes()))
        if self._how == "batch" and digest == self._mark.read_text():
            raise ZeroDivisionError("a batch that cannot be digested")
        if self._how == "state" and self._passes == self._at_pass and not self._innocent:
            raise ZeroDivisionError("state that cannot be continued")
        output = super().loss(model, batch)
        if self._how == "not_finite" and self._passes == self._at_pass:
            self._mark.write_text(digest)
            return replace(output, loss_sum=output.loss_sum * float("nan"))
        return output
