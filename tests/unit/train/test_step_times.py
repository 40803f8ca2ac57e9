from dataclasses import dataclass, field

import pytest

from elastictrain.train.step_times import LATE, StepTimes
from elastictrain.train.straggler import PHASES


@dataclass
class Ticks:
    """A clock whose marks cannot be read before they have passed."""

    now_s: float = 0.0
    passed_s: float = 0.0
    released: list[float] = field(default_factory=list)

    def now(self) -> float:
        return self.now_s

    def between_s(self, first: float, second: float, /) -> float:
        assert second <= self.passed_s
        return second - first

    def release(self, marks: list[float], /) -> None:
        self.released += marks


def test_a_step_lasts_until_the_next_one_and_is_told_late() -> None:
    ticks = Ticks()
    times = StepTimes(ticks)
    told = []
    ends_s = [0.0]
    for step in range(1, 8):
        # The figures of the step before the last one are on the host by now.
        ticks.passed_s = ends_s[-2] if len(ends_s) > 1 else 0.0
        told.append(times.begin())
        for index, phase in enumerate(("data", "forward", "backward", "", "update", "between"), start=1):
            times.mark(phase)
            ticks.now_s += step * index
        ends_s.append(ticks.now_s)
    assert told[:LATE] == [[0.0] * (1 + len(PHASES))] * LATE
    for step, figures in enumerate(told[LATE:], start=1):
        assert figures == pytest.approx([step * one for one in (21, 1, 2, 3, 5, 6)])
    assert len(ticks.released) == len(told[LATE:]) * 7


def test_a_phase_may_come_several_times() -> None:
    ticks = Ticks(passed_s=1e9)
    times = StepTimes(ticks)
    for _ in range(1 + LATE):
        figures = times.begin()
        for phase in ("forward", "", "forward", "backward", "forward", ""):
            times.mark(phase)
            ticks.now_s += 1.0
    assert dict(zip(PHASES, figures[1:], strict=True)) == {"data": 0, "forward": 3, "backward": 1, "update": 0, "between": 0}
    assert figures[0] == 6.0


def test_what_goes_on_needs_no_mark() -> None:
    ticks = Ticks(passed_s=1e9)
    times = StepTimes(ticks)
    for _ in range(1 + LATE):
        figures = times.begin()
        for phase in ("", "data", "data", "forward", "", "", "update"):
            times.mark(phase)
            ticks.now_s += 1.0
    assert dict(zip(PHASES, figures[1:], strict=True)) == {"data": 2, "forward": 1, "backward": 0, "update": 1, "between": 0}
    assert (figures[0], len(ticks.released)) == (7.0, 5)
