"""The task `digits`: which digit is this?"""

from dataclasses import dataclass
from functools import cached_property
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import nn

from elastictrain.config.constraints import Range
from elastictrain.data.dataset import Batch
from elastictrain.train.task import LossOutput

from .data import NUM_CLASSES, NUM_PIXELS, Digits, eval_indices, load_digits, select, train_indices


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpConfig:
    """The shape of a multilayer perceptron."""

    hidden: Annotated[int, Range(1)] = 128
    """Width of each hidden layer."""

    num_hidden: Annotated[int, Range(0, 10_000)] = 2
    """Hidden layers; 0 is logistic regression."""

    dropout: Annotated[float, Range(0.0, 0.99)] = 0.1
    """Share of hidden units that are left out at random in training."""


class DigitsTask:
    """Classifies scikit-learn's handwritten digits."""

    def __init__(self, *, model: MlpConfig) -> None:
        self._config = model

    def build_model(self) -> nn.Module:
        """See `elastictrain.train.task.Task`."""
        layers: list[nn.Module] = []
        width = NUM_PIXELS
        for _ in range(self._config.num_hidden):
            layers += [nn.Linear(width, self._config.hidden), nn.ReLU(), nn.Dropout(self._config.dropout)]
            width = self._config.hidden
        return nn.Sequential(*layers, nn.Linear(width, NUM_CLASSES))

    def loss(self, model: nn.Module, batch: Batch) -> LossOutput:
        """`image` [B, 64] float32, `label` [B] int64; the weight is the number of images."""
        labels = batch["label"]
        guesses = model(batch["image"]).float()
        loss_sum = F.cross_entropy(guesses, labels, reduction="sum")
        right = (guesses.argmax(dim=-1) == labels).sum()
        weight = torch.full((), len(labels), dtype=torch.float32, device=labels.device)
        return LossOutput(loss_sum, weight, {"accuracy": right})

    def train_dataset(self) -> Digits:
        """Five sixths of the images."""
        return select(self._digits, train_indices(len(self._digits)))

    def eval_dataset(self) -> Digits:
        """Every sixth image."""
        return select(self._digits, eval_indices(len(self._digits)))

    def show_sample(self, model: nn.Module, *, device: torch.device, seed: int) -> str:
        """How many held-out images are recognised."""
        digits = self.eval_dataset()
        training = model.training
        model.eval()
        with torch.no_grad():
            guesses = model(digits.images.to(device)).argmax(dim=-1).cpu()
        model.train(training)
        right = int((guesses == digits.labels).sum())
        return f"{right} of {len(digits)} held-out digits recognised ({right / len(digits):.1%})"

    @cached_property
    def _digits(self) -> Digits:
        return load_digits()
