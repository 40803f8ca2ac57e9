"""A Llama of which torch compiles so little that a compiler needs seconds for it."""

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch._dynamo.utils
import torch._inductor.config
from torch import nn

from elastictrain.data.dataset import Batch
from elastictrain.train.task import LossOutput
from recipes.llama.model import Llama
from tests.process.paced import PacedLlama

# Not by environment variables: torch reads them when it is imported, before a warm process has its environment.
# Otherwise g++ prepares torch's headers in each folder of temporary files, which takes longer than all else.
torch._inductor.config.cpp_cache_precompile_headers = False
# Otherwise g++ tries each kind of vector instructions of this processor, which takes seconds.
torch._inductor.config.cpp.vec_isa_ok = False


class CompilingLlama(PacedLlama):
    """PacedLlama whose only blocks are the norms in front of its feed-forward parts.

    Where the folder `graphs` is among its temporary files, each process writes a line there after each pass: how many graphs
    it has compiled so far.
    """

    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        assert isinstance(model, Llama)
        return [layer.mlp_norm for layer in model.layers]

    def loss(self, model: nn.Module, batch: Batch) -> LossOutput:
        output = super().loss(model, batch)
        folder = Path(tempfile.gettempdir(), "graphs")
        # The trial before the start compiles nothing.
        if folder.is_dir() and not output.loss_sum.is_meta:
            with (folder / str(os.getpid())).open("a") as file:
                file.write(f"{torch._dynamo.utils.counters['stats']['unique_graphs']}\n")
        return output
