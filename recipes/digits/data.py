"""Scikit-learn's 1,797 handwritten digits of 8 x 8 pixels, split in two."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from elastictrain.data.dataset import Batch
from elastictrain.errors import ConfigError, Problem

NUM_PIXELS = 64
NUM_CLASSES = 10
_MAX_PIXEL = 16.0
# The first images count 0 to 9 again and again: a divisor of 10 would hold out some digits more often than others.
_EVAL_EVERY = 6


@dataclass(frozen=True, slots=True)
class Digits:
    """Samples {"image": float32 [64] in [0, 1], "label": int64 []}."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int, /) -> Batch:
        return {"image": self.images[index], "label": self.labels[index]}


def eval_indices(length: int) -> list[int]:
    """Every sixth image is held out, always the same ones."""
    return list(range(_EVAL_EVERY - 1, length, _EVAL_EVERY))


def train_indices(length: int) -> list[int]:
    """The images that are not held out."""
    return [index for index in range(length) if index % _EVAL_EVERY != _EVAL_EVERY - 1]


def load_digits() -> Digits:
    """All images. Raises: ConfigError without scikit-learn."""
    try:
        from sklearn.datasets import load_digits as load
    except ImportError as error:
        raise ConfigError(
            [
                Problem(
                    "task._target_",
                    "needs scikit-learn for its images, which is not installed; run: pip install scikit-learn",
                )
            ]
        ) from error
    bunch = load()
    images = torch.tensor(bunch.data, dtype=torch.float32) / _MAX_PIXEL
    return Digits(images, torch.tensor(bunch.target, dtype=torch.int64))


def select(digits: Digits, indices: Sequence[int]) -> Digits:
    """The samples at `indices`."""
    chosen = torch.tensor(indices)
    return Digits(digits.images[chosen], digits.labels[chosen])
