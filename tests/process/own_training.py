"""What a user may bring besides a model: optimizers, schedules and parameter groups."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from elastictrain.data.dataset import Batch
from elastictrain.train.task import LossOutput
from recipes.llama.model import Attention, Llama
from tests.process.paced import PacedLlama


def muon_and_adamw(groups: Sequence[Mapping[str, Any]], *, lr: float, adamw_lr: float) -> list[Optimizer]:
    """Muon for matrices, AdamW for the rest."""
    parameters = [parameter for group in groups for parameter in group["params"]]
    return [
        torch.optim.Muon([one for one in parameters if one.ndim == 2], lr=lr),
        torch.optim.AdamW([one for one in parameters if one.ndim != 2], lr=adamw_lr, fused=True),
    ]


def inverse_root(step: int, *, half: int) -> float:
    """The share of the learning rate, which is 1/sqrt(2) at step `half`."""
    return (1 + step / half) ** -0.5


class GroupedLlama(PacedLlama):
    """A Llama whose embedding learns at a rate of its own."""

    def parameter_groups(self, model: nn.Module) -> list[dict[str, Any]]:
        named = list(model.named_parameters())
        return [
            {"params": [one for name, one in named if name.startswith("embed")], "lr": 0.01},
            {"params": [one for name, one in named if not name.startswith("embed")]},
        ]

    def loss(self, model: nn.Module, batch: Batch) -> LossOutput:
        """Tells the share of even tokens, too."""
        output, tokens = super().loss(model, batch), batch["tokens"]
        even = (tokens % 2 == 0).sum(), torch.tensor(tokens.numel())
        return LossOutput(output.loss_sum, output.weight, {"even": even})


class LoraLinear(nn.Module):
    """A layer that is not trained, and a low-rank change of it that is."""

    def __init__(self, base: nn.Linear, *, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_a = nn.Linear(base.in_features, rank, bias=False)
        self.lora_b = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + self.lora_b(self.lora_a(x))
        return out


class LoraLlama(PacedLlama):
    """Trains low-rank changes of the queries and values of a Llama, and nothing else."""

    def build_model(self) -> Llama:
        model = super().build_model().requires_grad_(False)
        for part in [one for one in model.modules() if isinstance(one, Attention)]:
            part.q, part.v = LoraLinear(part.q, rank=4), LoraLinear(part.v, rank=4)  # type: ignore[assignment]
        return model

    def init_parameter(self, name: str, tensor: Tensor, generator: torch.Generator) -> None:
        if "lora_b" in name:
            tensor.zero_()
        else:
            super().init_parameter(name.replace(".base.", "."), tensor, generator)

    def initial_name(self, name: str, stored: frozenset[str]) -> str | None:
        return None if "lora" in name else name.replace(".base.", ".")
