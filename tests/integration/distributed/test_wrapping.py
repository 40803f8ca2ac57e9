from collections.abc import Callable
from functools import partial
from typing import Literal

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from elastictrain.config.composed import ParallelGroup, TrainGroup
from elastictrain.distributed.wrapping import (
    MeshShape,
    ParameterGathers,
    Wrapped,
    Wrapping,
    accumulation,
    mesh_shape,
    reshard_parameters,
)

CPU = torch.device("cpu")
TRAIN = TrainGroup(steps=1, global_batch=4, micro_batch=4)
Kind = Literal["ddp", "fsdp", "hsdp"]


class Block(nn.Module):
    """Two products, attention, dropout: what the policies treat differently."""

    def __init__(self) -> None:
        super().__init__()
        self.rise = nn.Linear(8, 24)
        self.announce_failure = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.rise(x).chunk(3, dim=-1)
        attended = nn.functional.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])[:, 0]
        return x + nn.functional.dropout(self.announce_failure(torch.nn.functional.silu(attended)), 0.25)


class CompiledByCounter(Block):
    """A block that a backend without a compiler compiles."""

    def __init__(self) -> None:
        super().__init__()
        from torch._dynamo.testing import CompileCounter

        self.counter = CompileCounter()  # type: ignore[no-untyped-call]

    def compile(self, *args: object, **kwargs: object) -> None:
        super().compile(backend=self.counter)


class Model(nn.Module):
    def __init__(self, block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.layers = nn.ModuleList(block() for _ in range(2))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x
        for layer in self.layers:
            out = layer(out)
        return self.head(out).square().sum()  # type: ignore[no-any-return]


def make(kind: Kind, train: TrainGroup = TRAIN, block: Callable[[], nn.Module] = Block) -> tuple[Model, Wrapped]:
    torch.manual_seed(0)
    model = Model(block)
    shape = mesh_shape(ParallelGroup(kind=kind), world_size=1, local_world_size=1)
    wrapping = Wrapping(shape, ParallelGroup(kind=kind), train, CPU)
    wrapping.wrap(model, list(model.layers))
    return model, wrapping.finish(model)


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, dist.tensor.DTensor) else tensor


