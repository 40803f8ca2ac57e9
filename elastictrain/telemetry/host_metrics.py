"""Metrics of this host and its device: processor, memory, utilisation."""

from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec

import psutil
import torch

from elastictrain.telemetry.loggers import LoggedRun, MetricPoint

GB = 1e9


def host_scalars(device: torch.device) -> Mapping[str, float]:
    """Tag to value for this host and its device now; percentages and device memory (its peak) are since the previous call.

    The first call returns a meaningless processor share of 0. GB are 10^9 bytes. Host memory excludes caches that the system
    would free. A call takes well under a millisecond.
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
    return values


class DeviceBusyLogger:
    """`device_busy_percent`: the share of the last moment in which a kernel ran. Asked for in a thread like that of any logger:
    while the processes of a failure are taken apart the driver's management library answers after half a second."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.scalars: dict[str, float] = {}

    @staticmethod
    def works_on(device: torch.device) -> bool:
        """It needs the extra `gpu`."""
        return device.type == "cuda" and find_spec("pynvml") is not None

    def open(self, run: LoggedRun) -> None:
        self._ask()

    def log(self, point: MetricPoint) -> None:
        self._ask()

    def close(self, *, complete: bool) -> None:
        """Nothing is kept."""

    def _ask(self) -> None:
        # A MIG slice, or a driver without that library, does not report it; the library has errors of its own.
        with suppress(Exception):
            self.scalars = {"system/device_busy_percent": float(torch.cuda.utilization(self._device))}
