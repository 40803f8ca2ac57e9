import psutil
import torch

from elastictrain.telemetry.host_metrics import host_scalars


def test_a_host_without_cuda_has_plausible_figures_and_none_of_a_device() -> None:
    values = host_scalars(torch.device("cpu"))
    assert values.keys() == {"system/cpu_percent", "system/memory_gb"}
    assert 0.0 <= values["system/cpu_percent"] <= 100.0
    assert 0.0 < values["system/memory_gb"] < psutil.virtual_memory().total / 1e9
