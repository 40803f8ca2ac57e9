from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from elastictrain.config.optim import OptimGroup
from elastictrain.errors import ConfigError
from elastictrain.train.optimizer import make_optimizers
from tests.unit.train.parts import Squares, wrapped_model

OPTIONS = OptimGroup(lr=0.3, weight_decay=0.7, beta1=0.8, beta2=0.85, eps=1e-6)


def model() -> nn.Module:
    net = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Conv1d(4, 2, 1), nn.Linear(5, 6))
    net[0].weight.requires_grad_(False)
    return net


def test_only_matrices_decay_and_only_what_is_trained_is_there() -> None:
    net = model()
    groups = make_optimizers(net, OPTIONS).param_groups
    assert [group["weight_decay"] for group in groups] == [0.7, 0.0]
    shapes = [[tuple(parameter.shape) for parameter in group["params"]] for group in groups]
    assert shapes == [[(2, 4, 1), (6, 5)], [(4,), (4,), (4,), (2,), (6,)]]


def test_options_arrive() -> None:
    for group in make_optimizers(model(), OPTIONS).param_groups:
        assert (group["betas"], group["eps"], group["lr"], group["fused"]) == ((0.8, 0.85), 1e-6, 0.3, True)


def test_a_model_without_matrices_has_one_group() -> None:
    assert [group["weight_decay"] for group in make_optimizers(nn.LayerNorm(3), OPTIONS).param_groups] == [0.0]


def test_state_is_there_before_the_first_step_and_is_what_the_step_uses() -> None:
    net = model()
    optimizer = make_optimizers(net, OPTIONS)
    before = dict(optimizer.tensors(net.named_parameters()))
    assert "exp_avg.0.weight" not in before
    assert set(before) == {
        f"{kind}.{name}"
        for kind in ("step", "exp_avg", "exp_avg_sq")
        for name in ("0.bias", "1.weight", "1.bias", "2.weight", "2.bias", "3.weight", "3.bias")
    }
    assert all(not tensor.any() for tensor in before.values())
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    optimizer.update(rate=0.1, scale=torch.ones(()), finite=torch.tensor(True))
    after = dict(optimizer.tensors(net.named_parameters()))
    assert all(after[name] is tensor for name, tensor in before.items())
    assert all(tensor.all() for tensor in after.values())
    optimizer.reset()
    assert all(not tensor.any() for tensor in before.values())


OTHERS = {
    "SGD": {"momentum": 0.9, "weight_decay": 0.1},
    "Muon": {},
    "Adam": {},
    "AdamW": {"fused": True},
    "Adagrad": {"initial_accumulator_value": 0.5},
    "NAdam": {},
    "RAdam": {},
    "RMSprop": {"momentum": 0.5, "centered": True},
    "Rprop": {},
    "Adafactor": {},
    "Adadelta": {},
    "Adamax": {},
    "ASGD": {},
}


def matrices() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 5, bias=False), nn.Linear(5, 2, bias=False))


@pytest.mark.parametrize("name", OTHERS)
def test_any_optimizer_of_torch_does_bit_for_bit_what_it_does_alone_and_again_after_a_reset(name: str) -> None:
    """Though its state is made before the first step."""
    options = OptimGroup(lr=0.05, _target_=f"torch.optim.{name}", arguments=OTHERS[name])
    plain, ours = matrices(), matrices()
    alone = getattr(torch.optim, name)(plain.parameters(), lr=0.05, **OTHERS[name])
    optimizers = make_optimizers(ours, options)
    handles = dict(optimizers.tensors(ours.named_parameters()))
    assert handles
    for turn in range(2):
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            for one, other in zip(plain.parameters(), ours.parameters(), strict=True):
                one.grad = torch.randn(one.shape, generator=generator)
                other.grad = one.grad.clone()
            if turn == 0:
                alone.step()
            optimizers.update(rate=0.05, scale=torch.ones(()), finite=torch.tensor(True))
        for one, other in zip(plain.parameters(), ours.parameters(), strict=True):
            assert torch.equal(one, other)
        after = dict(optimizers.tensors(ours.named_parameters()))
        assert {key: id(tensor) for key, tensor in after.items()} == {key: id(tensor) for key, tensor in handles.items()}
        optimizers.reset()
        ours.load_state_dict(matrices().state_dict())


