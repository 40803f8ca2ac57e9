import threading
from collections.abc import Iterator
from typing import Literal

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from elastictrain.config.composed import ParallelGroup, TrainGroup
from elastictrain.distributed import reattach as module
from elastictrain.distributed.group import lone_group
from elastictrain.distributed.reattach import detach, exchange_groups, forget_step, reattach
from elastictrain.distributed.wrapping import MeshShape, Wrapped, Wrapping
from elastictrain.errors import ConfigError
from elastictrain.identity import Identity
from elastictrain.torch_private_groups import forget_groups

Kind = Literal["ddp", "fsdp", "hsdp"]
SHAPES = {"ddp": MeshShape(4, 1), "fsdp": MeshShape(1, 4), "hsdp": MeshShape(2, 2)}


@pytest.fixture(autouse=True)
def no_group_is_left() -> Iterator[None]:
    yield
    forget_groups()


def play(rank: int, world_size: int = 4) -> None:
    lone_group(Identity(rank, world_size, rank, world_size, "here", launched=True), backend="gloo", on_gpu=False)


def wrapping(kind: Kind) -> Wrapping:
    train = TrainGroup(steps=1, global_batch=4, micro_batch=4)
    return Wrapping(SHAPES[kind], ParallelGroup(kind=kind), train, torch.device("cpu"))


def built(kind: Kind, rows: int = 8) -> Wrapped:
    """For rank 0 of four, after a step."""
    play(0)
    model = nn.Sequential(nn.Linear(4, rows), nn.Linear(rows, 4))
    wrapped = wrapping(kind).finish(wrapping(kind).wrap(model, list(model)))
    step(wrapped)
    return wrapped


def step(wrapped: Wrapped) -> None:
    wrapped.module(torch.ones(2, 4)).sum().backward()


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "hsdp"])
def test_a_step_runs_on_the_groups_that_come_next(kind: Kind) -> None:
    wrapped = built(kind)
    for _ in range(2):
        detach(5.0)
        assert not dist.is_initialized()
        forget_step(wrapped.bare)
        assert all(parameter.grad is None for parameter in wrapped.bare.parameters())
        play(0)
        if kind == "ddp":
            break  # reduces over real groups only; tests/process has them
        before, wrapped = wrapped, reattach(wrapping(kind), wrapped)
        assert wrapped.module is before.module
        assert not set(wrapped.groups) & set(before.groups)
        step(wrapped)


@pytest.mark.parametrize(
    ("kind", "rank", "fits"), [("fsdp", 0, True), ("fsdp", 1, False), ("hsdp", 2, True), ("hsdp", 1, False)]
)
def test_shards_of_uneven_size_fit_their_place_only(kind: Kind, rank: int, fits: bool) -> None:
    wrapped = built(kind, rows=5)
    detach(5.0)
    forget_step(wrapped.bare)
    play(rank)
    if fits:
        reattach(wrapping(kind), wrapped)
        return
    with pytest.raises(ValueError, match=r"0\.weight"):
        reattach(wrapping(kind), wrapped)


@pytest.mark.parametrize("rank", range(4))
def test_even_shards_fit_any_place(rank: int) -> None:
    wrapped = built("fsdp")
    detach(5.0)
    forget_step(wrapped.bare)
    play(rank)
    reattach(wrapping("fsdp"), wrapped)
    places = {tuple(parameter.device_mesh.get_coordinate()) for parameter in wrapped.bare.parameters()}  # type: ignore[attr-defined]
    assert places == {(rank,)}


def test_another_world_does_not_fit() -> None:
    wrapped = built("fsdp")
    detach(5.0)
    play(0, world_size=2)
    with pytest.raises(ValueError, match="2 ranks"):
        reattach(wrapping("fsdp"), wrapped)


def test_a_model_that_its_user_has_sharded_gets_the_groups_that_come_next() -> None:
    play(1)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    for part in (*model, model):
        fully_shard(part)
    model(torch.ones(2, 4)).sum().backward()
    meshes = [one.device_mesh for one in model.parameters() if isinstance(one, DTensor)]
    before = meshes[0].get_group()
    detach(5.0)
    forget_step(model)
    play(1)
    exchange_groups([model], fresh=False)
    assert [one.device_mesh for one in model.parameters() if isinstance(one, DTensor)] == meshes
    assert all(one.get_group() is not before for one in meshes)
    model(torch.ones(2, 4)).sum().backward()


@pytest.mark.parametrize("mistake", ["part", "two", "static"])
def test_wrappers_that_cannot_get_other_groups_are_refused(mistake: str) -> None:
    play(0)
    model: nn.Module = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    if mistake == "static":
        model = DistributedDataParallel(model, static_graph=True)
    else:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        for part, name in zip(model.children(), ("a", "a" if mistake == "part" else "b"), strict=True):
            fully_shard(part, mesh=mesh[name])
    with pytest.raises(ConfigError) as caught:
        exchange_groups([model], fresh=True)
    assert [problem.key for problem in caught.value.problems] == ["model"]


class PlayedGroup:
    """Its abort takes until it is released."""

    def __init__(self, *, fails: bool = False) -> None:
        self.begun, self.release, self.fails = threading.Event(), threading.Event(), fails

    def abort(self) -> None:
        self.begun.set()
        assert self.release.wait(20.0)
        if self.fails:
            raise RuntimeError("no")


def play_groups(patch: pytest.MonkeyPatch, *groups: PlayedGroup, backend: str = "gloo") -> None:
    """`detach` finds these, once."""
    left = [[(one, backend) for one in groups]]
    patch.setattr(module, "take_groups", lambda: left.pop() if left else [])
    patch.setattr(module, "_aborts", [])


def test_an_abort_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    group = PlayedGroup()
    play_groups(monkeypatch, group)
    with pytest.raises(TimeoutError):
        detach(0.05)
    with pytest.raises(TimeoutError):
        detach(0.05)
    group.release.set()
    detach(5.0)


def test_an_abort_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    group = PlayedGroup(fails=True)
    group.release.set()
    play_groups(monkeypatch, group)
    for _ in range(2):  # the channel's thread, and the main thread: this process cannot go on
        with pytest.raises(RuntimeError):
            detach(5.0)


def test_all_aborts_begin_before_one_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = PlayedGroup(), PlayedGroup()
    play_groups(monkeypatch, *groups)
    with pytest.raises(TimeoutError):
        detach(0.05)
    assert all(one.begun.is_set() for one in groups)
    for one in groups:
        one.release.set()
    detach(5.0)


@pytest.mark.parametrize("fails", [False, True])
def test_nccl_ends_its_abort_beside_the_next_generation(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    group, next_group = PlayedGroup(fails=fails), PlayedGroup()
    play_groups(monkeypatch, group, backend="nccl")
    for _ in range(2):  # the channel's thread, and the main thread
        detach(5.0)
    assert group.begun.wait(5.0)
    next_group.release.set()
    monkeypatch.setattr(module, "take_groups", lambda left=[next_group]: [(left.pop(), "nccl")] if left else [])
    for _ in range(2):
        with pytest.raises(TimeoutError):
            detach(0.05)
    group.release.set()
    detach(5.0)
