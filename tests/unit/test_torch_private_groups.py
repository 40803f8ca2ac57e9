from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from elastictrain.errors import HostUnfitError, TransportError
from elastictrain.torch_private_groups import (
    REGISTRY,
    clear_fsdp,
    forget_groups,
    fsdp_changes,
    init_fake_group,
    make_gloo_groups_by,
    move_ddp,
    move_fsdp,
    refuse_fsdp,
    take_groups,
)


@pytest.fixture(autouse=True)
def no_group_is_left() -> Iterator[None]:
    yield
    forget_groups()


def sharded(shape: tuple[int, ...] = (2,)) -> nn.Module:
    """On a fake group, as rank 0 of all ranks of the mesh; after one step."""
    world_size = int(torch.tensor(shape).prod())
    init_fake_group(rank=0, world_size=world_size)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data",) if len(shape) == 1 else ("replica", "shard"))
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model(torch.ones(2, 4)).sum().backward()
    return model


@pytest.mark.parametrize("shape", [(2,), (2, 2)])
def test_the_installed_fsdp_has_all_that_is_cleared_and_moved(shape: tuple[int, ...]) -> None:
    assert fsdp_changes(sharded(shape)) == ()


def states(model: nn.Module) -> list[Any]:
    return [module._get_fsdp_state() for module in model.modules() if isinstance(module, FSDPModule)]


@pytest.mark.parametrize("gone", ["_all_gather_result", "_post_forward_indices", "mesh_info"])
def test_without_an_attribute_of_fsdp_the_host_is_unfit(gone: str) -> None:
    model = sharded()
    delattr(states(model)[1]._fsdp_param_group, gone)
    with pytest.raises(HostUnfitError, match=gone):
        clear_fsdp(model)


@pytest.mark.parametrize("act", [take_groups, forget_groups])
def test_without_a_registry_the_host_is_unfit(act: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.delattr(dist.distributed_c10d, REGISTRY[0].name)
        with pytest.raises(HostUnfitError, match=REGISTRY[0].name):
            act()


class InterruptedStepError(Exception):
    pass


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_step_that_was_cut_short_leaves_nothing(where: str) -> None:
    model, x = sharded(), torch.ones(2, 4)
    usual = vars(states(model)[0]._state_ctx) | {"all_states": None}

    def interrupt(*_: object) -> None:
        raise InterruptedStepError

    if where == "forward":
        handle = model[1].register_forward_hook(interrupt)
    else:
        handle = model[0].weight.register_hook(interrupt)  # the root has gathered, the last layer is done
        model[0].register_full_backward_pre_hook(interrupt)
    with pytest.raises(InterruptedStepError):
        model(x).sum().backward()
    handle.remove()
    if where == "backward":
        model[0]._backward_pre_hooks.clear()
    assert any(parameter.grad is not None for parameter in model.parameters()) or where == "forward"
    clear_fsdp(model)
    for parameter in model.parameters():
        parameter.grad = None
    assert vars(states(model)[0]._state_ctx) | {"all_states": None} == usual
    assert all(group.is_sharded for state in states(model) if (group := state._fsdp_param_group) is not None)
    model(x).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_fsdp_begins_no_collective_between_refusal_and_clearing(where: str) -> None:
    model, x = sharded(), torch.ones(2, 4)
    loss = model(x).sum()
    for _ in range(2):
        refuse_fsdp(model)
    with pytest.raises(TransportError):
        loss.backward() if where == "backward" else model(x)
    clear_fsdp(model)
    for parameter in model.parameters():
        parameter.grad = None
    model(x).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_fsdp_moves_to_the_groups_of_another_mesh() -> None:
    model = sharded()
    old = {id(parameter.device_mesh) for parameter in model.parameters()}  # type: ignore[attr-defined]
    before = states(model)[1]._fsdp_param_group.mesh_info.shard_process_group
    take_groups()
    init_fake_group(rank=1, world_size=2)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("data",))
    move_fsdp(model, mesh)
    infos = [state._fsdp_param_group.mesh_info for state in states(model) if state._fsdp_param_group is not None]
    assert all(info.shard_process_group is mesh.get_group() for info in infos)
    assert all(info.shard_process_group is not before for info in infos)
    assert {info.shard_mesh_rank for info in infos} == {1}
    # The same object, in the parameters, the optimizer's state and wherever else.
    assert {id(parameter.device_mesh) for parameter in model.parameters()} == old  # type: ignore[attr-defined]


def test_ddp_moves_to_another_group() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    ddp = DistributedDataParallel(nn.Linear(2, 2))
    ddp(torch.ones(1, 2)).sum().backward()
    take_groups()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    move_ddp(ddp, dist.group.WORLD)
    assert ddp.process_group is dist.group.WORLD
    ddp(torch.ones(1, 2)).sum().backward()


def test_groups_of_gloo_are_made_by_who_wants_to() -> None:
    made: list[object] = []

    def make(construct: Callable[[], object]) -> object:
        made.append(construct())
        return made[-1]

    try:
        for _ in range(2):
            make_gloo_groups_by(make)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        group = dist.new_group(backend="gloo")
        assert len(made) == 2
        assert all(isinstance(one, dist.ProcessGroupGloo) for one in made)
        # What torch asks of its own name for the class.
        assert isinstance(made[0], dist.distributed_c10d.ProcessGroupGloo)
        assert dist.distributed_c10d.ProcessGroupGloo.create_device is not None
        dist.all_reduce(torch.ones(2), group=group)
        dist.destroy_process_group()
    finally:
        make_gloo_groups_by(None)


def test_names_of_groups_begin_anew() -> None:
    names = []
    for _ in range(3):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        group = dist.new_group(backend="gloo")
        assert group is not None
        names.append((dist.group.WORLD.group_name, group.group_name))  # type: ignore[union-attr]
        assert [(one.group_name, backend) for one, backend in take_groups()] == [(name, "gloo") for name in names[-1][::-1]]
        assert not dist.is_initialized()
    assert len(set(names)) == 1
    assert take_groups() == []
