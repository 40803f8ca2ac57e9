"""Starts this rank's device while the rest of the program is still being imported, and asks torch which GPUs it can use."""

import logging
import threading
import warnings
from collections.abc import Callable, Mapping
from typing import Literal

import torch

from elastictrain.distributed.environment import Backend, choose_backend
from elastictrain.distributed.gpus import read_gpus, why_no_gpu

logger = logging.getLogger(__name__)


def start_device(
    backend: Literal["auto", "nccl", "gloo"], *, local_rank: int, wait: Callable[[], object]
) -> threading.Thread | None:
    """Make the CUDA context of the device that this rank will use, in the background; None where it will use none.

    Where there is no room for it, it is tried again when `wait` returns: another process gives the device back.
    What goes wrong then goes wrong again, and is reported, where the device is used first.
    """
    if backend == "gloo" or torch.cuda.device_count() <= local_rank:
        return None

    def start() -> None:
        if not _made_context(local_rank):
            wait()
            _made_context(local_rank)

    thread = threading.Thread(target=start, name="start-device", daemon=True)
    thread.start()
    return thread


def find_backend(
    wanted: Literal["auto", "nccl", "gloo"], *, environment: Mapping[str, str], local_world_size: int
) -> tuple[Backend, str]:
    """The collective library; and why the CPU is used although this host has GPUs, if nobody has asked for that.

    Raises: HostUnfitError, ConfigError.
    """
    if wanted == "gloo":
        return "gloo", ""
    with warnings.catch_warnings():
        # What torch would warn of is said below.
        warnings.simplefilter("ignore")
        usable = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if usable:
        return choose_backend(wanted, usable_gpus=usable, local_world_size=local_world_size, why_none=""), ""
    gpus = read_gpus(environment)
    reason = why_no_gpu(gpus, error=_error_of_torch())
    backend = choose_backend(wanted, usable_gpus=0, local_world_size=local_world_size, why_none=reason)
    return backend, reason if gpus.files and not gpus.all_hidden else ""


def _error_of_torch() -> str:
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        return str(error).strip().partition("\n")[0]
    return "no device"


def _made_context(index: int) -> bool:
    try:
        torch.cuda.set_device(index)
        torch.empty(1, device="cuda")
    except RuntimeError as error:
        logger.debug("the device did not start early: %s", error)
        return False
    return True
