import pytest
import torch.distributed as dist

from elastictrain.fault.whereabouts import Phase, Whereabouts
from elastictrain.identity import Identity
from elastictrain.train.evaluate import Evaluator
from tests.unit.train.parts import CPU, Points, Squares, wrapped_model

ALONE = Identity(0, 1, 0, 1, 0, "here", launched=False)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize("micro_batch", [1, 3, 10, 64])
def test_the_mean_over_the_first_samples_whatever_the_portions(
    group_of_one: dist.HashStore, kind: str, micro_batch: int
) -> None:
    task, points, whereabouts = Squares(dropout=0.5), Points(), Whereabouts()
    wrapped = wrapped_model(task, kind=kind)
    evaluator = Evaluator(
        task,
        wrapped,
        points,
        num_samples=10,
        micro_batch=micro_batch,
        identity=ALONE,
        device=CPU,
        whereabouts=whereabouts,
    )
    loss = evaluator.run(4)
    reference = wrapped_model(task).bare.eval()
    expected = task.loss(reference, points.batch(0, 10))
    assert loss == pytest.approx((expected.loss_sum / expected.weight).item(), rel=1e-6)
    assert wrapped.module.training
    assert (whereabouts.mark.phase, whereabouts.mark.step) == (Phase.EVAL, 4)
    assert all(parameter.grad is None for parameter in wrapped.bare.parameters())


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
        whereabouts=Whereabouts(),
    )
    assert evaluator.num_samples == 5
    assert evaluator.run(1) > 0
