"""What `--dry-run` suggests, and for which GPUs."""

from collections.abc import Sequence

import pytest

from elastictrain.errors import UsageError
from elastictrain.identity import Identity
from elastictrain.train.dry_run import GpuSet, read_gpu_set, suggest
from elastictrain.train.memory_trace import AllocationSpan, Use, peak_of

ALONE = Identity(0, 1, 0, 1, "here", launched=False)
EACH = {"none": 30, "selective": 10, "full": 2}


def measure(mode: str, micro_batch: int) -> int:
    return 20 + EACH[mode] * micro_batch


@pytest.mark.parametrize(
    ("limit", "largest", "expected"),
    [
        (400, 64, ("none", 8, 260)),
        (400, 4, ("none", 4, 140)),
        (50, 64, ("none", 1, 50)),
        (49, 64, ("selective", 2, 40)),
        (25, 64, ("full", 2, 24)),
        (21, 64, None),
        (50, 1, ("none", 1, 50)),
    ],
)
def test_the_least_is_computed_twice_and_the_micro_batch_is_as_large_as_fits(
    limit: int, largest: int, expected: tuple[str, int, int] | None
) -> None:
    assert suggest(measure, modes=("none", "selective", "full"), largest=largest, limit_bytes=limit) == expected


def test_a_micro_batch_that_needs_more_than_was_estimated_is_halved() -> None:
    sizes: Sequence[int] = [0, 30, 40, 0, 90, 0, 0, 0, 500]
    assert suggest(lambda _, size: sizes[size], modes=("none",), largest=8, limit_bytes=100) == ("none", 4, 90)


def test_gpus_are_typed_as_their_number_and_their_gigabytes() -> None:
    typed = {"80": (1, 1), "8x80": (1, 8), "2x8x80": (2, 8)}
    assert {text: read_gpu_set(text, ALONE) for text in typed} == {
        text: GpuSet(hosts, per_host, 80 * 10**9) for text, (hosts, per_host) in typed.items()
    }
    for wrong in ("x80", "80GB", "0x80", "1x2x3x4"):
        with pytest.raises(UsageError):
            read_gpu_set(wrong, ALONE)


def test_the_peak_is_the_moment_with_the_most_memory() -> None:
    spans = [
        AllocationSpan(10, Use.PARAMETERS, 0),
        AllocationSpan(5, Use.ACTIVATIONS, 2, 6),
        AllocationSpan(7, Use.TEMPORARY, 4, 5),
        AllocationSpan(9, Use.GRADIENTS, 6),
    ]
    peak = peak_of(spans, phases=[(1, "forward"), (5, "backward")])
    assert (peak.num_bytes, peak.phase) == (22, "forward")
    assert peak.uses == {Use.PARAMETERS: 10, Use.ACTIVATIONS: 5, Use.TEMPORARY: 7}
