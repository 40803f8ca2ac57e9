from types import SimpleNamespace
from typing import Any

import pytest
import torch

from elastictrain.train.build import BuiltState, detached, too_slow


@pytest.mark.parametrize(("finished_step", "before", "known"), [(0, 0, 0), (14, 0, 14), (0, 30, 30), (14, 30, 14)])
def test_a_generation_that_fails_before_its_first_step_takes_nothing_from_what_was_done(
    finished_step: int, before: int, known: int
) -> None:
    loop: Any = SimpleNamespace(
        loader=SimpleNamespace(release=lambda: None),
        stepper=SimpleNamespace(wrapped=None),
        saving=SimpleNamespace(detach=lambda: None, arena=None),
        state=None,
        attachment=SimpleNamespace(finished_step=finished_step),
    )
    earlier: Any = BuiltState(loop, loop, finished_step=before) if before else None
    assert detached(loop, before=earlier).finished_step == known


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