@pytest.mark.parametrize("name", ["SGD", "Muon", "AdamW"])
def test_an_update_that_is_left_out_changes_nothing(name: str) -> None:
    net = matrices()
    optimizers = make_optimizers(net, OptimGroup(_target_=f"torch.optim.{name}", arguments=OTHERS[name]))
    for finite in (True, False):
        before = [tensor.clone() for tensor in (*net.parameters(), *dict(optimizers.tensors(net.named_parameters())).values())]
        for parameter in net.parameters():
            parameter.grad = torch.full_like(parameter, 1.0 if finite else torch.inf)
        optimizers.update(rate=0.1, scale=torch.ones(()), finite=torch.tensor(finite))
        after = [*net.parameters(), *dict(optimizers.tensors(net.named_parameters())).values()]
        assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True)) != finite
        assert all(parameter.grad is None for parameter in net.parameters())


class InGroups(torch.optim.SGD):
    """Counts its steps where no checkpoint finds it."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        self.param_groups[0]["count"] = self.param_groups[0].get("count", 0) + 1


class InObjects(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["count"] = 1


def none_at_all(groups: object, lr: float) -> list[object]:
    return []


def only_the_first(groups: list[dict[str, Any]], lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups[0]["params"][:1], lr=lr)


HERE = "tests.unit.train.test_optimizer"


@pytest.mark.parametrize("target", ["torch.optim.LBFGS", "torch.optim.SparseAdam", f"{HERE}.InGroups", f"{HERE}.InObjects"])
def test_an_optimizer_whose_state_no_checkpoint_holds_is_refused(target: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_optimizers(matrices(), OptimGroup(_target_=target))
    assert [problem.key for problem in caught.value.problems] == ["optim._target_"]


def test_what_refuses_the_model_names_the_arguments() -> None:
    with pytest.raises(ConfigError) as caught:
        make_optimizers(model(), OptimGroup(_target_="torch.optim.Muon"))
    assert [problem.key for problem in caught.value.problems] == ["optim.arguments"]
    with pytest.raises(ConfigError, match=r"optim\._target_"):
        make_optimizers(model(), OptimGroup(_target_=f"{HERE}.none_at_all"))
    with pytest.raises(ConfigError, match=r"only_the_first .* 1\.weight"):
        make_optimizers(matrices(), OptimGroup(_target_=f"{HERE}.only_the_first"))


def test_a_model_of_which_nothing_is_trained_is_refused() -> None:
    with pytest.raises(ConfigError, match="requires_grad"):
        make_optimizers(matrices().requires_grad_(False), OPTIONS)


class Grouping(Squares):
    """A task that groups parameters as it is told."""

    def __init__(self, groups: Callable[[nn.Module], Any]) -> None:
        super().__init__()
        self.parameter_groups = groups


def test_groups_of_the_task_have_their_own_options_and_follow_the_schedule() -> None:
    net = matrices()
    task = Grouping(
        lambda model: [{"params": [model[0].weight], "lr": 0.03}, {"params": model[1].parameters(), "weight_decay": 0}]
    )
    optimizers = make_optimizers(net, OPTIONS, task)
    assert [group["weight_decay"] for group in optimizers.param_groups] == [0.7, 0]
    optimizers.update(rate=0.1, scale=torch.ones(()), finite=torch.tensor(True))
    assert [group["lr"] for group in optimizers.param_groups] == pytest.approx([0.01, 0.1])


@pytest.mark.parametrize(
    ("groups", "named"),
    [
        (lambda model: [{"params": [model[0].weight]}], "1.weight"),
        (lambda model: [{"params": model.parameters()}, {"params": [model[0].weight]}], "0.weight"),
        (lambda model: [{"params": [*model.parameters(), nn.Parameter(torch.ones(2))]}], "1 others"),
        (lambda model: [{"parameters": model.parameters()}], "params"),
        (lambda model: None, "NoneType"),
    ],
)
def test_groups_that_are_not_a_partition_are_refused(groups: Callable[[nn.Module], Any], named: str) -> None:
    with pytest.raises(ConfigError, match=f"Grouping.parameter_groups .*{named}"):
        make_optimizers(matrices(), OPTIONS, Grouping(groups))


class Matrices(Squares):
    def build_model(self) -> nn.Module:
        return matrices()


@pytest.mark.parametrize("name", ["SGD", "AdamW", "Muon"])
def test_the_state_of_a_sharded_model_is_sharded_alike(group_of_one: dist.HashStore, name: str) -> None:
    bare = wrapped_model(Matrices(), kind="fsdp").bare
    state = dict(
        make_optimizers(bare, OptimGroup(_target_=f"torch.optim.{name}", arguments=OTHERS[name])).tensors(
            bare.named_parameters()
        )
    )
    assert all(isinstance(tensor, DTensor) for kind, tensor in state.items() if not kind.startswith("step."))
    with pytest.raises(ConfigError, match="sharded"):
        make_optimizers(bare, OptimGroup(_target_="torch.optim.Adafactor"))
