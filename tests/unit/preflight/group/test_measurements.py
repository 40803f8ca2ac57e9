import pytest

from elastictrain.preflight.group.measurements import BandwidthPoint, size_text

GB = 1 << 30


@pytest.mark.parametrize(("world_size", "gbs"), [(2, 1.0), (4, 1.5), (8, 1.75)])
def test_the_bus_carries_more_between_more_ranks(world_size: int, gbs: float) -> None:
    assert BandwidthPoint(10**9, 1.0, world_size).bus_gbs == gbs


def test_bus_bandwidth_of_a_measured_run() -> None:
    # 1 GiB between 2 ranks in 3.25 ms.
    assert BandwidthPoint(GB, 0.00325, 2).bus_gbs == pytest.approx(330.4, abs=0.1)


def test_sizes_as_people_write_them() -> None:
    assert [size_text(size) for size in (512, 3 << 10, 64 << 20, GB)] == ["512 B", "3 KB", "64 MB", "1 GB"]
    # Three ranks do not divide it.
    assert size_text((1 << 20) - 4) == "1 MB"
