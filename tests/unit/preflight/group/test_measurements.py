import pytest

from elastictrain.preflight.group.measurements import Point, factor, has_time, num_rounds, size_text

GB = 1 << 30


@pytest.mark.parametrize(("world_size", "expected"), [(2, 1.0), (4, 1.5), (8, 1.75)])
def test_factors(world_size: int, expected: float) -> None:
    assert factor(world_size) == expected


def test_bus_bandwidth_of_a_measured_run() -> None:
    # 1 GiB between 2 ranks in 3.25 ms.
    assert Point(GB, 0.00325, 2).bus_gbs == pytest.approx(330.4, abs=0.1)


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
