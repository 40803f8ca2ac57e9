import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastictrain.telemetry.figures import count_text, duration_text, reading_text, step_line
from elastictrain.telemetry.reading import Reading

READING = Reading(step=40, loss=3.21009, lr=3e-4, grad_norm=0.98765, tokens_per_s=12345.6, step_s=0.5, mfu=None, skipped=0)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 ms"),
        (-1.0, "0 ms"),
        (0.85, "850 ms"),
        (0.9999, "1 s"),
        (42.4, "42 s"),
        (59.6, "1 min 00 s"),
        (187.0, "3 min 07 s"),
        (3599.7, "1 h 00 min"),
        (18720.0, "5 h 12 min"),
        (183600.0, "2 d 03 h"),
        (math.inf, "?"),
        (math.nan, "?"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0"),
        (999, "999"),
        (999.7, "1.0k"),
        (12345.6, "12.3k"),
        (99960, "100k"),
        (999700, "1.0M"),
        (1.5e6, "1.5M"),
        (2e9, "2.0G"),
        (-1500, "-1.5k"),
        (1e17, "100000T"),
        (math.nan, "?"),
    ],
)
def test_counts(count: float, text: str) -> None:
    assert count_text(count) == text


@given(st.floats(0, 9e14))
def test_a_count_never_takes_more_than_five_characters(count: float) -> None:
    assert len(count_text(count)) <= 5


def test_a_line_holds_what_is_known() -> None:
    line = step_line(READING, total_steps=3000, eta_s=125.0)
    assert line == "step   40/3000: loss 3.2101, lr 3.00e-04, grad norm 0.988, 12.3k tokens/s, 2 min 05 s to go"


def test_mfu_and_skipped_steps_are_shown_when_there_are_any() -> None:
    reading = Reading(step=1, loss=math.nan, lr=1.0, grad_norm=math.inf, tokens_per_s=1.0, step_s=1.0, mfu=0.4951, skipped=2)
    text = reading_text(reading, eta_s=None)
    assert text == "loss nan, lr 1.00e+00, grad norm inf, 1 tokens/s, MFU 49.5%, 2 skipped"


@pytest.mark.parametrize("eta_s", [None, 0.0])
def test_no_time_to_go_is_not_shown(eta_s: float | None) -> None:
    assert "to go" not in reading_text(READING, eta_s=eta_s)
