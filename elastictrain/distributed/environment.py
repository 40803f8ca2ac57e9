"""The environment that torch and NCCL read when a process group is made; decided here, set before the group exists."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from elastictrain.config.fault import FaultGroup
from elastictrain.distributed.gpus import needs_gpu
from elastictrain.errors import ConfigError, HostUnfitError, Problem

Backend = Literal["nccl", "gloo"]


@dataclass(frozen=True, slots=True)
class Variable:
    """One environment variable, and why it has this value."""

    name: str
    value: str
    reason: str


def choose_backend(
    wanted: Literal["auto", "nccl", "gloo"], *, usable_gpus: int, local_world_size: int, why_none: str
) -> Backend:
    """The collective library. `why_none`: why no GPU is usable.

    Raises: HostUnfitError without the GPUs that nccl needs; ConfigError for more ranks than GPUs.
    """
    if wanted == "gloo" or (wanted == "auto" and not usable_gpus):
        return "gloo"
    if not usable_gpus:
        raise HostUnfitError(needs_gpu(why_none))
    if usable_gpus < local_world_size:
        message = f"must be <= {usable_gpus}, the CUDA devices that this host shows, but is {local_world_size}"
        raise ConfigError([Problem("--nproc-per-node", message)])
    return "nccl"


def plan_environment(
    options: FaultGroup, *, backend: Backend, dump_prefix: str, present: Mapping[str, str]
) -> tuple[Variable, ...]:
    """What to set; what the user has set already is kept. `dump_prefix` is a local path, to which the rank is appended."""
    entries = str(options.flight_recorder_entries)
    wanted = [
        # The store's client looks up the name of 127.0.0.1, and waits for a resolver that does not answer.
        Variable("RES_OPTIONS", "timeout:1 attempts:1", "a resolver that does not answer costs a second, not five each time"),
        Variable("TORCH_FR_BUFFER_SIZE", entries, "remember the last collectives for the report after a failure"),
        Variable("TORCH_FR_DUMP_TEMP_FILE", dump_prefix, "where the flight recorder goes when a collective fails"),
    ]
    if backend == "nccl":
        wanted += [
            Variable("TORCH_NCCL_DUMP_ON_TIMEOUT", "1", "dump the flight recorder before the communicator is torn down"),
            Variable("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1", "abort on a failed or timed-out collective instead of hanging"),
            Variable("TORCH_NCCL_RETHROW_CUDA_ERRORS", "0", "the end of a failed group is reported once, by us"),
        ]
    return tuple(variable for variable in wanted if variable.name not in present)
