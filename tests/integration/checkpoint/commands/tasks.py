"""Tasks that runs of the tests name in their configuration."""

import json

import torch
from torch import Tensor, nn

from elastictrain.checkpoint.commands.export import StoredModel
from elastictrain.data.dataset import Batch
from elastictrain.storage.store import Store
from elastictrain.train.task import LossOutput


class PlainTask:
    """Can be trained, and nothing else."""

    def __init__(self, *, width: int = 3) -> None:
        self.width = width

    def build_model(self) -> nn.Module:
        return nn.Linear(self.width, 1)

    def loss(self, model: nn.Module, batch: Batch) -> LossOutput:
        return LossOutput(torch.zeros(()), torch.ones(()))


class ExportingTask(PlainTask):
    """Writes down what it is given to export."""

    def export_huggingface(self, model: StoredModel, *, store: Store, dtype: torch.dtype) -> None:
        store.write("part", b"of an export")
        tensors: dict[str, Tensor] = {name: model.read(name) for name in model.shapes}
        sums = {name: [str(tensor.dtype), float(tensor.float().sum())] for name, tensor in tensors.items()}
        shapes = {name: list(shape) for name, shape in model.shapes.items()}
        document = {"width": self.width, "dtype": str(dtype), "sums": sums, "shapes": shapes, "url": model.url}
        store.write("config.json", json.dumps(document).encode())
