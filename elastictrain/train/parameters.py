"""Seeds, and the first values of a model: one tensor at a time, the same on any world and in any wrapping."""

import random

import numpy
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from elastictrain.config.user_code import refuse
from elastictrain.data.samples import derive_seed
from elastictrain.distributed.float8 import suits
from elastictrain.errors import ConfigError, Problem
from elastictrain.train.task import ChoosesFloat8Layers, HasBlocks, InitializesParameters, Task


def seed_everything(seed: int) -> None:
    """Seed torch (CPU and CUDA), Python and NumPy, for all random numbers of the task."""
    # Not `torch.manual_seed`: for each kind of device that is not in use it notes its caller's stack, a millisecond in all.
    torch.default_generator.manual_seed(seed)
    if torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(seed)
    random.seed(seed)
    numpy.random.seed(seed & 0xFFFFFFFF)  # NumPy's global generator, which a task may use


def build_model(task: Task, *, seed: int, device: torch.device) -> nn.Module:
    """The task's model: on the meta device if the task fills parameters itself, else initialised and on `device`."""
    seed_everything(derive_seed(seed, "model"))
    if isinstance(task, InitializesParameters):
        with torch.device("meta"):
            return task.build_model()
    return task.build_model().to(device)


def float8_layers(task: Task, model: nn.Module) -> list[nn.Module]:
    """The layers that multiply in 8 bits: those that the task chooses, or else all linear layers of its blocks that can.
    Raises: ConfigError if there is none; TaskError if one cannot."""
    if isinstance(task, ChoosesFloat8Layers):
        chosen: list[nn.Module] = list(task.float8_layers(model))
        if unsuited := [one for one in chosen if not suits(one)]:
            must = "return layers of the class torch.nn.Linear with sizes that are multiples of 16"
            raise refuse(task, "float8_layers", must, f"returned {unsuited[0]}")
    else:
        blocks = task.blocks(model) if isinstance(task, HasBlocks) else ()
        chosen = [layer for block in blocks for layer in block.modules() if suits(layer)]
    if not chosen:
        message = (
            "must be bf16 or fp32 for a task without `float8_layers`, whose `blocks` have no linear layer with sizes that are "
            "multiples of 16, but is fp8"
        )
        raise ConfigError([Problem("train.precision", message)])
    return chosen


def fill(model: nn.Module, task: Task, *, seed: int, device: torch.device) -> None:
    """Allocate a model from the meta device and fill it with its first values. Each parameter is made whole once, on `device`,
    from a generator seeded by its name; a rank keeps its shard of it. So the values do not depend on world size, sharding or
    order, and only one whole parameter exists at a time."""
    if not isinstance(task, InitializesParameters):
        return
    allocate(model, device=device)
    _initialize(model, task, seed=seed, device=device)


def allocate(model: nn.Module, *, device: torch.device) -> None:
    """Give a model from the meta device memory, of any content."""
    shared: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        shared.setdefault(id(parameter), []).append(name)
    model.to_empty(device=device)
    for first, *others in shared.values():
        # to_empty gives each name of a shared parameter memory of its own.
        for other in others:
            owner, _, attribute = other.rpartition(".")
            setattr(model.get_submodule(owner), attribute, model.get_parameter(first))


@torch.no_grad()
def fill_again(model: nn.Module, task: Task, *, seed: int, device: torch.device) -> None:
    """Reset a model, wrapped or not, to its first values."""
    if isinstance(task, InitializesParameters):
        _initialize(model, task, seed=seed, device=device)
        return
    # Not on the device: it holds all the rest of the state by now.
    first = build_model(task, seed=seed, device=torch.device("cpu"))
    # Wrapping may rename parts, but keeps their order.
    for parameter, first_value in zip(model.parameters(), first.parameters(), strict=True):
        keep_shard(parameter, first_value)
    for buffer, first_buffer in zip(model.buffers(), first.buffers(), strict=True):
        buffer.copy_(first_buffer)


@torch.no_grad()
def _initialize(model: nn.Module, task: InitializesParameters, *, seed: int, device: torch.device) -> None:
    for name, parameter in model.named_parameters():
        generator = torch.Generator(device).manual_seed(derive_seed(seed, "parameter", name))
        if isinstance(parameter, DTensor):
            whole = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
            task.init_parameter(name, whole, generator)
            keep_shard(parameter, whole)
        else:
            task.init_parameter(name, parameter, generator)
    for name, buffer in model.named_buffers():
        task.init_buffer(name, buffer)


def keep_shard(parameter: Tensor, whole: Tensor) -> None:
    """Copy this rank's shard. Every rank has made the same values, so nothing is sent."""
    if isinstance(parameter, DTensor):
        whole = distribute_tensor(whole.detach(), parameter.device_mesh, parameter.placements, src_data_rank=None)
    local(parameter).copy_(local(whole))


def saved_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The live parameters of a model, and the buffers that a state_dict has, by name."""
    persistent = model.state_dict().keys()
    return dict(model.named_parameters()) | {name: one for name, one in model.named_buffers() if name in persistent}


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
