"""Whether the state of a run fits into memory: decided from a model on the meta device, before anything is allocated."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from elastictrain.errors import ConfigError, ElasticTrainError, Problem
from elastictrain.train.task import InitializesParameters, Task

_MOST_BYTES = 10**14
"""More than any machine has."""

_TIGHT = 0.8
_MOMENTS = 2


@dataclass(frozen=True, slots=True)
class StateSize:
    """Bytes of a whole model, of the gradients and moments of what is trained, and of its largest parameter."""

    parameters: int
    gradients: int
    optimizer: int
    buffers: int
    largest: int

    def of_rank(self, *, shards: int) -> int:
        """The least that a rank holds when its copy is spread over `shards` ranks. Activations come on top of it."""
        state = self.parameters + self.gradients + self.optimizer
        # First values are made one whole parameter at a time.
        filling = _share(self.parameters, shards) + self.largest if shards > 1 else 0
        return max(_share(state, shards), filling) + self.buffers


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """How the state is spread over ranks."""

    kind: Literal["ddp", "fsdp", "hsdp"]
    shards: int
    local_world_size: int
    world_size: int
    snapshots: int
    """Snapshots in host memory that each rank keeps."""


@dataclass(frozen=True, slots=True)
class MemorySize:
    """Of one GPU, or of this host."""

    name: str
    total_bytes: int
    available_bytes: int


@dataclass(frozen=True, slots=True)
class Fit:
    """A decision: why the state cannot fit, or why it barely does; empty if neither."""

    problem: str = ""
    warning: str = ""
    nowhere: bool = False
    """Whether no other machine would do."""


def measure_state(task: Task) -> StateSize | None:
    """The size of what the task trains; None if its model cannot be built without memory.

    Raises: ConfigError if it cannot be built at all.
    """
    try:
        with torch.device("meta"):
            model = task.build_model()
    except ElasticTrainError:
        raise
    except Exception as error:
        # Sizes beyond 64 bits are refused by torch itself.
        if isinstance(task, InitializesParameters) or "overflow" in str(error):
            first_line = str(error).strip().partition("\n")[0]
            message = f"must describe a model that can be built, but torch says {type(error).__name__}: {first_line}"
            raise ConfigError([Problem("model", message)]) from error
        return None
    return size_of(model)


def size_of(model: nn.Module) -> StateSize:
    """Of a model on any device, under AdamW."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    gradients = sum(parameter.nbytes for parameter in trained)
    return StateSize(
        parameters=sum(parameter.nbytes for parameter in model.parameters()),
        gradients=gradients,
        optimizer=_MOMENTS * gradients,
        buffers=sum(buffer.nbytes for buffer in model.buffers()),
        largest=max((parameter.nbytes for parameter in model.parameters()), default=0),
    )


def judge_fit(size: StateSize, spread: Spread, *, device: MemorySize | None, host: MemorySize) -> Fit:
    """Compare with the memory of this rank's GPU, or with that of the host where all of its ranks train on the CPU."""
    of_rank = size.of_rank(shards=spread.shards)
    ranks = 1 if device is not None else spread.local_world_size
    needed = ranks * of_rank
    memory = device or host
    spreading = f"spread over {spread.shards} ranks" if spread.shards > 1 else "whole on each rank"
    figures = (
        f"parameters {_gb(size.parameters)}, gradients {_gb(size.gradients)}, optimizer {_gb(size.optimizer)}, buffers "
        f"{_gb(size.buffers)}; {spreading} by parallel={spread.kind}; activations not counted"
    )
    what = f"the state of {_count(ranks)} takes {_gb(needed)}"
    if needed > memory.available_bytes:
        has = f"{_gb(memory.available_bytes)} of {_gb(memory.total_bytes)} available"
        remedy = "set model.* to a smaller one, or spread it over more ranks" + (" by parallel=fsdp" * (spread.kind == "ddp"))
        problem = f"{what}, but {memory.name} has {has} ({figures}): {remedy}"
        return Fit(problem=problem, nowhere=needed > _MOST_BYTES)
    if needed > _TIGHT * memory.available_bytes:
        return Fit(
            warning=f"memory is tight: {what}, and {memory.name} has {_gb(memory.available_bytes)} available ({figures})"
        )
    snapshots = spread.snapshots * _share((size.parameters + size.optimizer) * spread.local_world_size, spread.world_size)
    if snapshots + (0 if device is not None else needed) > host.total_bytes:
        kept = f"{spread.snapshots} snapshots in host memory take {_gb(snapshots)}"
        beside = "" if device is not None else f" and {what}"
        return Fit(warning=f"memory is tight: {kept}{beside}, but {host.name} has {_gb(host.total_bytes)}")
    return Fit()


def _share(num_bytes: int, parts: int) -> int:
    return -(-num_bytes // parts)


def _count(ranks: int) -> str:
    return f"{ranks} rank{'s' if ranks > 1 else ''}"


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:,.2f} GB"
