"""The small deciding modules: spans, match, results, failed saves, errors of a save."""

from dataclasses import replace
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastictrain.checkpoint.checkpointer import save_error
from elastictrain.checkpoint.exchange import describe, revive
from elastictrain.checkpoint.manifest import ChunkRecord, TensorRecord
from elastictrain.checkpoint.reader import LoadResult, describe_mismatch, result_of_all
from elastictrain.checkpoint.verified_read import DamagedFileError, coalesced_reads
from elastictrain.errors import (
    CheckpointError,
    ConfigError,
    InvalidCheckpointError,
    StorageFullError,
    TransientStorageError,
)


def chunk(file: str, start: int, size: int) -> ChunkRecord:
    return ChunkRecord((), (), file, start, size, "")


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 60))), st.integers(1, 100), st.integers(0, 30), st.randoms())
def test_spans_cover_each_chunk_once_and_are_bounded(
    gaps_and_sizes: list[tuple[int, int]], span_bytes: int, gap_bytes: int, random: Random
) -> None:
    chunks, position = [], 0
    for gap, size in gaps_and_sizes:
        chunks.append(chunk("a" if position < 200 else "b", position + gap, size))
        position += gap + size
    spans = coalesced_reads(random.sample(chunks, len(chunks)), span_bytes=span_bytes, gap_bytes=gap_bytes)
    assert [c for span in spans for c in span.chunks] == chunks
    for span in spans:
        assert all(c.file == span.file and span.start <= c.start and c.start + c.size_bytes <= span.end for c in span.chunks)
        assert span.end - span.start <= span_bytes or len(span.chunks) == 1
    wasted = sum(span.end - span.start for span in spans) - sum(c.size_bytes for c in chunks)
    assert wasted <= gap_bytes * len(chunks)


def test_neighbours_are_read_together() -> None:
    spans = coalesced_reads(
        [chunk("a", 0, 10), chunk("a", 10, 10), chunk("a", 25, 5), chunk("a", 90, 1)], span_bytes=100, gap_bytes=5
    )
    assert [(span.start, span.end) for span in spans] == [(0, 30), (90, 91)]


STORED = {
    "model.w": TensorRecord("float32", (2,), ()),
    "model.b": TensorRecord("int8", (3,), ()),
    "rng.0": TensorRecord("uint8", (4,), ()),
}
GIVEN = {"model.w": torch.zeros(2), "model.b": torch.zeros(3, dtype=torch.int8), "rng.0": torch.zeros(4, dtype=torch.uint8)}


def test_a_fit() -> None:
    assert describe_mismatch(GIVEN, STORED) is None
    without_family = {name: tensor for name, tensor in GIVEN.items() if name != "rng.0"}
    assert describe_mismatch(without_family, STORED) is None


def test_mismatches_are_named() -> None:
    other_dtype = torch.zeros(2, dtype=torch.float16)
    for tensors, named in (
        ({**GIVEN, "rng.1": torch.zeros(1)}, ("rng.1",)),
        ({name: tensor for name, tensor in GIVEN.items() if name != "model.b"}, ("model.b",)),
        ({**GIVEN, "model.w": torch.zeros(5)}, ("model.w", "[2]", "[5]")),
        ({**GIVEN, "model.w": other_dtype}, ("model.w", "float32", "float16")),
    ):
        (line,) = str(describe_mismatch(tensors, STORED)).split("\n  - ")[1:]
        assert all(one in line for one in named)
    many = {f"model.{n}": torch.zeros(()) for n in range(20)}
    assert "14 more" in str(describe_mismatch(many, STORED))


LOADED, TORN = LoadResult("loaded", 5), LoadResult("damaged", files=("a",), message="a is torn")
LATE = LoadResult("failed", error="TransientStorageError", message="late")


def test_results() -> None:
    assert result_of_all([LOADED, LOADED]) == LoadResult("loaded", 10)
    assert result_of_all([LOADED, TORN, LATE, TORN]) == TORN
    late = result_of_all([LOADED, LATE])
    assert (late.outcome, late.error) == (LATE.outcome, LATE.error)
    assert late.message.startswith("rank 1:")
    assert result_of_all([LATE]) == LATE
    of_files = [replace(LATE, files=(name,)) for name in ("b", "a", "b")]
    assert result_of_all([LATE, *of_files]).files == ("b", "a")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (TransientStorageError("x"), TransientStorageError),
        (ConfigError("x"), ConfigError),
        (DamagedFileError("x", file="a"), InvalidCheckpointError),
        (ValueError("x"), CheckpointError),
    ],
)
def test_errors_travel(error: Exception, kind: type[Exception]) -> None:
    revived = revive(describe(error))
    assert type(revived) is kind
    assert "x" in str(revived)


def test_an_unknown_error_is_still_one() -> None:
    assert type(revive({"type": "json", "message": "x"})) is CheckpointError


def test_error_of_a_save() -> None:
    full = save_error({2: StorageFullError("disk full"), 5: TransientStorageError("late")}, url="u")
    assert type(full) is StorageFullError
    for token in ("u ", "rank 2:", "disk full", "rank 5:", "late"):
        assert token in str(full)
    mixed = save_error({0: StorageFullError("disk full"), 1: revive(describe(ValueError("oops")))}, url="u")
    assert type(mixed) is CheckpointError
    assert "rank 1:" in str(mixed)
    assert "oops" in str(mixed)
