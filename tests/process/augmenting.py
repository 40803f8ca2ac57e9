"""A small vision task that draws from every generator there is, in each sample and in `collate`."""

import os
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from elastictrain.train.task import LossOutput
from recipes.digits.task import MlpConfig


@dataclass(frozen=True, slots=True)
class Pictures:
    """(picture, label): noise, a flip and a shift are drawn anew each time."""

    size: int
    first: int

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int, /) -> tuple[Tensor, int]:
        label = (self.first + index) % 4
        picture = torch.full((1, 8, 8), float(label)) + 0.1 * torch.randn(1, 8, 8)
        if random.random() < 0.5:
            picture = picture.flip(-1)
        picture = picture + 0.1 * float(np.random.standard_normal())
        return picture + 0.1 * float(np.random.default_rng(random.getrandbits(64)).random()), label


class Augmenting:
    """A convolution with batch norm and dropout."""

    def __init__(self, *, model: MlpConfig) -> None:
        self.dropout = model.dropout

    def build_model(self) -> nn.Module:
        layers = (nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(self.dropout), nn.Flatten(), nn.Linear(144, 4))
        return nn.Sequential(*layers)

    def loss(self, model: nn.Module, batch: Any) -> LossOutput:
        pictures, labels = batch
        loss_sum = F.cross_entropy(model(pictures), labels, reduction="sum")
        return LossOutput(loss_sum, torch.full((), float(len(labels)), device=labels.device))

    def train_dataset(self) -> Pictures:
        return Pictures(48, 0)

    def eval_dataset(self) -> Pictures:
        return Pictures(16, 48)

    @staticmethod
    def collate(samples: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
        """Mixes each picture with the next one."""
        pictures = torch.stack([picture for picture, _ in samples])
        share = 0.9 + 0.1 * torch.rand(())
        return share * pictures + (1 - share) * pictures.roll(1, 0), torch.tensor([label for _, label in samples])


class UnevenMetrics(Augmenting):
    """Each rank has as many metrics as the others, under names of its own."""

    def loss(self, model: nn.Module, batch: Any) -> LossOutput:
        output = super().loss(model, batch)
        return LossOutput(output.loss_sum, output.weight, {f"of_{os.environ['RANK']}": output.weight})
