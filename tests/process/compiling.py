"""A Llama of which torch compiles so little that a compiler needs seconds for it."""

from collections.abc import Sequence

from torch import nn

from recipes.llama import LlamaTask
from recipes.llama.model import Llama


class CompilingLlama(LlamaTask):
    """LlamaTask whose only blocks are the norms in front of its feed-forward parts."""

    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        assert isinstance(model, Llama)
        return [layer.mlp_norm for layer in model.layers]
