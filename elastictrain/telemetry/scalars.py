"""What TensorBoard shows of a logged step and of the host, under names by which it sorts: it unfolds the first groups."""

from collections.abc import Mapping
from importlib.util import find_spec

import psutil
import torch

from elastictrain.telemetry.progress import Reading

GB = 1e9


def scalars_of(reading: Reading) -> Mapping[str, float]:
    """Tag to value for one logged step; what is not known has no tag."""
    values: dict[str, float | None] = {
        "loss/train": reading.loss,
        "optimizer/lr": reading.lr,
        "optimizer/grad_norm": reading.grad_norm,
        "optimizer/skipped": float(reading.skipped),
        "speed/tokens_per_s": reading.tokens_per_s,
        "speed/step_s": reading.step_s,
        "speed/mfu": reading.mfu,
    }
    return {tag: value for tag, value in values.items() if value is not None}


class HostProbe:
    """Looks at the processor and memory of this host and its device; one look costs well under a millisecond."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # psutil measures between two calls and answers the first with a meaningless 0.
        psutil.cpu_percent(interval=None)

    def scalars(self) -> Mapping[str, float]:
        """Tag to value now; percentages and device memory (its peak) are since the call before. GB are 10^9 bytes.

        A host's memory is without caches that the system would give back. `device_busy_percent` is the share of the last
        moment in which a kernel ran; it needs the extra `gpu`.
        """
        memory = psutil.virtual_memory()
        values = {
            "system/cpu_percent": float(psutil.cpu_percent(interval=None)),
            "system/memory_gb": float(memory.total - memory.available) / GB,
        }
        if self._device.type != "cuda":
            return values
        values["system/device_memory_gb"] = torch.cuda.max_memory_allocated(self._device) / GB
        torch.cuda.reset_peak_memory_stats(self._device)
        if find_spec("pynvml") is not None:
            try:
                values["system/device_busy_percent"] = float(torch.cuda.utilization(self._device))
            except RuntimeError:
                # A slice of a device, or a driver without its management library, does not tell.
                return values
        return values
