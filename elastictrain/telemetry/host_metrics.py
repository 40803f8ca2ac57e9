"""Metrics of this host and its device: processor, memory, utilisation."""

import threading
from collections.abc import Mapping
from importlib.util import find_spec

import psutil
import torch

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


class DeviceBusySampler:
    """Samples `device_busy_percent`, the share of the last moment in which a kernel ran, in a thread: while the processes of a
    failure are taken apart the driver's management library answers after half a second. Nobody waits for that thread."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._asked, self._closed = threading.Event(), False
        self.scalars: Mapping[str, float] = {}
        """The newest sample; empty before the first, and where the last one failed."""
        # It needs the extra `gpu`.
        if device.type == "cuda" and find_spec("pynvml") is not None:
            threading.Thread(target=self._work, name="device-busy", daemon=True).start()

    def ask(self) -> None:
        """Have another sample taken."""
        self._asked.set()

    def close(self) -> None:
        """Take no more samples; one that is being taken may never end."""
        self._closed = True
        self._asked.set()

    def _work(self) -> None:
        while self._asked.wait() and not self._closed:
            self._asked.clear()
            try:
                self.scalars = {"system/device_busy_percent": float(torch.cuda.utilization(self._device))}
            except Exception:  # noqa: BLE001  # a MIG slice, or a driver without that library; it has errors of its own
                self.scalars = {}
