from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from elastictrain.data.dataset import Batch
from elastictrain.data.samples import SampleReader
from elastictrain.distributed.wrapping import MeshShape, Wrapped
from elastictrain.identity import Identity
from elastictrain.liveness.progress import Phase, ProgressTracker
from elastictrain.train.context import TrainContext
from elastictrain.train.evaluate import Evaluator, show_sample
from elastictrain.train.task import LossOutput, Task
from tests.unit.train.parts import Points, Squares, context_of, wrapped_model
from tests.unit.train.test_loop import config


def context_with(task: Task, *, samples: int, micro_batch: int, **parts: object) -> TrainContext:
    plain = config(steps=5)
    train = replace(plain.train, eval_samples=samples, micro_batch=micro_batch)
    return context_of(task=task, config=replace(plain, train=train), **parts)


def shown(task: Task) -> list[str]:
    said: list[str] = []
    model = nn.Linear(1, 1)
    wrapped = Wrapped(model, model, MeshShape(1, 1), nullcontext)
    plain = config(steps=5)
    context = context_of(task=task, config=replace(plain, run=replace(plain.run, seed=7)))
    show_sample(context, wrapped, print_line=said.append)
    return said


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize("micro_batch", [1, 3, 10, 64])
def test_the_mean_over_the_first_samples_whatever_the_portions(
    group_of_one: dist.HashStore, kind: str, micro_batch: int
) -> None:
    task, points, tracker = Squares(dropout=0.5), Points(), ProgressTracker()
    wrapped = wrapped_model(task, kind=kind)
    evaluator = Evaluator(
        context_with(task, samples=10, micro_batch=micro_batch, tracker=tracker), wrapped, SampleReader(points)
    )
    found = evaluator.run(4)
    assert found is not None
    reference = wrapped_model(task).bare.eval()
    expected = task.loss(reference, points.batch(0, 10))
    assert found.loss == pytest.approx((expected.loss_sum / expected.weight).item(), rel=1e-6)
    assert wrapped.module.training
    assert (tracker.mark.phase, tracker.mark.step) == (Phase.EVAL, 4)
    assert all(parameter.grad is None for parameter in wrapped.bare.parameters())


def test_a_pass_that_does_not_count_is_left_out(group_of_one: dist.HashStore) -> None:
    """Five samples for two ranks: the second has samples 1 and 3, and repeats one while the first has its third."""
    task, points = Squares(), Points()
    wrapped = wrapped_model(task)
    second = Identity(1, 2, 1, 2, "here", launched=True)
    evaluator = Evaluator(context_with(task, samples=5, micro_batch=1, identity=second), wrapped, SampleReader(points))
    outputs = [task.loss(wrapped.bare, points.batch(index, index + 1)) for index in (1, 3)]
    expected = sum(output.loss_sum.item() for output in outputs) / sum(output.weight.item() for output in outputs)
    assert (found := evaluator.run(1)) is not None
    assert found.loss == pytest.approx(expected)


def test_there_may_be_fewer_samples_than_asked_for(group_of_one: dist.HashStore) -> None:
    task = Squares()
    evaluator = Evaluator(context_with(task, samples=256, micro_batch=2), wrapped_model(task), SampleReader(Points(5)))
    assert evaluator.num_samples == 5
    assert (found := evaluator.run(1)) is not None
    assert found.loss > 0


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_it_can_be_broken_off_between_any_two_portions(group_of_one: dist.HashStore, kind: str) -> None:
    task = Squares()
    wrapped = wrapped_model(task, kind=kind)
    evaluator = Evaluator(context_with(task, samples=8, micro_batch=2), wrapped, SampleReader(Points()))
    for before in range(4):
        answers = iter([*[False] * before, True])
        assert evaluator.run(1, leave=lambda: next(answers)) is None  # noqa: B023
        assert wrapped.module.training
    assert evaluator.run(1) is not None


def sample_of(seed: int) -> str:
    return f"learnt with seed {seed}"


class Telling(Squares):
    """A task that shows a sample, or fails at it."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__()
        self._error = error

    def show_sample(self, model: nn.Module, *, device: torch.device, seed: int) -> str:
        if self._error is not None:
            raise self._error
        return sample_of(seed)


def test_what_the_task_shows_is_said() -> None:
    assert shown(Telling()) == [sample_of(7)]


def test_a_task_without_a_sample_says_nothing() -> None:
    assert shown(Squares()) == []


@pytest.mark.parametrize("error", [IndexError("no such token"), OSError("no tokenizer")])
def test_a_sample_that_fails_does_not_end_a_run_that_is_complete(error: Exception) -> None:
    (text,) = shown(Telling(error))
    assert text.endswith(f"{type(error).__name__}: {error}")


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_metrics_are_means_over_the_held_out_samples(group_of_one: dist.HashStore, kind: str) -> None:
    class Counting(Squares):
        def loss(self, model: nn.Module, batch: Batch) -> LossOutput:
            output = super().loss(model, batch)
            return LossOutput(output.loss_sum, output.weight, {"y": (batch["y"].sum(), torch.tensor(len(batch["y"])))})

    task, points = Counting(), Points()
    evaluator = Evaluator(context_with(task, samples=10, micro_batch=3), wrapped_model(task, kind=kind), SampleReader(points))
    found = evaluator.run(1)
    assert found is not None
    assert found.metrics == pytest.approx({"y": points.y[:10].mean().item()})
