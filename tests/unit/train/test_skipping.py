import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastictrain.errors import NonFiniteError
from elastictrain.train.skipping import SkipCounts, check_skips, count_step

BAD = [(math.nan, 1.0), (1.0, math.nan), (math.inf, 1.0), (1.0, math.inf), (-math.inf, 1.0)]


@pytest.mark.parametrize(("loss", "grad_norm"), BAD)
def test_what_is_not_finite_is_counted(loss: float, grad_norm: float) -> None:
    counts = count_step(SkipCounts(1, 4), loss=loss, grad_norm=grad_norm)
    assert counts == SkipCounts(2, 5)


def test_a_finite_step_ends_the_row_and_keeps_the_total() -> None:
    assert count_step(SkipCounts(3, 5), loss=1.0, grad_norm=0.0) == SkipCounts(0, 5)


@pytest.mark.parametrize("max_skipped", [0, 1, 3])
def test_gives_up_at_one_more_than_allowed(max_skipped: int) -> None:
    check_skips(SkipCounts(max_skipped, 99), max_skipped=max_skipped, step=76, loss=math.nan)
    message = rf"{max_skipped + 1} steps in a row .* step 77 \(loss nan\); `train.max_skipped` allows {max_skipped}\."
    with pytest.raises(NonFiniteError, match=message):
        check_skips(SkipCounts(max_skipped + 1, 99), max_skipped=max_skipped, step=77, loss=math.nan)


@given(st.lists(st.booleans(), max_size=40))
def test_counts_are_those_of_the_history(finite: list[bool]) -> None:
    counts = SkipCounts()
    for good in finite:
        counts = count_step(counts, loss=1.0 if good else math.nan, grad_norm=1.0)
    row = next((number for number, good in enumerate(reversed(finite)) if good), len(finite))
    assert counts == SkipCounts(row, finite.count(False))
