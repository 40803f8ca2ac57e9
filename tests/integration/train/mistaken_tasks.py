"""Tasks and data sets with one mistake each. `Right` has none."""

import random
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from elastictrain.train.task import LossOutput


class Samples:
    """Samples {"x": [3], "y": []}."""

    def __init__(self, size: int = 16) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int, /) -> Any:
        return {"x": torch.full((3,), float(index)), "y": torch.tensor(float(index))}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(3, 4)
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.body(x))).squeeze(-1)
        return out


def sum_of(errors: Tensor) -> LossOutput:
    return LossOutput(errors.sum(), torch.full((), float(len(errors)), device=errors.device))


class Right:
    def build_model(self) -> Any:
        return Net()

    def loss(self, model: Any, batch: Any) -> Any:
        return sum_of((model(batch["x"]) - batch["y"]).square())

    def train_dataset(self) -> Any:
        return Samples()

    def eval_dataset(self) -> Any:
        return Samples(8)


# The data.


class OfLengths(Samples):
    def __getitem__(self, index: int, /) -> Any:
        return {"x": torch.ones(1 + index), "y": torch.tensor(1.0)}


class OfTypes(Samples):
    def __getitem__(self, index: int, /) -> Any:
        return {"x": torch.ones(3, dtype=torch.float64 if index % 2 else torch.float32), "y": torch.tensor(1.0)}


class OfKeys(Samples):
    def __getitem__(self, index: int, /) -> Any:
        return {"x": torch.ones(3), **({"y": torch.tensor(1.0)} if index % 2 else {})}


class OfObjects(Samples):
    def __getitem__(self, index: int, /) -> Any:
        return {"x": object()}


class OfTexts(Samples):
    def __getitem__(self, index: int, /) -> Any:
        return {"x": "a text"}


class OfMissingFiles(Samples):
    def __getitem__(self, index: int, /) -> Any:
        raise FileNotFoundError(f"picture {index}")


class OfItsOwnRandomness(Samples):
    def __getitem__(self, index: int, /) -> Any:
        return {"x": torch.from_numpy(np.random.default_rng().random(3, dtype=np.float32)), "y": torch.tensor(1.0)}


class OfItsOwnArrays(Samples):
    def __getitem__(self, index: int, /) -> Any:
        return {"x": np.random.default_rng().random(3, dtype=np.float32), "y": 1.0}


class OfItsOwnSizes(Samples):
    def __getitem__(self, index: int, /) -> Any:
        return {"x": torch.ones(np.random.default_rng().integers(1, 10**6)), "y": 1.0}


class WithoutLength:
    def __getitem__(self, index: int, /) -> Any:
        return torch.ones(3)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([torch.ones(3)])


class OfLateLengths(Samples):
    """Only sample 13 is longer."""

    def __getitem__(self, index: int, /) -> Any:
        return {"x": torch.ones(4 if index == 13 else 3), "y": torch.tensor(1.0)}


class Unpicklable(Samples):
    def __init__(self) -> None:
        super().__init__()
        self.transform = lambda x: x


def with_data(kind: Any) -> type:
    class Task(Right):
        def train_dataset(self) -> Any:
            return kind()

    Task.__qualname__ = f"With{kind.__name__}"
    return Task


WithOfLengths, WithOfTypes, WithOfKeys, WithOfObjects, WithOfTexts = map(
    with_data, (OfLengths, OfTypes, OfKeys, OfObjects, OfTexts)
)
WithOfMissingFiles, WithOfItsOwnRandomness, WithWithoutLength, WithStream, WithUnpicklable = map(
    with_data, (OfMissingFiles, OfItsOwnRandomness, WithoutLength, Stream, Unpicklable)
)
WithOfLateLengths, WithOfItsOwnArrays, WithOfItsOwnSizes = map(with_data, (OfLateLengths, OfItsOwnArrays, OfItsOwnSizes))


class NoSamples(Right):
    def train_dataset(self) -> Any:
        return Samples(0)


class NoDataset(Right):
    def train_dataset(self) -> Any:
        return None


class FailingDataset(Right):
    def eval_dataset(self) -> Any:
        raise KeyError("validation split")


class FailingCollate(Right):
    def collate(self, samples: list[Any]) -> Any:
        return {"x": torch.stack([sample["z"] for sample in samples])}


class CollateToNothing(Right):
    def collate(self, samples: list[Any]) -> Any:
        return None


# The model.


class NoModel(Right):
    def build_model(self) -> Any:
        return Net


class FrozenModel(Right):
    def build_model(self) -> Any:
        return Net().requires_grad_(False)


class FailingModel(Right):
    def build_model(self) -> Any:
        return nn.Linear(3, self.width)  # type: ignore[attr-defined]


class StrangeBlocks(Right):
    def blocks(self, model: Any) -> Any:
        return [nn.Linear(3, 3)]


# The loss.


class ScalarLoss(Right):
    def loss(self, model: Any, batch: Any) -> Any:
        return (model(batch["x"]) - batch["y"]).square().mean()


class LossPerSample(Right):
    def loss(self, model: Any, batch: Any) -> Any:
        errors = (model(batch["x"]) - batch["y"]).square()
        return LossOutput(errors, torch.ones(len(errors), device=errors.device))


