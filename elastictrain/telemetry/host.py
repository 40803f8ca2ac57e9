"""Processor and memory of this host and its device."""

from dataclasses import dataclass
from importlib.util import find_spec

import psutil
import torch

GB = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """One look at the host. Memory in 10^9 bytes."""

    host_cpu_percent: float
    """Of all cores together, 0 to 100, since the look before."""
    host_memory_gb: float
    """In use, without caches that the system would give back."""
    device_memory_gb: float | None
    """Most memory that tensors took on the CUDA device since the look before; None on other devices."""
    device_busy_percent: float | None
    """Share of the last moment in which a kernel ran, 0 to 100; None without CUDA, or without the extra `gpu`."""


class HostProbe:
    """Looks at the host; one look costs well under a millisecond."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # psutil measures between two calls and answers the first with a meaningless 0.
        psutil.cpu_percent(interval=None)

    def look(self) -> HostFacts:
        """The facts now."""
        memory = psutil.virtual_memory()
        return HostFacts(
            host_cpu_percent=float(psutil.cpu_percent(interval=None)),
            host_memory_gb=float(memory.total - memory.available) / GB,
            device_memory_gb=self._device_memory_gb(),
            device_busy_percent=self._device_busy_percent(),
        )

    def _device_busy_percent(self) -> float | None:
        if self._device.type != "cuda" or find_spec("pynvml") is None:
            return None
        try:
            return float(torch.cuda.utilization(self._device))
        except RuntimeError:
            # A slice of a device, or a driver without its management library, does not tell.
            return None

    def _device_memory_gb(self) -> float | None:
        if self._device.type != "cuda":
            return None
        peak = torch.cuda.max_memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        return peak / GB
