"""A Llama that hangs once, in one pass of one rank."""

import os
import re
import time
from pathlib import Path

from torch import Tensor, nn

from elastictrain.data.dataset import Batch
from elastictrain.train.task import LossOutput
from recipes.llama.config import LlamaConfig
from tests.process.paced import PacedLlama


class HangingLlama(PacedLlama):
    """`how`: sleep (in a backward pass, before it meets others), or spin (in a forward pass, with the interpreter's lock)."""

    neutral_options = PacedLlama.neutral_options | {"how", "rank", "at_pass", "once"}

    def __init__(
        self,
        *,
        model: LlamaConfig,
        compile_loss: bool = False,
        pause_s: float = 0.0,
        how: str = "",
        rank: int = 1,
        at_pass: int = 0,
        once: str = "",
    ) -> None:
        """`once`: a file that is made when it happens, so that it happens no more."""
        super().__init__(model=model, compile_loss=compile_loss, pause_s=pause_s)
        self._how = how if os.environ.get("RANK") == str(rank) else ""
        self._at_pass = at_pass
        self._once = once
        self._passes = 0

    def loss(self, model: nn.Module, batch: Batch) -> LossOutput:
        self._passes += 1
        hangs = bool(self._how) and self._passes == self._at_pass and not Path(self._once).exists()
        if hangs:
            Path(self._once).touch()
        if hangs and self._how == "spin":
            # It tries as many ways as there are, in C, and never gives the lock back.
            re.match(r"(a+)+$", "a" * 64 + "b")
        output = super().loss(model, batch)
        if hangs and self._how == "sleep":
            output.loss_sum.register_hook(_sleep)
        return output


def _sleep(gradient: Tensor) -> Tensor:
    time.sleep(1000.0)
    return gradient
