from contextlib import nullcontext

import pytest
import torch
from torch import nn

from elastictrain.distributed.mesh import MeshShape
from elastictrain.distributed.wrapping import Wrapped
from elastictrain.train.build import show_sample, too_slow
from tests.unit.train.parts import Squares


class Telling(Squares):
    """A task that shows a sample, or fails at it."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__()
        self._error = error

    def show_sample(self, model: nn.Module, *, device: torch.device, seed: int) -> str:
        if self._error is not None:
            raise self._error
        return f"learnt with seed {seed}"


def shown(task: Squares) -> list[str]:
    said: list[str] = []
    model = nn.Linear(1, 1)
    wrapped = Wrapped(model, model, MeshShape(1, 1), 1, nullcontext)
    show_sample(task, wrapped, device=torch.device("cpu"), seed=7, say=said.append)
    return said


def test_what_the_task_shows_is_said() -> None:
    assert shown(Telling()) == ["learnt with seed 7"]


def test_a_task_without_a_sample_says_nothing() -> None:
    assert shown(Squares()) == []


@pytest.mark.parametrize("error", [IndexError("no such token"), OSError("no tokenizer")])
def test_a_sample_that_fails_does_not_end_a_run_that_is_complete(error: Exception) -> None:
    assert shown(Telling(error)) == [f"the task could not show a sample: {type(error).__name__}: {error}"]


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
