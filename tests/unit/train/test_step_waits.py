from collections.abc import Iterator
from typing import cast

import pytest
import torch

from elastictrain.data.loader import MicroBatch
from elastictrain.train.step import StepFlags, StepResult
from elastictrain.train.step_waits import StepWaits
from elastictrain.train.straggler import FIGURES, PHASES, Lag, Straggler


class Ticks:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def result(data_s: list[float] | None = None) -> StepResult:
    times = None
    if data_s is not None:
        times = torch.zeros(len(data_s), FIGURES, dtype=torch.float64)
        times[:, 1 + PHASES.index("data")] = torch.tensor(data_s, dtype=torch.float64)
    return StepResult(1, 0.1, 1.0, 1.0, StepFlags(), times)


def slow_batches(clock: Ticks, seconds: float) -> Iterator[MicroBatch]:
    while True:
        clock.now_s += seconds
        yield cast(MicroBatch, None)


def test_waits_add_up_until_they_are_taken() -> None:
    clock = Ticks()
    waits = StepWaits(on_device=False, clock=clock)
    batches = waits.batches(slow_batches(clock, 0.25))
    next(batches)
    clock.now_s += 5.0  # the work on a batch is no wait
    next(batches)
    with waits.waiting("save"):
        clock.now_s += 2.0
    assert waits.take(result([9.0, 9.0]), ()) == {"data": 0.5, "save": 2.0}
    assert waits.take(result(), ()) == {}


def test_on_a_device_its_own_times_count() -> None:
    clock = Ticks()
    waits = StepWaits(on_device=True, clock=clock)
    next(waits.batches(slow_batches(clock, 3.0)))
    assert waits.take(result([0.2, 0.4]), ()) == {"data": pytest.approx(0.3)}
    next(waits.batches(slow_batches(clock, 3.0)))
    assert waits.take(result(), ()) == {}


def test_all_but_the_worst_straggler_wait() -> None:
    lags = [Straggler(0, Lag("forward", 0.5, 0.1, 1.0), 90), Straggler(2, Lag("data", 0.3, 0.1, 1.0), 90)]
    found = StepWaits(on_device=False).take(result([0.0] * 4), lags)
    assert found == {"straggler": pytest.approx(0.4 * 3 / 4)}


def test_trifles_are_left_out() -> None:
    clock = Ticks()
    waits = StepWaits(on_device=False, clock=clock)
    next(waits.batches(slow_batches(clock, 5e-5)))
    assert waits.take(result(), ()) == {}
