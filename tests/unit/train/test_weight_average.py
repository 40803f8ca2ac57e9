import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

from elastictrain.config.optim import OptimGroup
from elastictrain.train.optimizer import make_optimizers
from elastictrain.train.state import TrainState
from elastictrain.train.step import Stepper
from elastictrain.train.weight_average import WeightAverage
from tests.unit.train.parts import GLOBAL_BATCH, Points, context_of, micro_batches, wrapped_model
from tests.unit.train.test_loop import config
from tests.unit.train.test_step import Poisoned, full

DECAY = 0.75


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_it_follows_the_weights_and_not_a_step_that_is_left_out(group_of_one: dist.HashStore, kind: str) -> None:
    task = Poisoned()
    wrapped = wrapped_model(task, kind=kind)
    average = WeightAverage.of(wrapped.bare, decay=DECAY)
    optimizer = make_optimizers(wrapped.bare, OptimGroup(lr=0.05))
    state = TrainState(wrapped.bare, optimizer, average=average)
    stepper = Stepper(context_of(config=config(steps=1), task=task), wrapped, optimizer, average=average)
    expected = {name: full(one).detach().clone() for name, one in wrapped.bare.named_parameters()}
    for step, poison in ((1, "none"), (2, "gradient"), (3, "none")):
        task.poison = poison
        source = micro_batches(Points(), step, (GLOBAL_BATCH,))
        result = stepper.run(step, source, passes=1, rate=0.05).result()
        assert math.isfinite(result.grad_norm) == (poison == "none")
        for name, parameter in wrapped.bare.named_parameters():
            if poison == "none":
                expected[name] = torch.lerp(expected[name], full(parameter).detach(), 1 - DECAY)
            found = full(state.tensors()[f"ema.{name}"])
            assert torch.equal(found, expected[name])
            assert not torch.equal(found, full(parameter))


def test_it_takes_the_place_of_the_weights_for_a_block_whatever_happens_there() -> None:
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    average = WeightAverage.of(model, decay=DECAY)
    assert set(average.averages) == {"weight"}
    first = model.weight.detach().clone()
    with torch.no_grad():
        model.weight += 1
    with average.in_place():
        assert torch.equal(model.weight, first)
    with pytest.raises(ZeroDivisionError), average.in_place():
        _ = 1 / 0
    assert torch.equal(model.weight, first + 1)
    assert torch.equal(average.averages["weight"], first)
    average.reset()
    assert torch.equal(average.averages["weight"], first + 1)
