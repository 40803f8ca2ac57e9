import psutil
import torch

from elastictrain.telemetry.progress import Reading
from elastictrain.telemetry.tensorboard import HostProbe, scalars_of


def test_every_figure_has_its_tag() -> None:
    reading = Reading(step=3, loss=1.0, lr=2.0, grad_norm=3.0, tokens_per_s=4.0, step_s=5.0, mfu=0.5, skipped=6)
    assert scalars_of(reading) == {
        "loss/train": 1.0,
        "optimizer/lr": 2.0,
        "optimizer/grad_norm": 3.0,
        "optimizer/skipped": 6.0,
        "speed/tokens_per_s": 4.0,
        "speed/step_s": 5.0,
        "speed/mfu": 0.5,
    }


def test_what_is_not_known_has_no_tag() -> None:
    reading = Reading(step=3, loss=1.0, lr=2.0, grad_norm=3.0, tokens_per_s=4.0, step_s=5.0, mfu=None, skipped=0)
    assert "speed/mfu" not in scalars_of(reading)


def test_a_host_without_cuda_has_plausible_figures_and_none_of_a_device() -> None:
    values = HostProbe(torch.device("cpu")).scalars()
    assert values.keys() == {"system/cpu_percent", "system/memory_gb"}
    assert 0.0 <= values["system/cpu_percent"] <= 100.0
    assert 0.0 < values["system/memory_gb"] < psutil.virtual_memory().total / 1e9
