import time
from math import isnan, nan

import pytest

from elastictrain.preflight.links.responder import Meter, part_waited, read_waiting


def waited(*, passed_s: float, before: float, after: float) -> float:
    return part_waited((10.0, before), (10.0 + passed_s, after))


def test_the_part_of_the_time_without_a_processor() -> None:
    assert waited(passed_s=0.4, before=1.0, after=1.1) == pytest.approx(0.25)
    assert waited(passed_s=0.4, before=1.0, after=1.0) == 0.0
    assert waited(passed_s=0.4, before=1.0, after=9.0) == 1.0


def test_what_the_kernel_does_not_tell_counts_as_none() -> None:
    assert waited(passed_s=0.4, before=nan, after=1.0) == 0.0
    assert waited(passed_s=0.4, before=1.0, after=nan) == 0.0
    assert waited(passed_s=0.0, before=1.0, after=2.0) == 0.0


def test_sleeping_is_not_waiting() -> None:
    before = read_waiting()
    assert isnan(before[1]) or before[1] >= 0.0
    time.sleep(0.05)
    assert part_waited(before, read_waiting()) < 0.9


def test_the_best_stretch_counts() -> None:
    meter = Meter()
    for tick in range(301):
        # A processor that is busy in the middle.
        meter.add(1000 if tick < 100 or tick >= 200 else 10, now_s=0.001 * tick)
    assert meter.best_bytes_per_s() == pytest.approx(1e6, rel=0.02)


def test_what_comes_at_once_is_no_rate() -> None:
    burst = Meter()
    burst.add(1 << 20, now_s=1.0)
    assert burst.best_bytes_per_s() == 0.0
    for tick in range(1, 31):
        burst.add(1000, now_s=1.0 + 0.01 * tick)
    assert burst.best_bytes_per_s() == pytest.approx(1e5, rel=0.05)


def test_nothing_is_nothing() -> None:
    assert Meter().best_bytes_per_s() == 0.0


def test_a_short_stream_counts_as_a_whole() -> None:
    meter = Meter()
    for tick in range(5):
        meter.add(100, now_s=0.01 * tick)
    assert meter.best_bytes_per_s() == pytest.approx(1e4)
