import pytest

from elastictrain.preflight.group.bandwidth import Point, factor, fitting_sizes, has_time, num_rounds, size_text
from elastictrain.preflight.group.baseline import KEPT, BusBaseline, decode_bus, encode_bus, fold_bus
from elastictrain.preflight.group.collectives import Collective

GB = 1 << 30


@pytest.mark.parametrize(
    ("collective", "world_size", "expected"),
    [
        (Collective.ALL_REDUCE, 2, 1.0),
        (Collective.ALL_REDUCE, 8, 1.75),
        (Collective.ALL_GATHER, 8, 0.875),
        (Collective.REDUCE_SCATTER, 4, 0.75),
        (Collective.ALL_TO_ALL, 2, 0.5),
        (Collective.BROADCAST, 8, 1.0),
        (Collective.SEND_RECV, 8, 1.0),
    ],
)
def test_factors(collective: Collective, world_size: int, expected: float) -> None:
    assert factor(collective, world_size) == expected


def test_bus_bandwidth_of_a_measured_run() -> None:
    # 1 GiB between 2 ranks in 3.25 ms.
    assert Point(Collective.ALL_REDUCE, GB, 0.00325, 2).bus_gbs == pytest.approx(330.4, abs=0.1)


def test_only_what_fits_into_memory_is_sent() -> None:
    sizes = (1, 10, 100)
    assert fitting_sizes(sizes, free_bytes=4000) == sizes
    assert fitting_sizes(sizes, free_bytes=399) == (1, 10)
    assert fitting_sizes(sizes, free_bytes=0) == (1,)


def test_slow_links_end_the_sweep_early() -> None:
    assert has_time(0.0, growth=1, spent_s=0, budget_s=1)
    assert has_time(0.01, growth=4, spent_s=0.5, budget_s=1)
    assert not has_time(0.2, growth=4, spent_s=0.5, budget_s=1)


def test_rounds() -> None:
    assert num_rounds(0.01, budget_s=0.1) == 10
    assert num_rounds(5.0, budget_s=0.1) == 3
    assert num_rounds(0.0, budget_s=0.1) == 40


def test_sizes_as_people_write_them() -> None:
    assert [size_text(size) for size in (512, 3 << 10, 64 << 20, GB)] == ["512 B", "3 KB", "64 MB", "1 GB"]
    # Three ranks do not divide it.
    assert size_text((1 << 20) - 4) == "1 MB"


def test_the_baseline_is_a_median_of_groups_alike() -> None:
    baseline = None
    for seconds in (1.0, 2.0, 4.0):
        baseline = fold_bus(baseline, [Point(Collective.ALL_REDUCE, 10**9, seconds, 2)], device="H200", num_hosts=1)
    assert baseline is not None
    again = decode_bus(encode_bus(baseline))
    assert again == baseline
    point = Point(Collective.ALL_REDUCE, 10**9, 9.0, 2)
    assert again.typical_gbs(point, device="H200", num_hosts=1) == 0.5
    assert again.typical_gbs(point, device="H200", num_hosts=2) is None
    assert again.typical_gbs(point, device="A100", num_hosts=1) is None
    assert again.typical_gbs(Point(Collective.ALL_GATHER, 10**9, 1.0, 2), device="H200", num_hosts=1) is None


def test_the_baseline_forgets() -> None:
    baseline = BusBaseline()
    for _ in range(KEPT + 5):
        baseline = fold_bus(baseline, [Point(Collective.BROADCAST, 10**9, 1.0, 2)], device="x", num_hosts=1)
    assert [len(known) for known in baseline.figures.values()] == [KEPT]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b'{"version": 2, "bus_gbs": {}}',
        b'{"version": 1}',
        b'{"version": 1, "bus_gbs": {"a": 3}}',
        b'{"version": 1, "bus_gbs": {"a": [true]}}',
        b'{"version": 1, "bus_gbs": {"a": ["x"]}}',
        b'{"version": 1, "bus_gbs": {"a": [-1]}}',
        b'{"version": 1, "bus_gbs": {"a": [NaN]}}',
        b"\xff\xfe",
        b"[" * 100_000,
    ],
)
def test_a_garbled_baseline_is_none(data: bytes) -> None:
    assert decode_bus(data) is None
