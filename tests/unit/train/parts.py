"""A small task and its data, for tests of the step and of what surrounds it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import cast

import torch
from torch import Tensor, nn

from elastictrain.checkpoint.earlier_commits import JobMemory
from elastictrain.config.composed import ParallelGroup, TrainGroup
from elastictrain.data.assignment import Portion
from elastictrain.data.dataset import Batch
from elastictrain.data.loader import MicroBatch
from elastictrain.distributed.wrapping import Wrapped, Wrapping, mesh_shape
from elastictrain.errors import ReplicasDivergedError
from elastictrain.identity import Identity
from elastictrain.liveness.progress import ProgressTracker
from elastictrain.start_times import StartTimes
from elastictrain.train.context import TrainContext
from elastictrain.train.observing import Observer
from elastictrain.train.task import LossOutput

CPU = torch.device("cpu")
GLOBAL_BATCH = 8


@dataclass
class FakeComparison:
    """Replicas that come to differ at a step, if at all."""

    diverge_at: int | None = None
    launched: list[int] = field(default_factory=list)
    begun: list[int] = field(default_factory=list)

    def step_launched(self, step: int) -> None:
        self.launched.append(step)

    def begin(self, step: int) -> None:
        self.begun.append(step)

    def check(self, step: int) -> None:
        if step in self.begun and self.diverge_at is not None and step >= self.diverge_at:
            raise ReplicasDivergedError(f"replicas differ after step {step}")


class PartOfContext(SimpleNamespace):
    """A context with some of its attributes."""

    share = TrainContext.share
    plan_passes = TrainContext.plan_passes


def context_of(**parts: object) -> TrainContext:
    """What a test needs of a context, and nothing else of it: alone, without a control group, and nothing to write to."""
    usual: dict[str, object] = {
        "identity": Identity(0, 1, 0, 1, "here", launched=False),
        "tracker": ProgressTracker(),
        "times": StartTimes(),
        "group": SimpleNamespace(control=None, device=CPU),
        "journal": SimpleNamespace(record=lambda event: None, flush=lambda: None),
        "job": SimpleNamespace(
            committed=lambda step: None,
            memory=JobMemory(),
            learned=lambda interval: None,
            evaluated=None,
            evaluation_done=lambda step: None,
        ),
        "left_s": lambda: None,
        "stop_request": lambda: None,
        "check_attached": lambda: None,
        "leave_if_asked": lambda: None,
        "await_group": lambda: None,
    }
    return cast(TrainContext, PartOfContext(**{**usual, **parts}))


@dataclass
class FakeObserver(Observer):
    """Remembers what was said."""

    said: list[str] = field(default_factory=list)

    def print_line(self, text: str) -> None:
        self.said.append(text)


class Net(nn.Module):
    """Two blocks' worth of parameters: matrices, vectors, a buffer; dropout on demand."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.body = nn.Linear(3, 6)
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.drop(torch.tanh(self.body(x)))).sum(dim=-1)
        return out


class Squares:
    """Weighted squared error; weights differ between samples, as token counts do."""

    def __init__(self, dropout: float = 0.0) -> None:
        self._dropout = dropout

    def build_model(self) -> nn.Module:
        return Net(self._dropout)

    def loss(self, model: nn.Module, batch: Batch) -> LossOutput:
        errors = (model(batch["x"]) - batch["y"]).square() * batch["w"]
        return LossOutput(errors.sum(), batch["w"].sum())


class Points:
    """Samples by index."""

    def __init__(self, number: int = 64) -> None:
        generator = torch.Generator().manual_seed(5)
        self.x = torch.randn(number, 3, generator=generator)
        self.y = self.x.sum(dim=1) + 0.1 * torch.randn(number, generator=generator)
        self.w = torch.randint(1, 5, (number,), generator=generator).float()

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int, /) -> Batch:
        return {"x": self.x[index], "y": self.y[index], "w": self.w[index]}

    def batch(self, first: int, end: int) -> Batch:
        return {"x": self.x[first:end], "y": self.y[first:end], "w": self.w[first:end]}


def wrapped_model(task: Squares, *, kind: str = "ddp") -> Wrapped:
    """The task's model in a world of one."""
    torch.manual_seed(0)
    train, parallel = TrainGroup(steps=1, global_batch=8, micro_batch=8), ParallelGroup(kind=kind)  # type: ignore[arg-type]
    shape = mesh_shape(parallel, world_size=1, local_world_size=1)
    model = task.build_model()
    wrapping = Wrapping(shape, parallel, train, CPU)
    wrapping.wrap(model, [])
    return wrapping.finish(model)


def micro_batches(points: Points, step: int, sizes: Sequence[int], *, idle: Sequence[int] = ()) -> Iterator[MicroBatch]:
    """The micro-batches of step `step` (from 1) in these sizes; passes at the indices `idle` repeat the first portion."""
    first = (step - 1) * GLOBAL_BATCH
    begin = first
    for index in range(len(sizes) + len(idle)):
        if index in idle:
            size = sizes[0]
            portion = Portion(first, first + size, counts=False)
        else:
            size = sizes[index - sum(one < index for one in idle)]
            portion = Portion(begin, begin + size, counts=True)
            begin += size
        ids = tuple(range(portion.first, portion.end))
        yield MicroBatch(step - 1, portion, ids, points.batch(portion.first, portion.end))