def loss_and_gradients(model: Model, wrapped: Wrapped) -> tuple[Tensor, dict[str, Tensor]]:
    x = torch.randn(4, 5, 8, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(2)
    with accumulation(wrapped.module, last=True), wrapped.precision_context():
        loss = wrapped.module(x)
        loss.backward()
    return loss.detach(), {name: full(p.grad) for name, p in model.named_parameters() if p.grad is not None}


PLAIN_NAMES = [name for name, _ in Model().named_parameters()]


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_checkpointing_changes_neither_loss_nor_gradients_nor_names(
    group_of_one: dist.HashStore, kind: Kind, mode: Literal["full", "selective"]
) -> None:
    plain_loss, plain = loss_and_gradients(*make("ddp"))
    train = TrainGroup(steps=1, global_batch=4, micro_batch=4, activation_checkpointing=mode)
    model, wrapped = make(kind, train)
    loss, gradients = loss_and_gradients(model, wrapped)
    assert [name for name, _ in wrapped.bare.named_parameters()] == PLAIN_NAMES
    assert list(wrapped.bare.state_dict()) == list(Model().state_dict())
    assert torch.equal(loss, plain_loss)
    assert set(gradients) == set(PLAIN_NAMES)
    for name, gradient in gradients.items():
        assert torch.equal(gradient, plain[name]), name


@pytest.mark.parametrize(("mode", "products"), [("none", 4), ("selective", 6), ("full", 8)])
def test_checkpointing_recomputes_what_it_says(mode: Literal["none", "selective", "full"], products: int) -> None:
    """Two blocks of two products: `full` does them all again, `selective` every other one."""
    model, wrapped = make("ddp", TrainGroup(steps=1, global_batch=4, micro_batch=4, activation_checkpointing=mode))
    counted = _Products()
    with counted:
        loss = wrapped.module(torch.randn(4, 5, 8))
        forward = counted.count
        loss.backward()
    plain, plain_wrapped = make("ddp")
    again = _Products()
    with again:
        loss = plain_wrapped.module(torch.randn(4, 5, 8))
        before = again.count
        loss.backward()
    assert forward == before
    assert counted.count - again.count == products - 4
    assert model.layers[0].training == plain.layers[0].training


class _Products(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts matrix products with a bias: forward passes only have these."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count += func is torch.ops.aten.addmm.default
        return func(*args, **(kwargs or {}))


# Dynamo looks at .grad of what the second block is given.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_a_checkpointed_block_is_compiled_too(mode: Literal["none", "selective", "full"]) -> None:
    train = TrainGroup(steps=1, global_batch=4, micro_batch=4, compile=True, activation_checkpointing=mode)
    torch._dynamo.reset()
    model, wrapped = make("ddp", train, CompiledByCounter)
    wrapped.module(torch.randn(4, 5, 8))
    assert sum(layer.counter.frame_count for layer in model.layers) > 0  # type: ignore[union-attr, misc]


@pytest.mark.parametrize("kind", ["fsdp", "hsdp"])
def test_sharded_units_are_the_blocks_and_the_rest(group_of_one: dist.HashStore, kind: Kind) -> None:
    from torch.distributed.fsdp import FSDPModule

    model, wrapped = make(kind)
    assert isinstance(model, FSDPModule)
    assert all(isinstance(layer, FSDPModule) for layer in model.layers)
    assert not isinstance(model.head, FSDPModule)
    assert wrapped.module is wrapped.bare is model
    assert wrapped.shape.world_size == 1


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_accumulated_gradients_are_the_sum(group_of_one: dist.HashStore, kind: Kind) -> None:
    def accumulate(passes: int) -> dict[str, Tensor]:
        model, wrapped = make(kind, TRAIN, partial(nn.Linear, 8, 8))
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(3))
        for index, part in enumerate(x.chunk(passes)):
            with accumulation(wrapped.module, last=index == passes - 1):
                wrapped.module(part).backward()
        return {name: full(p.grad) for name, p in model.named_parameters() if p.grad is not None}

    whole, parts = accumulate(1), accumulate(4)
    for name, gradient in whole.items():
        torch.testing.assert_close(parts[name], gradient)


def test_bf16_is_autocast_under_ddp() -> None:
    _, wrapped = make("ddp", TrainGroup(steps=1, global_batch=4, micro_batch=4, precision="bf16"))
    with wrapped.precision_context():
        assert torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("cpu") == torch.bfloat16
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("kind", ["fsdp", "ddp"])
def test_a_forward_pass_without_a_backward_can_be_tidied_up_after(group_of_one: dist.HashStore, kind: Kind) -> None:
    model, wrapped = make(kind)
    before = dict(model.named_parameters())
    with torch.no_grad():
        wrapped.module(torch.randn(4, 5, 8))
    if kind == "fsdp":
        # What the outermost unit gathers it keeps, for a backward pass that does not come.
        assert not isinstance(model.head.weight, DTensor)
    reshard_parameters(wrapped.module)
    after = dict(model.named_parameters())
    assert list(after) == list(before)
    # Not compared by ==, and without a traceback that shows them: gathered parameters have lost their memory by now.
    assert [name for name in after if after[name] is not before[name]] == []


def test_the_groups_of_a_sharded_model_are_known_and_others_have_the_default_one(group_of_one: dist.HashStore) -> None:
    assert make("ddp")[1].groups == ()
    model, wrapped = make("fsdp")
    (group,) = wrapped.groups
    assert isinstance(model.head.weight, DTensor)
    assert group == model.head.weight.device_mesh.get_group()


class Backwards(nn.Module):
    """Gradients become ready in the order in which parameters are declared: the opposite of what DDP expects."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in reversed(self.layers):
            x = layer(x)
        return x.square().sum()


def test_buckets_of_ddp_are_laid_out_before_the_first_step(group_of_one: dist.HashStore) -> None:
    """If they followed the first backward pass, the first step after a restart would be summed in another order."""
    torch.manual_seed(0)
    model, plain = Backwards(), Backwards()
    plain.load_state_dict(model.state_dict())
    # A world that says it has two ranks: alone, there would be no DDP.
    shape = mesh_shape(ParallelGroup(kind="ddp"), world_size=2, local_world_size=2)
    wrapped = Wrapping(shape, ParallelGroup(kind="ddp"), TRAIN, CPU).finish(model)
    assert isinstance(wrapped.module, DistributedDataParallel)
    assert all(parameter.grad is None for parameter in model.parameters())
    x = torch.randn(4, 8)
    for _ in range(3):
        model.zero_grad()
        with accumulation(wrapped.module, last=True):
            wrapped.module(x).backward()
    plain(x).backward()
    for parameter, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert parameter.grad is not None
        assert expected.grad is not None
        torch.testing.assert_close(parameter.grad, expected.grad)
    layout = wrapped.module._get_ddp_logging_data()  # type: ignore[operator]
    assert layout["rebuilt_per_bucket_param_indices"] == "3 2 1 0"


@pytest.mark.parametrize(
    ("kind", "world", "local", "shard", "shape"),
    [
        ("ddp", 4, 2, 0, MeshShape(4, 1)),
        ("fsdp", 4, 2, 0, MeshShape(1, 4)),
        ("hsdp", 16, 8, 0, MeshShape(2, 8)),
        ("hsdp", 8, 8, 0, MeshShape(1, 8)),
        ("hsdp", 8, 8, 4, MeshShape(2, 4)),
        ("hsdp", 12, 8, 0, MeshShape(1, 12)),
        ("hsdp", 2, 2, 4, MeshShape(1, 2)),
        ("ddp", 1, 1, 0, MeshShape(1, 1)),
    ],
)
def test_the_mesh_of_a_world(kind: str, world: int, local: int, shard: int, shape: MeshShape) -> None:
    parallel = ParallelGroup(kind=kind, shard_size=shard)  # type: ignore[arg-type]
    assert mesh_shape(parallel, world_size=world, local_world_size=local) == shape


@given(
    kind=st.sampled_from(["ddp", "fsdp", "hsdp"]),
    world=st.integers(1, 64),
    local=st.integers(1, 8),
    shard=st.integers(0, 8),
)
def test_every_world_has_a_mesh_of_all_its_ranks(kind: str, world: int, local: int, shard: int) -> None:
    parallel = ParallelGroup(kind=kind, shard_size=shard)  # type: ignore[arg-type]
    shape = mesh_shape(parallel, world_size=world, local_world_size=local)
    assert shape.replicas * shape.shards == world


@given(world=st.integers(2, 64))
def test_a_sharded_model_on_hosts_of_one_device_is_really_sharded(world: int) -> None:
    """A shard of one rank would be a copy: the sum of squares over ranks would count what exists once as `replicas` copies."""
    for shard in (0, 1):
        shape = mesh_shape(ParallelGroup(kind="hsdp", shard_size=shard), world_size=world, local_world_size=1)
        assert shape == MeshShape(1, world)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("compiled", [False, True])
def test_the_waits_of_each_sharded_module_are_told_and_nothing_more_is_compiled(
    compiled: bool, group_of_one: dist.HashStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = TrainGroup(steps=1, global_batch=4, micro_batch=4, compile=compiled)

    def run() -> tuple[list[bool], dict[str, int]]:
        torch._dynamo.reset()
        torch._dynamo.utils.counters["frames"].clear()
        model, wrapped = make("fsdp", train, CompiledByCounter)
        marks: list[bool] = []
        wrapped.gathers.mark = marks.append
        loss_and_gradients(model, wrapped)
        return marks, dict(torch._dynamo.utils.counters["frames"])

    marks, frames = run()
    # The model itself, and its two blocks; the backward pass tells nothing.
    assert marks == [True, False] * 3
    monkeypatch.setattr(ParameterGathers, "follow", lambda self, module, *, compiled: None)
    assert run() == ([], frames)
    assert bool(frames) is compiled
