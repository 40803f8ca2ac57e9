"""This rank's device and collective library: their choice, an early start, and the environment that both read."""

import logging
import threading
import warnings
from collections.abc import Callable, Mapping
from typing import Literal

import torch

from elastictrain.config.composed import FaultGroup, ParallelGroup
from elastictrain.distributed.gpus import needs_gpu, read_gpus, why_no_gpu
from elastictrain.errors import ConfigError, HostUnfitError, Problem

logger = logging.getLogger(__name__)

Backend = Literal["nccl", "gloo"]


def start_device(parallel: ParallelGroup, *, local_rank: int, wait: Callable[[], object]) -> threading.Thread | None:
    """Create the CUDA context of this rank's device, in the background; None where it uses none. Without room for it, the
    thread tries again when `wait` returns: another process releases the device. Errors are reported at the first use."""
    if parallel.avoids_gpu or torch.cuda.device_count() <= local_rank:
        return None

    def start() -> None:
        """Tries again once, after `wait`. Never raises a RuntimeError: the first use of the device reports it."""
        for last in (False, True):
            try:
                torch.cuda.set_device(local_rank)
                torch.empty(1, device="cuda")
            except RuntimeError as error:
                logger.debug("the device did not start early: %s", error)
                if not last:
                    wait()
            else:
                return

    thread = threading.Thread(target=start, name="start-device", daemon=True)
    thread.start()
    return thread


def settle(device: torch.device) -> None:
    """Wait until the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def find_backend(
    wanted: Literal["auto", "nccl", "gloo"],
    *,
    environment: Mapping[str, str],
    local_world_size: int,
    device: Literal["auto", "cpu", "cuda"] = "auto",
) -> tuple[Backend, str]:
    """The collective library, and the reason why GPUs of this host stay unused; empty if they are hidden, or the CPU is
    requested. Raises: HostUnfitError without the GPUs that are requested; ConfigError for more ranks than GPUs."""
    parallel = ParallelGroup("ddp", backend=wanted, device=device)
    if parallel.avoids_gpu:
        return "gloo", ""
    with warnings.catch_warnings():
        # torch's warning is repeated below, in plain words.
        warnings.simplefilter("ignore")
        usable = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not usable:
        gpus, error = read_gpus(environment), "no device"
        try:
            torch.cuda.init()  # type: ignore[no-untyped-call]
        except (RuntimeError, AssertionError) as problem:
            error = str(problem).strip().partition("\n")[0]
        reason = why_no_gpu(gpus, error=error)
        if parallel.needs_gpu:
            raise HostUnfitError(needs_gpu(parallel.needs_gpu, reason))
        return "gloo", reason if gpus.files and not gpus.all_hidden else ""
    if usable < local_world_size:
        message = f"must be <= {usable}, the CUDA devices that this host shows, but is {local_world_size}"
        raise ConfigError([Problem("--nproc-per-node", message)])
    return "gloo" if parallel.backend == "gloo" else "nccl", ""


def plan_environment(options: FaultGroup, *, backend: Backend, dump_prefix: str, present: Mapping[str, str]) -> dict[str, str]:
    """Variables to set before a process group is made; the user's are kept. `dump_prefix`: local path; torch adds the rank."""
    wanted = {
        # The store's client looks up the name of 127.0.0.1: a resolver that does not answer costs a second, not five each time.
        "RES_OPTIONS": "timeout:1 attempts:1",
        # The last collectives, for the report after a failure.
        "TORCH_FR_BUFFER_SIZE": str(options.flight_recorder_entries),
        "TORCH_FR_DUMP_TEMP_FILE": dump_prefix,
    }
    if backend == "nccl":
        wanted |= {
            # The dump is written before the communicator is torn down.
            "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
            # Abort on a collective that failed or timed out, instead of hanging.
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
            # This package reports the end of a failed group once.
            "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
        }
    return {name: value for name, value in wanted.items() if name not in present}
