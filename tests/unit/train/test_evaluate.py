import pytest
import torch.distributed as dist

from elastictrain.identity import Identity
from elastictrain.liveness.progress import Phase, ProgressTracker
from elastictrain.train.evaluate import Evaluator
from tests.unit.train.parts import CPU, Points, Squares, wrapped_model

ALONE = Identity(0, 1, 0, 1, "here", launched=False)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize("micro_batch", [1, 3, 10, 64])
def test_the_mean_over_the_first_samples_whatever_the_portions(
    group_of_one: dist.HashStore, kind: str, micro_batch: int
) -> None:
    task, points, tracker = Squares(dropout=0.5), Points(), ProgressTracker()
    wrapped = wrapped_model(task, kind=kind)
    evaluator = Evaluator(
        task,
        wrapped,
        points,
        num_samples=10,
        micro_batch=micro_batch,
        identity=ALONE,
        device=CPU,
        tracker=tracker,
    )
    loss = evaluator.run(4)
    reference = wrapped_model(task).bare.eval()
    expected = task.loss(reference, points.batch(0, 10))
    assert loss == pytest.approx((expected.loss_sum / expected.weight).item(), rel=1e-6)
    assert wrapped.module.training
    assert (tracker.mark.phase, tracker.mark.step) == (Phase.EVAL, 4)
    assert all(parameter.grad is None for parameter in wrapped.bare.parameters())


def test_a_pass_that_does_not_count_is_left_out(group_of_one: dist.HashStore) -> None:
    """Five samples for two ranks: the second has samples 1 and 3, and repeats one while the first has its third."""
    task, points = Squares(), Points()
    wrapped = wrapped_model(task)
    second = Identity(1, 2, 1, 2, "here", launched=True)
    evaluator = Evaluator(
        task, wrapped, points, num_samples=5, micro_batch=1, identity=second, device=CPU, tracker=ProgressTracker()
    )
    outputs = [task.loss(wrapped.bare, points.batch(index, index + 1)) for index in (1, 3)]
    expected = sum(output.loss_sum.item() for output in outputs) / sum(output.weight.item() for output in outputs)
    assert evaluator.run(1) == pytest.approx(expected)


def test_there_may_be_fewer_samples_than_asked_for(group_of_one: dist.HashStore) -> None:
    task = Squares()
    evaluator = Evaluator(
        task,
        wrapped_model(task),
        Points(5),
        num_samples=256,
        micro_batch=2,
        identity=ALONE,
        device=CPU,
        tracker=ProgressTracker(),
    )
    assert evaluator.num_samples == 5
    assert evaluator.run(1) > 0


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_it_can_be_broken_off_between_any_two_portions(group_of_one: dist.HashStore, kind: str) -> None:
    task = Squares()
    wrapped, tracker = wrapped_model(task, kind=kind), ProgressTracker()
    evaluator = Evaluator(task, wrapped, Points(), num_samples=8, micro_batch=2, identity=ALONE, device=CPU, tracker=tracker)
    for before in range(4):
        answers = iter([*[False] * before, True])
        assert evaluator.run(1, leave=lambda: next(answers)) is None  # noqa: B023
        assert wrapped.module.training
    assert evaluator.run(1) is not None
