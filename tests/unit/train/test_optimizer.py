import torch
from torch import nn

from elastictrain.config.composed import OptimGroup
from elastictrain.train.optimizer import forget_steps, make_optimizer, optimizer_tensors

OPTIONS = OptimGroup(lr=0.3, weight_decay=0.7, beta1=0.8, beta2=0.85, eps=1e-6)


def model() -> nn.Module:
    net = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Conv1d(4, 2, 1), nn.Linear(5, 6))
    net[0].weight.requires_grad_(False)
    return net


def test_only_matrices_decay_and_only_what_is_trained_is_there() -> None:
    net = model()
    groups = make_optimizer(net, OPTIONS).param_groups
    assert [group["weight_decay"] for group in groups] == [0.7, 0.0]
    shapes = [[tuple(parameter.shape) for parameter in group["params"]] for group in groups]
    assert shapes == [[(2, 4, 1), (6, 5)], [(4,), (4,), (4,), (2,), (6,)]]


def test_options_arrive() -> None:
    for group in make_optimizer(model(), OPTIONS).param_groups:
        assert (group["betas"], group["eps"], group["lr"], group["fused"]) == ((0.8, 0.85), 1e-6, 0.3, True)


def test_a_model_without_matrices_has_one_group() -> None:
    assert [group["weight_decay"] for group in make_optimizer(nn.LayerNorm(3), OPTIONS).param_groups] == [0.0]


def test_state_is_there_before_the_first_step_and_is_what_the_step_uses() -> None:
    net = model()
    optimizer = make_optimizer(net, OPTIONS)
    before = dict(optimizer_tensors(optimizer, net.named_parameters()))
    assert "exp_avg.0.weight" not in before
    assert set(before) == {
        f"{kind}.{name}"
        for kind in ("step", "exp_avg", "exp_avg_sq")
        for name in ("0.bias", "1.weight", "1.bias", "2.weight", "2.bias", "3.weight", "3.bias")
    }
    assert all(not tensor.any() for tensor in before.values())
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    after = dict(optimizer_tensors(optimizer, net.named_parameters()))
    assert all(after[name] is tensor for name, tensor in before.items())
    assert all(tensor.all() for tensor in after.values())
    forget_steps(optimizer)
    assert all(not tensor.any() for tensor in before.values())
