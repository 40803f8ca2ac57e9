"""Metrics of this host and its device: processor, memory, utilisation."""

from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec

import psutil
import torch

GB = 1e9


def host_scalars(device: torch.device) -> Mapping[str, float]:
    """Tag to value for this host and its device now; percentages and device memory (its peak) are since the previous call.

    The first call returns a meaningless processor share of 0. GB are 10^9 bytes. Host memory excludes caches that the system
    would free. `device_busy_percent` is the share of the last moment in which a kernel ran; it needs the extra `gpu`. A call
    takes well under a millisecond.
    """
    memory = psutil.virtual_memory()
    values = {
        "system/cpu_percent": float(psutil.cpu_percent(interval=None)),
        "system/memory_gb": float(memory.total - memory.available) / GB,
    }
    if device.type != "cuda":
        return values
    values["system/device_memory_gb"] = torch.cuda.max_memory_allocated(device) / GB
    torch.cuda.reset_peak_memory_stats(device)
    if find_spec("pynvml") is not None:
        # A MIG slice, or a driver without its management library, does not report this.
        with suppress(RuntimeError):
            values["system/device_busy_percent"] = float(torch.cuda.utilization(device))
    return values
