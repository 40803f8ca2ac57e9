"""Which checkpoints are best, and since when nothing was better."""

import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastictrain.bounded_json import parse_record
from elastictrain.checkpoint import evaluations
from elastictrain.checkpoint.evaluations import EVALUATIONS_NAME, EvaluationLosses, read_evaluations
from elastictrain.storage.opening import open_store
from tests.unit.examples import examples


def made(losses: list[float], *, keep_best: int = 2) -> EvaluationLosses:
    found = EvaluationLosses()
    for number, loss in enumerate(losses, start=1):
        found = found.add(10 * number, loss, keep_best=keep_best)
    return found


@pytest.mark.parametrize(
    ("losses", "best", "without_gain"),
    [
        ([], (), 0),
        ([3.0], (10,), 0),
        ([3.0, 2.0, 2.5], (20, 30), 1),
        ([3.0, 3.0, 3.0], (10, 20), 2),
        ([math.nan, math.inf], (), 2),
        ([math.nan, 4.0, math.nan], (20,), 1),
    ],
)
def test_the_best_and_how_long_nothing_was_better(losses: list[float], best: tuple[int, ...], without_gain: int) -> None:
    found = made(losses)
    assert (found.best, found.without_gain) == (best, without_gain)
    assert parse_record(found.encode(), EvaluationLosses) == found


@settings(max_examples=examples(50))
@given(st.lists(st.sampled_from([1.0, 2.0, 3.0, math.nan]), max_size=12), st.integers(0, 12), st.integers(0, 3))
def test_resumed_anywhere_and_evaluated_again_it_is_the_same(losses: list[float], place: int, keep_best: int) -> None:
    whole = made(losses, keep_best=keep_best)
    again = whole.until(10 * place + 5, keep_best=keep_best)
    assert again == made(losses[:place], keep_best=keep_best)
    for number, loss in list(enumerate(losses, start=1))[place:]:
        again = again.add(10 * number, loss, keep_best=keep_best)
    assert again == whole


def test_what_is_remembered_is_bounded_and_the_best_is_never_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluations, "MOST_WITHOUT_GAIN", 50)
    found = made([1.0, 5.0, 0.5, *[2.0] * 100])
    assert len(found.losses) == 52
    assert found.best == (30, 10)
    assert found.without_gain == 50


@pytest.mark.parametrize("content", [None, b"", b"{}", b'{"losses": [[1, "x"]]}', b"[" * 100])
def test_a_file_that_is_not_there_or_garbled_counts_as_none(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / EVALUATIONS_NAME).write_bytes(content)
    assert read_evaluations(open_store(str(tmp_path))) == EvaluationLosses()
