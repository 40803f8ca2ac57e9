"""How much the state of a run takes, and whether that fits, without allocating any of it."""

from dataclasses import replace
from typing import Literal, TypedDict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from elastictrain.config.load import load
from elastictrain.config.optim import OptimGroup
from elastictrain.config.task_signature import build_task
from elastictrain.distributed.wrapping import MeshShape
from elastictrain.errors import EXIT_CONFIG, ConfigError, HostUnfitError
from elastictrain.train.checks import MemorySize, StateSize, judge_fit, measure_state, size_of
from elastictrain.train.optimizer import make_optimizers

GB = 10**9
MODEL = StateSize(parameters=4 * GB, gradients=4 * GB, optimizer=8 * GB, buffers=GB // 10, largest=GB)


class Spread(TypedDict):
    """How ranks share the state, as `judge_fit` takes it."""

    shape: MeshShape
    kind: Literal["ddp", "fsdp", "hsdp"]
    local_world_size: int
    snapshots: int


ALONE = Spread(shape=MeshShape(1, 1), kind="ddp", local_world_size=1, snapshots=0)
SHARDED = Spread(shape=MeshShape(1, 8), kind="fsdp", local_world_size=8, snapshots=0)


def task(*arguments: str) -> object:
    return build_task(load(list(arguments)))


def host(total: float, available: float | None = None) -> MemorySize:
    return MemorySize("this host", int(total * GB), int((total if available is None else available) * GB))


def outcome(spread: Spread, *, device: MemorySize | None, host: MemorySize) -> tuple[bool, bool]:
    """Whether the host is unfit, and whether there is a warning."""
    try:
        return False, bool(judge_fit(MODEL, **spread, device=device, host=host))
    except HostUnfitError:
        return True, False


def test_it_is_what_a_model_and_its_optimizer_really_take() -> None:
    config = load(["recipe=llama_tiny"])
    size = measure_state(build_task(config), config.optim)  # type: ignore[arg-type]
    model = build_task(config).build_model()  # type: ignore[attr-defined]
    optimizer = make_optimizers(model, config.optim)
    moments = [t for name, t in optimizer.tensors(model.named_parameters()) if not name.startswith("step.")]
    assert size == size_of(model)
    assert size is not None
    assert size.parameters == sum(parameter.nbytes for parameter in model.parameters())
    assert size.optimizer == sum(moment.nbytes for moment in moments)
    assert size.largest == max(parameter.nbytes for parameter in model.parameters())
    assert size.buffers > 0


def test_what_is_not_trained_has_neither_gradients_nor_moments() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, dtype=torch.bfloat16))
    model[0].requires_grad_(False)
    assert size_of(model) == StateSize(parameters=120, gradients=40, optimizer=80, buffers=0, largest=64)


@pytest.mark.parametrize(
    ("optim", "of_trained"),
    [
        (OptimGroup(_target_="torch.optim.SGD", arguments={"momentum": 0.9}), 1),
        (OptimGroup(_target_="torch.optim.SGD"), 0),
        (OptimGroup(_target_="torch.optim.AdamW", arguments={"capturable": True}), 2),  # on a device only
    ],
)
@pytest.mark.parametrize("averaged", [False, True])
def test_another_optimizer_takes_what_its_state_takes(optim: OptimGroup, of_trained: int, averaged: bool) -> None:
    class Plain:
        def build_model(self) -> nn.Module:
            return nn.Linear(4, 4)

    size = measure_state(Plain(), optim, averaged=averaged)  # type: ignore[arg-type]
    assert size is not None
    assert (size.gradients, size.optimizer) == (80, 80 * (of_trained + averaged))


def test_a_task_that_needs_real_tensors_has_no_known_size() -> None:
    class Loads:
        def build_model(self) -> nn.Module:
            return nn.Linear(1, int(torch.ones(()).item()))

    assert measure_state(Loads(), OptimGroup()) is None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "arguments",
    [
        ("recipe=llama_tiny", "model.dim=9223372036854775800"),
        ("recipe=llama_tiny", "model.vocab_size=1000000000000000000"),
        ("recipe=digits_ddp", "model.hidden=1000000000000000"),
    ],
)
def test_sizes_beyond_64_bits_are_the_configurations_fault(arguments: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        measure_state(task(*arguments), OptimGroup())  # type: ignore[arg-type]
    assert (caught.value.exit_code, [problem.key for problem in caught.value.problems]) == (EXIT_CONFIG, ["model"])


@pytest.mark.parametrize(
    ("spread", "memory", "problem", "warning"),
    [
        (ALONE, host(100), False, False),
        (ALONE, host(17), False, True),
        (ALONE, host(16), True, False),
        (ALONE, host(100, 16), True, False),
        ({**ALONE, "shape": MeshShape(2, 1), "local_world_size": 2}, host(30), True, False),
        ({**ALONE, "shape": MeshShape(8, 1), "local_world_size": 2}, host(50), False, False),
        (SHARDED, host(30), False, False),
        (SHARDED, host(16), True, False),
        (Spread(shape=MeshShape(4, 4), kind="hsdp", local_world_size=4, snapshots=0), host(30), False, False),
        ({**ALONE, "snapshots": 2}, host(100), False, False),
        ({**ALONE, "snapshots": 2}, host(40), False, True),
    ],
)
def test_on_the_cpu_all_ranks_share_the_hosts_memory(spread: Spread, memory: MemorySize, problem: bool, warning: bool) -> None:
    assert outcome(spread, device=None, host=memory) == (problem, warning)


@pytest.mark.parametrize(
    ("shards", "device", "problem", "warning"),
    [(1, 16, True, False), (1, 20, False, True), (1, 80, False, False), (8, 4, False, False)],
)
def test_each_rank_has_a_gpu_of_its_own(shards: int, device: float, problem: bool, warning: bool) -> None:
    spread = Spread(shape=MeshShape(8 // shards, shards), kind="fsdp", local_world_size=8, snapshots=1)
    assert outcome(spread, device=replace(host(device), name="NVIDIA H200"), host=host(20)) == (problem, warning)
    assert "snapshots" in judge_fit(MODEL, **spread, device=host(1000), host=host(5))


def test_what_fits_no_machine_is_told_apart() -> None:
    vast = replace(MODEL, optimizer=10**18)
    for device in (None, host(80)):
        with pytest.raises(ConfigError):
            judge_fit(vast, **ALONE, device=device, host=host(1000))


sizes = st.integers(0, 10**13)


@given(st.builds(StateSize, sizes, sizes, sizes, sizes, sizes), st.integers(1, 4096))
def test_a_rank_holds_its_share_and_while_it_is_filled_one_parameter_more(size: StateSize, shards: int) -> None:
    size = replace(size, largest=min(size.largest, size.parameters))
    assert size.of_rank(shards=shards) <= size.of_rank(shards=1) + size.largest
    assert size.of_rank(shards=shards) * shards >= size.parameters + size.gradients + size.optimizer
