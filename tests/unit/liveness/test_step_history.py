"""The learned bound: it follows the steps of a rank, and never ends a healthy one."""

import math
import random

from hypothesis import example, given, settings
from hypothesis import strategies as st

from elastictrain.config.composed import FaultGroup
from elastictrain.liveness.progress import ENOUGH_STEPS, WINDOW_STEPS, Phase, ProgressMark, ProgressTracker
from elastictrain.liveness.watchdog import bound_s, judge, limit_s

OPTIONS = FaultGroup()
seconds = st.floats(0.001, 1e4)


def usual_s(*durations: float) -> float:
    """What a rank has learnt of steps that took as long as that."""
    now_s = 0.0
    tracker = ProgressTracker(lambda: now_s)
    tracker.first_step_done()
    for step, duration in enumerate((*durations, 0.0), start=2):
        tracker.set_phase(Phase.DATA, step=step)
        now_s += duration
    return tracker.mark.usual_s


def test_nothing_is_known_before_there_are_enough_steps() -> None:
    assert usual_s(*[1.0] * (ENOUGH_STEPS - 1)) == 0.0
    assert usual_s(*[1.0] * ENOUGH_STEPS) == 1.0


def test_a_single_stall_does_not_blunt_the_bound_and_two_do() -> None:
    assert usual_s(*[1.0] * ENOUGH_STEPS, 90.0) == 1.0
    assert usual_s(*[1.0] * ENOUGH_STEPS, 90.0, 80.0) == 80.0


def test_what_was_long_ago_does_not_count() -> None:
    assert usual_s(50.0, 50.0, *[1.0] * WINDOW_STEPS) == 1.0


@given(usual=seconds, multiple=st.floats(1.0, 100.0), floor=seconds, ceiling=seconds)
def test_the_bound_lies_between_floor_and_ceiling_and_the_ceiling_is_stronger(
    usual: float, multiple: float, floor: float, ceiling: float
) -> None:
    options = FaultGroup(hang_multiple=multiple, hang_floor_s=floor, step_timeout_s=ceiling)
    bound = bound_s(ProgressMark(Phase.REDUCE, 7, 0, 0.0, True, usual_s=usual), options)
    assert min(floor, ceiling) <= bound <= ceiling
    assert bound == min(ceiling, max(floor, multiple * usual))


def test_without_knowledge_the_ceiling_holds() -> None:
    assert bound_s(ProgressMark(Phase.REDUCE, 7, 0, 0.0, True), OPTIONS) == OPTIONS.step_timeout_s


class Life:
    """One rank in simulated time, judged by its own knowledge at the worst moment of each phase."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.tracker = ProgressTracker(lambda: self.now_s)
        self.ended = False

    def spend(self, phase: Phase, length_s: float, step: int) -> None:
        self.tracker.set_phase(phase, step=step)
        self.now_s += length_s
        mark = self.tracker.mark
        self.ended |= judge(mark, now_s=self.now_s, stop=None, options=OPTIONS, in_vain=True) is not None

    def step(self, step: int, length_s: float) -> None:
        for phase, share in ((Phase.DATA, 0.05), (Phase.FORWARD, 0.3), (Phase.BACKWARD, 0.5), (Phase.REDUCE, 0.1)):
            self.spend(phase, share * length_s, step)
        self.spend(Phase.UPDATE, 0.05 * length_s, step)
        if step == 1:
            self.tracker.first_step_done()


@settings(max_examples=40, deadline=None)
@given(median_s=st.floats(0.01, 8.0), sigma=st.floats(0.0, 0.5), seed=st.integers(0, 2**32))
@example(median_s=8.0, sigma=0.5, seed=0)
def test_a_healthy_run_whose_steps_vary_is_never_ended(median_s: float, sigma: float, seed: int) -> None:
    chance, life = random.Random(seed), Life()
    life.spend(Phase.RESTORE, 300.0, 0)
    life.step(1, 500.0)
    for step in range(2, 400):
        life.step(step, median_s * math.exp(chance.gauss(0.0, sigma)))
        if chance.random() < 0.03:
            # The collector of garbage, a disk, a neighbour.
            life.spend(Phase.BACKWARD, chance.uniform(0.0, 9.9), step)
        if step % 50 == 0:
            life.spend(Phase.EVAL, 400.0, step)
            life.spend(Phase.SAVE, 600.0, step)
    assert not life.ended


@given(step_s=st.floats(0.01, 8.0))
def test_a_hang_is_found_within_the_bound_that_was_learnt(step_s: float) -> None:
    life = Life()
    for step in range(1, 30):
        life.step(step, step_s)
    expected = max(OPTIONS.hang_floor_s, 10.0 * step_s)
    life.tracker.set_phase(Phase.FORWARD, step=30)
    assert math.isclose(bound_s(life.tracker.mark, OPTIONS), expected, rel_tol=1e-6)
    life.spend(Phase.FORWARD, 1.01 * expected, 30)
    assert life.ended


def test_what_follows_a_step_is_no_part_of_it() -> None:
    life = Life()
    for step in range(1, 30):
        life.step(step, 0.1)
        life.spend(Phase.EVAL, 50.0, step)
        life.spend(Phase.SAVE, 50.0, step)
    assert life.tracker.mark.usual_s < 0.11


def test_who_waits_for_another_is_given_the_limit() -> None:
    life = Life()
    for step in range(1, 30):
        life.step(step, 0.1)
    life.tracker.set_phase(Phase.REDUCE, step=30)
    mark = life.tracker.mark
    assert (bound_s(mark, OPTIONS), limit_s(mark, OPTIONS)) == (10.0, 120.0)
    assert judge(mark, now_s=mark.since_s + 119.0, stop=None, options=OPTIONS) is None
    assert judge(mark, now_s=mark.since_s + 11.0, stop=None, options=OPTIONS, in_vain=True) is not None
    overdue = judge(mark, now_s=mark.since_s + 121.0, stop=None, options=OPTIONS)
    assert overdue is not None
    assert overdue.hangs


def test_a_compiler_inside_a_step_takes_the_time_that_start_up_has_and_is_no_part_of_a_step() -> None:
    life = Life()
    for step in range(1, 30):
        life.step(step, 0.1)
    life.tracker.set_phase(Phase.FORWARD, step=30)
    life.tracker.compiling(begins=True)
    assert bound_s(life.tracker.mark, OPTIONS) == OPTIONS.init_timeout_s
    life.now_s += 300.0
    life.tracker.compiling(begins=False)
    assert bound_s(life.tracker.mark, OPTIONS) == 10.0
    assert life.tracker.mark.since_s == life.now_s
    life.step(31, 0.1)
    life.step(32, 0.1)
    assert life.tracker.mark.usual_s < 0.2
    assert life.tracker.mark.longest_s < 0.2
