"""Starts this rank's device while the rest of the program is still being imported: both take their time at each restart."""

import logging
import threading
from typing import Literal

import torch

logger = logging.getLogger(__name__)


def start_device(backend: Literal["auto", "nccl", "gloo"], *, local_rank: int) -> threading.Thread | None:
    """Make the CUDA context of the device that this rank will use, in the background; None where it will use none.

    What goes wrong here goes wrong again, and is reported, where the device is used first.
    """
    if backend == "gloo" or torch.cuda.device_count() <= local_rank:
        return None

    def start() -> None:
        try:
            torch.cuda.set_device(local_rank)
            torch.empty(1, device="cuda")
        except RuntimeError as error:
            logger.debug("the device did not start early: %s", error)

    thread = threading.Thread(target=start, name="start-device", daemon=True)
    thread.start()
    return thread
