"""Starts this rank's device while the rest of the program is still being imported: both take their time at each restart."""

import logging
import threading
from collections.abc import Callable
from typing import Literal

import torch

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


def _made_context(index: int) -> bool:
    try:
        torch.cuda.set_device(index)
        torch.empty(1, device="cuda")
    except RuntimeError as error:
        logger.debug("the device did not start early: %s", error)
        return False
    return True
