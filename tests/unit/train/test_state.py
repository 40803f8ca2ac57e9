import math

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from elastictrain.checkpoint.manifest import StateCounters, counters_of
from elastictrain.config.optim import OptimGroup
from elastictrain.data.samples import SampleReader
from elastictrain.train.evaluate import Evaluator
from elastictrain.train.optimizer import make_optimizers
from elastictrain.train.state import TrainState, count_step
from tests.unit.train.parts import Points, Squares, wrapped_model
from tests.unit.train.test_evaluate import context_with


class Tied(nn.Module):
    """A parameter with two names, one that is not trained, a buffer to keep and one not to."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.register_buffer("table", torch.ones(3), persistent=False)


def state_of(model: nn.Module) -> TrainState:
    return TrainState(model, make_optimizers(model, OptimGroup()))


def test_names_are_those_of_the_model_and_its_optimizer() -> None:
    names = set(state_of(Tied()).tensors())
    trained = {"embed.weight", "norm.weight", "norm.bias"}
    kept = trained | {"frozen", "norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    assert {name for name in names if name.startswith("model.")} == {f"model.{name}" for name in kept}
    assert names - {f"model.{name}" for name in kept} == {
        f"optim.{kind}.{name}" for kind in ("step", "exp_avg", "exp_avg_sq") for name in trained
    }


def test_handles_are_live() -> None:
    model = Tied()
    state = state_of(model)
    with torch.no_grad():
        for tensor in state.tensors().values():
            tensor.fill_(3)
    assert torch.equal(model.head.weight, torch.full((5, 4), 3.0))
    assert torch.equal(model.norm.running_mean, torch.full((4,), 3.0))
    assert {value.unique().item() for _, value in state.optimizer.tensors(model.named_parameters())} == {3.0}


def test_a_fresh_state_has_all_its_tensors_before_the_first_step() -> None:
    tensors = state_of(Tied()).tensors()
    assert all(not tensor.any() for name, tensor in tensors.items() if name.startswith("optim."))


def test_handles_stay_those_of_the_shards_after_an_evaluation(group_of_one: dist.HashStore) -> None:
    """A forward pass without a backward leaves the outermost unit gathered, and its module with other parameters."""
    task, points = Squares(), Points()
    wrapped = wrapped_model(task, kind="fsdp")
    state = state_of(wrapped.bare)
    before = state.tensors()
    evaluator = Evaluator(context_with(task, samples=4, micro_batch=2), wrapped, SampleReader(points))
    evaluator.run(1)
    try:
        after = state.tensors()
    except KeyError:
        # Without a traceback: pytest would print gathered parameters whose memory is gone by then, and die of it.
        pytest.fail("the optimizer does not know the gathered parameters", pytrace=False)
    assert list(after) == list(before)
    assert [name for name in after if after[name] is not before[name]] == []
    assert all(isinstance(tensor, DTensor) for name, tensor in after.items() if "optim.step." not in name)


def test_counters_survive_a_manifest() -> None:
    state = state_of(nn.Linear(2, 2))
    state.step, state.counters = 7, StateCounters(6, 1, 3, data_digest="d")
    scalars = state.scalars(state.step, global_batch=16)
    assert scalars["positions"] == 7 * 16
    restored = state_of(nn.Linear(2, 2))
    restored.counters = StateCounters(0, data_digest="e")
    restored.adopt(counters_of(scalars, step=7))
    assert (restored.step, restored.counters) == (7, StateCounters(7, 1, 3, 7 * 16, "e"))


def test_tensors_of_a_checkpoint_are_plain_data() -> None:
    kinds: set[type[Tensor]] = {type(tensor) for tensor in state_of(nn.Linear(2, 2)).tensors().values()}
    assert kinds == {nn.Parameter, Tensor}


BAD = [(math.nan, 1.0), (1.0, math.nan), (math.inf, 1.0), (1.0, math.inf), (-math.inf, 1.0)]


@pytest.mark.parametrize(("loss", "grad_norm"), BAD)
def test_what_is_not_finite_is_counted(loss: float, grad_norm: float) -> None:
    counts = count_step(StateCounters(0, 1, 4), loss=loss, grad_norm=grad_norm)
    assert counts == StateCounters(0, 2, 5)


def test_a_finite_step_ends_the_row_and_keeps_the_total() -> None:
    assert count_step(StateCounters(0, 3, 5), loss=1.0, grad_norm=0.0) == StateCounters(0, 0, 5)


@given(st.lists(st.booleans(), max_size=40))
def test_counts_are_those_of_the_history(finite: list[bool]) -> None:
    counts = StateCounters(0)
    for good in finite:
        counts = count_step(counts, loss=1.0 if good else math.nan, grad_norm=1.0)
    row = next((number for number, good in enumerate(reversed(finite)) if good), len(finite))
    assert counts == StateCounters(0, row, finite.count(False))
