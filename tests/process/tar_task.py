"""A task whose samples come from webdataset's tar files: by index, and through grain."""

from typing import Any

import grain
import numpy as np
import torch
from torch import Tensor

from elastictrain.data.tar_shards import TarShards
from recipes.digits.task import MlpConfig
from tests.process.augmenting import Augmenting


def decode(sample: dict[str, Any]) -> tuple[Tensor, int]:
    picture = torch.frombuffer(bytearray(sample["bin"]), dtype=torch.uint8).float().view(1, 8, 8) / 255
    return picture + 0.1 * torch.randn(1, 8, 8) + 0.1 * float(np.random.standard_normal()), int(sample["cls"])


class TarTask(Augmenting):
    """The key `task.index`: the folder of the index."""

    def __init__(self, *, model: MlpConfig, index: str) -> None:
        super().__init__(model=model)
        self.index = index

    def train_dataset(self) -> Any:
        return TarShards(self.index, transform=decode)

    def eval_dataset(self) -> Any:
        return grain.MapDataset.source(TarShards(self.index)).map(decode)
