"""Which rank holds up the others, in simulated steps with the noise of real ones."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from statistics import median

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from elastictrain.train.straggler import (
    FIGURES,
    IN_A_ROW,
    PHASES,
    WINDOW_STEPS,
    Lag,
    Straggler,
    StragglerFinder,
    medians_of_others,
    to_leave_out,
)
from tests.unit.examples import examples

USUAL = {"data": 0.0005, "forward": 0.100, "backward": 0.200, "update": 0.020, "between": 0.001}
SOON = (IN_A_ROW + 1) * WINDOW_STEPS
Slow = Callable[[int, int, str], float]
"""Factor by step, rank and phase."""


def even(step: int, rank: int, phase: str) -> float:
    return 1.0


def follow(
    steps: int,
    *,
    ranks: int = 8,
    noise: float = 0.03,
    slow: Slow = even,
    measured_every: Mapping[str, int] = {},
    seed: int = 0,
) -> list[tuple[int, Straggler]]:
    """The changes by step. Noise of each rank; on some steps a garbage collection, a snapshot of one rank, an evaluation.
    `measured_every`: in which steps a phase is measured, if not in all; 0: in none."""
    draw, finder = torch.Generator().manual_seed(seed), StragglerFinder()
    shape = (steps, ranks, len(PHASES))
    spent = torch.randn(shape, generator=draw, dtype=torch.float64).mul(noise).add(1.0).clamp(min=0.2)
    spent *= torch.tensor([USUAL[phase] for phase in PHASES], dtype=torch.float64)
    if slow is not even:
        factors = [slow(step, rank, phase) for step in range(1, steps + 1) for rank in range(ranks) for phase in PHASES]
        spent *= torch.tensor(factors, dtype=torch.float64).view(shape)
    of = dict(zip(PHASES, spent.unbind(dim=2), strict=True))
    of["forward"] += 0.08 * (torch.rand(shape[:2], generator=draw) < 0.05)
    of["update"][4::5, 1] += 0.15
    of["between"][:, 0] += 0.002
    of["between"][99::100] += 1.5
    longest = spent.sum(dim=2).amax(dim=1)
    for phase, every in measured_every.items():
        of[phase][[not every or step % every != 0 for step in range(1, steps + 1)]] = 0.0
    times = torch.cat([longest.view(-1, 1, 1).expand(-1, ranks, 1), spent], dim=2)
    return [(step, change) for step, now in enumerate(times, start=1) for change in finder.add(now)]


@pytest.mark.parametrize(("ranks", "noise"), [(2, 0.03), (8, 0.02), (8, 0.1), (8, 0.3), (3, 0.1)])
def test_ten_thousand_noisy_steps_have_no_straggler(ranks: int, noise: float) -> None:
    assert follow(examples(10_000), ranks=ranks, noise=noise) == []


@pytest.mark.parametrize("seed", range(examples(10)))
@pytest.mark.parametrize(("ranks", "noise"), [(2, 0.03), (4, 0.05), (16, 0.05)])
def test_a_rank_that_is_15_percent_slower_is_named_soon_and_alone(ranks: int, noise: float, seed: int) -> None:
    changes = follow(
        400,
        ranks=ranks,
        noise=noise,
        slow=lambda step, rank, phase: 1.15 if rank == ranks - 1 and step > 100 else 1.0,
        seed=seed,
    )
    ((step, found),) = changes
    assert 100 < step <= 100 + SOON
    assert (found.rank, found.lag.phase, found.over) == (ranks - 1, "backward", False)
    assert found.lag.own_s / found.lag.others_s == pytest.approx(1.15, abs=0.05)
    assert found.steps == IN_A_ROW * WINDOW_STEPS


@pytest.mark.parametrize("phase", ["data", "forward", "update", "between"])
def test_the_phase_is_named(phase: str) -> None:
    factor = {"data": 100.0, "forward": 1.2, "update": 2.0, "between": 40.0}[phase]
    changes = follow(SOON, slow=lambda step, rank, one: factor if rank == 3 and one == phase else 1.0)
    assert [(found.rank, found.lag.phase) for _, found in changes] == [(3, phase)]


@pytest.mark.parametrize("noise", [0.03, 0.1, 0.3])
def test_a_phase_that_only_some_steps_measure(noise: float) -> None:
    """As FSDP's forward pass; the backward pass is not measured at all."""
    only = {"forward": 4, "backward": 0}
    assert follow(examples(5000), noise=noise, measured_every=only) == []
    changes = follow(
        SOON, noise=0.02, measured_every=only, slow=lambda step, rank, phase: 1.15 if rank == 3 and phase == "forward" else 1.0
    )
    assert [(found.rank, found.lag.phase) for _, found in changes] == [(3, "forward")]


