"""A module whose evaluation was interrupted is set as it is in a new process."""

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from elastictrain.own_loop.module_settings import ModuleSettings
from elastictrain.own_loop.state import own_state


class Counting(nn.Module):
    """Dropout, and a count of passes that is in no checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout, self.frozen = nn.Dropout(0.5), nn.Linear(1, 1).requires_grad_(False)
        self.register_buffer("passes", torch.zeros(1), persistent=False)
        self.register_buffer("saved", torch.zeros(1))

    def forward(self, values: Tensor) -> Tensor:
        self.passes += 1
        return self.dropout(values)

    def evaluate(self) -> None:
        self.eval()
        self.requires_grad_(False)
        self(torch.ones(2))
        raise RuntimeError("Connection closed by peer")


def loss_of(model: nn.Module) -> float:
    torch.manual_seed(5)
    return float(model(torch.arange(64.0)).detach().sum())


def test_an_interrupted_evaluation_leaves_nothing() -> None:
    body = nn.Sequential(Counting(), nn.Linear(64, 1))
    counting = body[0]
    assert isinstance(counting, Counting)
    body[1].eval()
    average = AveragedModel(nn.Linear(2, 2))
    settings = ModuleSettings.record(own_state(body, None, {"average": average, "rate": torch.ones(1)}).modules())
    before, passes = loss_of(body), counting.passes
    counting.saved += 1
    with pytest.raises(RuntimeError, match="closed by peer"):
        counting.evaluate()
    average.eval()
    counting.passes = torch.full((2,), 7.0)
    assert loss_of(body) != before
    settings.restore()
    assert [one.training for one in (counting, counting.dropout, body[1], average, average.module)] == [
        True,
        True,
        False,
        True,
        True,
    ]
    assert [one.requires_grad for one in (*counting.frozen.parameters(), *body[1].parameters())] == [False, False, True, True]
    assert counting.passes is passes
    assert (counting.passes.tolist(), counting.saved.tolist()) == ([0.0], [1.0])
    assert loss_of(body) == before
