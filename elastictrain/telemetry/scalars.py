"""The names under which figures appear in TensorBoard."""

from collections.abc import Mapping

from elastictrain.telemetry.host import HostFacts
from elastictrain.telemetry.reading import Reading


def scalars_of(reading: Reading, *, host: HostFacts) -> Mapping[str, float]:
    """Tag to value for one logged step; what is not known has no tag."""
    values: dict[str, float | None] = {
        "train/loss": reading.loss,
        "train/lr": reading.lr,
        "train/grad_norm": reading.grad_norm,
        "train/skipped": float(reading.skipped),
        "speed/tokens_per_s": reading.tokens_per_s,
        "speed/step_s": reading.step_s,
        "speed/mfu": reading.mfu,
        "device/memory_gb": host.device_memory_gb,
        "device/busy_percent": host.device_busy_percent,
        "host/cpu_percent": host.host_cpu_percent,
        "host/memory_gb": host.host_memory_gb,
    }
    return {tag: value for tag, value in values.items() if value is not None}


def scalars_of_eval(loss: float) -> Mapping[str, float]:
    """Tag to value for one evaluation."""
    return {"eval/loss": loss}
