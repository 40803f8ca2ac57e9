"""Optimizers by `optim._target_` on a device: their state is there, and an update that is left out changes nothing."""

import pytest
import torch

from elastictrain.config.optim import OptimGroup
from elastictrain.train.optimizer import make_optimizers
from elastictrain.train.weight_average import WeightAverage
from tests.unit.train.test_optimizer import OTHERS, matrices

NAMES = ("AdamW", "Adam", "SGD", "Muon", "NAdam")


@pytest.mark.one_device
@pytest.mark.parametrize("name", [None, *NAMES])
def test_state_is_on_the_device_and_an_update_that_is_left_out_changes_nothing(name: str | None) -> None:
    target = {} if name is None else {"_target_": f"torch.optim.{name}", "arguments": OTHERS[name]}
    model = matrices().cuda()
    optimizers = make_optimizers(model, OptimGroup(lr=0.05, **target))
    average = WeightAverage.of(model, decay=0.5)
    state = dict(optimizers.tensors(model.named_parameters()))
    assert state
    assert all(tensor.is_cuda for tensor in state.values())
    for finite in (True, False):
        before = [tensor.clone() for tensor in (*model.parameters(), *state.values(), *average.averages.values())]
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 1.0 if finite else torch.inf)
        good = torch.tensor(finite, device="cuda")
        optimizers.update(rate=0.1, scale=torch.ones((), dtype=torch.float64, device="cuda"), finite=good)
        average.update(finite=good)
        after = (*model.parameters(), *state.values(), *average.averages.values())
        assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True)) != finite
