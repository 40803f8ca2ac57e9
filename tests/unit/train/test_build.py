import pytest
import torch

from elastictrain.train.build import too_slow


@pytest.mark.parametrize(
    ("num_parameters", "device", "said"),
    [
        (1_498_482_688, "cpu", "a model of 1,498 M parameters"),
        (9_800_000, "cpu", ""),
        (8_030_000_000, "cuda", ""),
    ],
)
def test_a_large_model_on_a_cpu_is_announced(num_parameters: int, device: str, said: str) -> None:
    warning = too_slow(num_parameters, device=torch.device(device))
    assert said in warning
    assert bool(warning) == bool(said)