def test_all_ranks_of_a_slow_host_are_named() -> None:
    changes = follow(SOON, slow=lambda step, rank, phase: 1.3 if rank >= 4 else 1.0)
    assert [found.rank for _, found in changes] == [4, 5, 6, 7]


def test_ranks_that_all_differ_have_no_straggler() -> None:
    """A margin of a tenth alone would name the last ones."""
    assert follow(SOON, slow=lambda step, rank, phase: 1.0 + 0.03 * rank, noise=0.01) == []


def test_a_straggler_that_recovers_is_cleared_and_can_be_named_again() -> None:
    changes = follow(1000, slow=lambda step, rank, phase: 1.4 if rank == 2 and not 300 < step <= 600 else 1.0)
    assert [(found.rank, found.over) for _, found in changes] == [(2, False), (2, True), (2, False)]
    (_, named), (cleared_at, _), (_, again) = changes
    assert 300 < cleared_at <= 300 + SOON
    assert named.steps == again.steps == IN_A_ROW * WINDOW_STEPS


def test_a_slow_spell_that_is_shorter_is_not_named() -> None:
    spell = (IN_A_ROW - 1) * WINDOW_STEPS
    assert follow(600, slow=lambda step, rank, phase: 2.0 if rank == 2 and 100 < step <= 100 + spell else 1.0) == []


def test_a_trifle_is_not_named() -> None:
    """Half as fast, but less than a fiftieth of the step; or less than a millisecond."""
    assert follow(SOON, slow=lambda step, rank, phase: 2.0 if rank == 3 and phase == "data" else 1.0) == []
    quick = [[0.002, *(0.0004 * (2.0 if rank == 1 else 1.0) for _ in PHASES)] for rank in range(4)]
    finder = StragglerFinder()
    assert not any(finder.add(torch.tensor(quick, dtype=torch.float64)) for _ in range(SOON))


def test_what_was_not_measured_yet_counts_for_nobody() -> None:
    finder, zeros = StragglerFinder(), torch.zeros(4, FIGURES, dtype=torch.float64)
    assert not any(finder.add(zeros) for _ in range(SOON))
    assert finder.named == []


def test_present_stragglers_have_their_steps() -> None:
    finder = StragglerFinder()
    times: Tensor = torch.tensor([[0.3, 0.0, 0.1, 0.2, 0.0, 0.0], [0.3, 0.0, 0.2, 0.2, 0.0, 0.0]], dtype=torch.float64)
    for _ in range(2 * IN_A_ROW * WINDOW_STEPS + 1):
        finder.add(times)
    assert finder.named == [Straggler(1, Lag("forward", 0.2, 0.1, 0.3), 2 * IN_A_ROW * WINDOW_STEPS)]


def test_the_host_of_the_oldest_straggler_is_left_out_after_enough_steps() -> None:
    lag = Lag("forward", 0.2, 0.1, 0.3)
    named = [Straggler(1, lag, 90), Straggler(2, lag, 300), Straggler(3, lag, 300)]
    assert to_leave_out(named, after=0) is None
    assert to_leave_out(named, after=301) is None
    chosen = to_leave_out(named, after=300)
    assert chosen is not None
    assert chosen.rank == 2
    # What a rank does between steps it does on any host.
    assert to_leave_out([Straggler(1, replace(lag, phase="between"), 300)], after=300) is None


@given(st.lists(st.floats(0.0, 10.0), min_size=2, max_size=9))
def test_medians_of_others(values: list[float]) -> None:
    expected = [median(values[:index] + values[index + 1 :]) for index in range(len(values))]
    assert medians_of_others(values) == pytest.approx(expected)