class NumberAsWeight(Right):
    def loss(self, model: Any, batch: Any) -> Any:
        return LossOutput((model(batch["x"]) - batch["y"]).square().sum(), len(batch["y"]))  # type: ignore[arg-type]


class WeightElsewhere(Right):
    def loss(self, model: Any, batch: Any) -> Any:
        return LossOutput((model(batch["x"]) - batch["y"]).square().sum(), torch.tensor(float(len(batch["y"]))))


class HalfLoss(Right):
    def loss(self, model: Any, batch: Any) -> Any:
        return sum_of((model(batch["x"]) - batch["y"]).square().bfloat16())


class LossWithoutGradient(Right):
    def loss(self, model: Any, batch: Any) -> Any:
        return sum_of((model(batch["x"]) - batch["y"]).square().detach())


class WeightWithGradient(Right):
    def loss(self, model: Any, batch: Any) -> Any:
        errors = (model(batch["x"]) - batch["y"]).square()
        return LossOutput(errors.sum(), errors.sum())


class FailingLoss(Right):
    def loss(self, model: Any, batch: Any) -> Any:
        return sum_of(model(batch["x"]) - batch["label"])


class MetricsAsList(Right):
    def loss(self, model: Any, batch: Any) -> Any:
        output = super().loss(model, batch)
        return LossOutput(output.loss_sum, output.weight, [output.weight])  # type: ignore[arg-type]


class MetricPerSample(Right):
    def loss(self, model: Any, batch: Any) -> Any:
        output = super().loss(model, batch)
        return LossOutput(output.loss_sum, output.weight, {"right": batch["y"] > 0})


class LabelOutOfRange(Right):
    def loss(self, model: Any, batch: Any) -> Any:
        errors = model(batch["x"])
        return sum_of(nn.functional.cross_entropy(errors[:, None].expand(-1, 4), batch["y"].long(), reduction="none"))


class ModelOnAnotherDevice(Right):
    def build_model(self) -> Any:
        return Net().cuda()


class WrongShapes(Right):
    def loss(self, model: Any, batch: Any) -> Any:
        return sum_of(model(batch["x"][:, :2]))


class ForwardItself(Right):
    def loss(self, model: Any, batch: Any) -> Any:
        return sum_of(model.module.forward(batch["x"]))


class TwoCalls(Right):
    def loss(self, model: Any, batch: Any) -> Any:
        return sum_of(model(batch["x"]) - model(batch["x"] + 1))


class PartOfTheModel(Right):
    def loss(self, model: Any, batch: Any) -> Any:
        return sum_of(model(batch["x"]) + model.head.bias)


class UnusedParameters(Right):
    def build_model(self) -> Any:
        net = Net()
        net.more = nn.Linear(2, 2)
        return net


class OneValueForTheNorm(Right):
    def build_model(self) -> Any:
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1), nn.Flatten(0))


# Signatures.


class LossOfOne(Right):
    def loss(self, batch: Any) -> Any:  # type: ignore[override]
        return None


class CollateOfTwo(Right):
    def collate(self, first: Any, second: Any) -> Any:
        return None


class BlocksNotCallable(Right):
    blocks = 3


class FailingConstructor(Right):
    def __init__(self) -> None:
        raise KeyError("VOCABULARY")


class NoCount(Right):
    def tokens_per_sample(self, sample: Any) -> Any:
        return None

    def flops_per_sample(self, model: Any, sample: Any) -> Any:
        return 1.0


# Without mistakes.


class Tuples(Samples):
    """(image, label), augmented, as in vision: an array and a number."""

    def __getitem__(self, index: int, /) -> Any:
        x = torch.rand(3) + np.random.rand() + random.random()
        return (x + np.random.default_rng(random.getrandbits(64)).random(), [np.float32(index), index])


class RightWithTuples(Right):
    def train_dataset(self) -> Any:
        return Tuples()

    def eval_dataset(self) -> Any:
        return Tuples(4)

    def loss(self, model: Any, batch: Any) -> Any:
        x, (y, _) = batch
        return sum_of((model(x.float()) - y).square())


class RightWithCollate(Right):
    """Lengths differ, and only `collate` knows what to do; the loss keeps a tensor of the batch's device in the task."""

    ones: Tensor | None = None

    def train_dataset(self) -> Any:
        return OfLengths()

    def eval_dataset(self) -> Any:
        return OfLengths(4)

    def collate(self, samples: list[Any]) -> Any:
        x = nn.utils.rnn.pad_sequence([sample["x"] for sample in samples], batch_first=True)
        return [x[:, :3] if x.shape[1] > 2 else nn.functional.pad(x, (0, 3 - x.shape[1]))]

    def loss(self, model: Any, batch: Any) -> Any:
        if self.ones is None:
            self.ones = torch.ones((), device=batch[0].device)
        return sum_of((model(batch[0]) - self.ones).square())


class RightWithItems(Right):
    """Reads values of tensors, which the meta device cannot."""

    def loss(self, model: Any, batch: Any) -> Any:
        return sum_of((model(batch["x"]) - batch["y"]).square() * (1.0 if batch["y"].max().item() >= 0 else 0.0))


class RightWithNorm(Right):
    def build_model(self) -> Any:
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1), nn.Flatten(0))


class RightWithGroup(Right):
    """Asks for its rank, which it has only in a group."""

    def loss(self, model: Any, batch: Any) -> Any:
        dist.get_rank()
        return super().loss(model, batch)
