"""The names under which figures appear in TensorBoard, which sorts groups by name and shows the first ones unfolded."""

from collections.abc import Mapping

from elastictrain.telemetry.host import HostFacts
from elastictrain.telemetry.reading import Reading


def scalars_of(reading: Reading, *, host: HostFacts) -> Mapping[str, float]:
    """Tag to value for one logged step; what is not known has no tag."""
    values: dict[str, float | None] = {
        "loss/train": reading.loss,
        "optimizer/lr": reading.lr,
        "optimizer/grad_norm": reading.grad_norm,
        "optimizer/skipped": float(reading.skipped),
        "speed/tokens_per_s": reading.tokens_per_s,
        "speed/step_s": reading.step_s,
        "speed/mfu": reading.mfu,
        "system/device_memory_gb": host.device_memory_gb,
        "system/device_busy_percent": host.device_busy_percent,
        "system/cpu_percent": host.host_cpu_percent,
        "system/memory_gb": host.host_memory_gb,
    }
    return {tag: value for tag, value in values.items() if value is not None}


def scalars_of_eval(loss: float) -> Mapping[str, float]:
    """Tag to value for one evaluation."""
    return {"loss/held_out": loss}
