import time

import pytest

from elastictrain.preflight.links.processor import ProcessorWait, read_waited_s


def waited(*, passed_s: float, before: float | None, after: float | None) -> float:
    times, readings = iter([10.0, 10.0 + passed_s]), iter([before, after])
    return ProcessorWait(clock=lambda: next(times), read=lambda: next(readings)).part()


def test_the_part_of_the_time_without_a_processor() -> None:
    assert waited(passed_s=0.4, before=1.0, after=1.1) == pytest.approx(0.25)
    assert waited(passed_s=0.4, before=1.0, after=1.0) == 0.0
    assert waited(passed_s=0.4, before=1.0, after=9.0) == 1.0


def test_what_the_kernel_does_not_tell_counts_as_none() -> None:
    assert waited(passed_s=0.4, before=None, after=1.0) == 0.0
    assert waited(passed_s=0.4, before=1.0, after=None) == 0.0
    assert waited(passed_s=0.0, before=1.0, after=2.0) == 0.0


def test_sleeping_is_not_waiting() -> None:
    found = read_waited_s()
    assert found is None or found >= 0.0
    waiting = ProcessorWait()
    time.sleep(0.05)
    assert waiting.part() < 0.9
