import math
import random
import threading
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from elastictrain.config.composed import FaultGroup
from elastictrain.errors import EXIT_STOPPED, EXIT_TRANSPORT
from elastictrain.fault.stop import StopRequest
from elastictrain.liveness.progress import ENOUGH_STEPS, WINDOW_STEPS, Phase, ProgressMark, ProgressTracker
from elastictrain.liveness.watchdog import (
    LAUNCHER_PATIENCE_S,
    LOST_PATIENCE_S,
    LostPeer,
    Others,
    Overdue,
    Watchdog,
    bound_s,
    judge,
    limit_s,
)

OPTIONS = FaultGroup(
    rendezvous_timeout_s=100.0, init_timeout_s=200.0, step_timeout_s=40.0, save_timeout_s=400.0, shutdown_grace_s=10.0
)
STEP_PHASES = (Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.REDUCE, Phase.UPDATE, Phase.EVAL)
BEFORE = (Phase.START, Phase.GROUP, Phase.BUILD, Phase.RESTORE)

phases = st.sampled_from([phase for phase in Phase if phase is not Phase.STANDBY])
seconds = st.floats(0.0, 1000.0)


def mark_of(
    phase: Phase, *, step: int = 3, since_s: float = 0.0, first_step_done: bool = True, longest_s: float = 0.0
) -> ProgressMark:
    return ProgressMark(phase, step, 0, since_s, first_step_done, longest_s)


@pytest.mark.parametrize("phase", [phase for phase in STEP_PHASES if phase is not Phase.EVAL])
def test_a_step_is_bounded_generously_until_the_first_is_through_and_tightly_then(phase: Phase) -> None:
    assert bound_s(mark_of(phase, first_step_done=False), OPTIONS) == 200.0
    assert bound_s(mark_of(phase), OPTIONS) == 40.0


def test_an_evaluation_may_compile_the_model_once_more() -> None:
    assert bound_s(mark_of(Phase.EVAL), OPTIONS) == 200.0


@pytest.mark.parametrize("first_step_done", [True, False])
def test_other_phases_have_bounds_of_their_own(first_step_done: bool) -> None:
    assert bound_s(mark_of(Phase.RENDEZVOUS, first_step_done=first_step_done), OPTIONS) == 105.0
    assert bound_s(mark_of(Phase.SAVE, first_step_done=first_step_done), OPTIONS) == 400.0
    assert bound_s(mark_of(Phase.END, first_step_done=first_step_done), OPTIONS) == 10.0
    assert bound_s(mark_of(Phase.DETACH, first_step_done=first_step_done), OPTIONS) == 10.0
    assert bound_s(mark_of(Phase.STANDBY, first_step_done=first_step_done), OPTIONS) == math.inf
    for phase in BEFORE:
        assert bound_s(mark_of(phase, first_step_done=first_step_done), OPTIONS) == 200.0


@given(phase=phases, since_s=seconds, first=st.booleans(), beyond_s=st.floats(0.001, 1e6))
def test_every_phase_has_an_end_with_or_without_a_stop(phase: Phase, since_s: float, first: bool, beyond_s: float) -> None:
    mark = mark_of(phase, since_s=since_s, first_step_done=first)
    now_s = since_s + bound_s(mark, OPTIONS) + beyond_s
    for stop in (None, StopRequest("SIGTERM", now_s)):
        overdue = judge(mark, now_s=now_s, stop=stop, options=OPTIONS)
        assert overdue is not None
        assert overdue.exit_code == EXIT_TRANSPORT
        assert str(mark) in overdue.reason


@given(phase=phases, since_s=seconds, first=st.booleans(), share=st.floats(0.0, 0.999))
def test_nobody_is_ended_within_the_bound(phase: Phase, since_s: float, first: bool, share: float) -> None:
    mark = mark_of(phase, since_s=since_s, first_step_done=first)
    assert judge(mark, now_s=since_s + share * bound_s(mark, OPTIONS), stop=None, options=OPTIONS) is None


def test_exactly_at_a_bound_nobody_is_ended() -> None:
    mark, stop = mark_of(Phase.FORWARD), StopRequest("SIGTERM", 0.0)
    assert judge(mark, now_s=40.0, stop=None, options=OPTIONS) is None
    assert judge(mark, now_s=10.0, stop=stop, options=OPTIONS) is None


@pytest.mark.parametrize("phase", STEP_PHASES)
def test_after_a_stop_a_collective_that_nobody_joins_is_not_waited_for(phase: Phase) -> None:
    mark, stop = mark_of(phase, since_s=50.0), StopRequest("SIGTERM", 60.0)
    assert judge(mark, now_s=69.9, stop=stop, options=OPTIONS) is None
    overdue = judge(mark, now_s=70.1, stop=stop, options=OPTIONS)
    assert overdue is not None
    assert overdue.exit_code == EXIT_TRANSPORT
    assert "SIGTERM" in overdue.reason
    assert str(mark) in overdue.reason


@given(phase=st.sampled_from(STEP_PHASES), asked_s=seconds, progress_s=st.floats(0.0, 30.0), share=st.floats(0.0, 0.999))
def test_a_rank_that_makes_progress_after_a_stop_is_left_to_finish(
    phase: Phase, asked_s: float, progress_s: float, share: float
) -> None:
    mark = mark_of(phase, since_s=asked_s + progress_s)
    now_s = mark.since_s + share * OPTIONS.shutdown_grace_s
    assert judge(mark, now_s=now_s, stop=StopRequest("SIGTERM", asked_s), options=OPTIONS) is None


@pytest.mark.parametrize("phase", [Phase.SAVE, Phase.END])
def test_a_stop_does_not_cut_a_save_or_the_end_short(phase: Phase) -> None:
    mark = mark_of(phase)
    assert judge(mark, now_s=bound_s(mark, OPTIONS) - 1.0, stop=StopRequest("SIGTERM", 0.0), options=OPTIONS) is None


@pytest.mark.parametrize("phase", STEP_PHASES)
def test_after_a_stop_a_phase_that_is_known_to_be_long_is_given_twice_its_time(phase: Phase) -> None:
    mark, stop = mark_of(phase, since_s=50.0, longest_s=12.0), StopRequest("SIGTERM", 60.0)
    assert judge(mark, now_s=83.9, stop=stop, options=OPTIONS) is None
    overdue = judge(mark, now_s=84.1, stop=stop, options=OPTIONS)
    assert overdue is not None
    assert overdue.exit_code == EXIT_TRANSPORT
    assert "24 s" in overdue.reason


@pytest.mark.parametrize("phase", [Phase.RENDEZVOUS, *BEFORE, *STEP_PHASES])
def test_before_the_first_step_there_is_nothing_to_save_so_a_stop_is_simply_obeyed(phase: Phase) -> None:
    mark = mark_of(phase, step=int(phase in STEP_PHASES), first_step_done=False)
    overdue = judge(mark, now_s=10.1, stop=StopRequest("SIGUSR1", 0.0), options=OPTIONS)
    assert overdue is not None
    assert overdue.exit_code == EXIT_STOPPED


class Ended:
    """Notes how often and why a process would have ended."""

    def __init__(self) -> None:
        self.calls: list[Overdue] = []
        self.happened = threading.Event()

    def __call__(self, overdue: Overdue) -> None:
        self.calls.append(overdue)
        self.happened.set()


def test_a_real_thread_ends_a_stuck_process_until_it_has_ended() -> None:
    ended = Ended()
    tracker = ProgressTracker(lambda: 0.0)
    tracker.set_phase(Phase.REDUCE, step=9)
    watchdog = Watchdog(
        OPTIONS, mark=lambda: tracker.mark, stop=lambda: None, end=ended, clock=lambda: 1000.0, interval_s=0.005
    )
    watchdog.start()
    assert ended.happened.wait(5.0)
    threading.Event().wait(0.05)
    watchdog.close()
    assert {call.exit_code for call in ended.calls} == {EXIT_TRANSPORT}
    assert len(ended.calls) > 1
    assert str(tracker.mark) in ended.calls[0].reason


def test_a_stop_request_that_comes_later_is_seen() -> None:
    ended = Ended()
    requests: list[StopRequest] = []
    mark = mark_of(Phase.BACKWARD, since_s=0.0)
    watchdog = Watchdog(
        OPTIONS,
        mark=lambda: mark,
        stop=lambda: requests[0] if requests else None,
        end=ended,
        clock=lambda: 30.0,
        interval_s=0.005,
    )
    watchdog.start()
    assert not ended.happened.wait(0.05)
    requests.append(StopRequest("SIGTERM", 1.0))
    assert ended.happened.wait(5.0)
    watchdog.close()


def test_a_closed_watchdog_ends_nobody() -> None:
    ended = Ended()
    now_s = [0.0]
    mark = mark_of(Phase.REDUCE)
    watchdog = Watchdog(OPTIONS, mark=lambda: mark, stop=lambda: None, end=ended, clock=lambda: now_s[0], interval_s=0.005)
    watchdog.start()
    watchdog.close()
    now_s[0] = 1000.0
    assert not ended.happened.wait(0.05)
    assert not [thread for thread in threading.enumerate() if thread.name == "watchdog"]


@given(since_s=seconds, first=st.booleans(), waited_s=st.floats(0.0, 1e9), asked=st.booleans(), lost=st.booleans())
def test_a_process_that_waits_for_a_rank_is_never_ended(
    since_s: float, first: bool, waited_s: float, asked: bool, lost: bool
) -> None:
    mark, now_s = mark_of(Phase.STANDBY, since_s=since_s, first_step_done=first), since_s + waited_s
    stop = StopRequest("SIGTERM", since_s) if asked else None
    others = Others(LostPeer("rank 1 of this host", since_s) if lost else None)
    assert judge(mark, now_s=now_s, stop=stop, options=OPTIONS, others=others) is None


@pytest.mark.parametrize("phase", [phase for phase in Phase if phase not in (Phase.STANDBY, Phase.DETACH, Phase.END)])
def test_a_process_does_not_wait_for_one_that_is_gone(phase: Phase) -> None:
    mark, lost = mark_of(phase), LostPeer("rank 1 of this host", 5.0)
    assert judge(mark, now_s=5.0 + LOST_PATIENCE_S, stop=None, options=OPTIONS, others=Others(lost)) is None
    overdue = judge(mark, now_s=5.1 + LOST_PATIENCE_S, stop=None, options=OPTIONS, others=Others(lost))
    assert overdue is not None
    assert (overdue.exit_code, overdue.show_stacks, overdue.hangs) == (EXIT_TRANSPORT, False, False)
    assert lost.name in overdue.reason
    assert str(mark) in overdue.reason


def test_where_no_collective_notices_it_nobody_is_waited_for() -> None:
    lost = LostPeer("rank 1 of this host", 5.0, patience_s=0.0)
    assert judge(mark_of(Phase.REDUCE), now_s=5.01, stop=None, options=OPTIONS, others=Others(lost)) is not None


@pytest.mark.parametrize("phase", [Phase.DETACH, Phase.END])
def test_who_leaves_a_group_waits_for_nobody_in_it(phase: Phase) -> None:
    lost, stop = LostPeer("rank 1 of this host", 0.0), StopRequest("SIGTERM", 0.0)
    assert judge(mark_of(phase), now_s=9.9, stop=stop, options=OPTIONS, others=Others(lost)) is None
    assert judge(mark_of(phase), now_s=10.1, stop=None, options=OPTIONS, others=Others(lost)) is not None


def test_a_lost_rank_is_left_to_a_launcher_for_longer() -> None:
    lost = LostPeer("rank 1 of this host", 5.0, patience_s=LAUNCHER_PATIENCE_S)
    mark = mark_of(Phase.REDUCE)
    assert judge(mark, now_s=5.0 + LAUNCHER_PATIENCE_S, stop=None, options=OPTIONS, others=Others(lost)) is None
    overdue = judge(mark, now_s=5.1 + LAUNCHER_PATIENCE_S, stop=None, options=OPTIONS, others=Others(lost))
    assert overdue is not None
    assert overdue.exit_code == EXIT_TRANSPORT


def test_the_watchdog_ends_a_process_whose_peer_is_gone() -> None:
    ended: list[Overdue] = []
    called = threading.Event()

    def end(overdue: Overdue) -> None:
        ended.append(overdue)
        called.set()

    watchdog = Watchdog(
        OPTIONS,
        mark=lambda: mark_of(Phase.FORWARD, since_s=10.0),
        stop=lambda: None,
        end=end,
        others=lambda: Others(LostPeer("rank 1 of this host", 10.0)),
        clock=lambda: 11.0,
        interval_s=0.001,
    )
    watchdog.start()
    assert called.wait(10)
    watchdog.close()
    assert {one.exit_code for one in ended} == {EXIT_TRANSPORT}


def test_a_watchdog_that_was_stopped_with_its_process_takes_that_for_no_silence() -> None:
    ended = Ended()
    beats: list[int] = []
    now_s = [0.0]
    watchdog = Watchdog(
        OPTIONS,
        mark=lambda: mark_of(Phase.REDUCE),
        stop=lambda: None,
        end=ended,
        beat=lambda: beats.append(1),
        clock=lambda: now_s[0],
        interval_s=0.005,
    )
    watchdog.start()
    assert not ended.happened.wait(0.05)
    now_s[0] = 1000.0
    assert not ended.happened.wait(0.1)
    for _ in range(50):
        now_s[0] += 1.0
        ended.happened.wait(0.01)
    assert ended.happened.wait(5.0)
    assert now_s[0] > 1030.0
    watchdog.close()
    assert beats


def test_a_silence_in_vain_is_ended_at_the_learned_bound() -> None:
    mark = ProgressMark(Phase.REDUCE, 3, 0, 0.0, True, usual_s=1.5)
    assert bound_s(mark, OPTIONS) == 15.0
    assert judge(mark, now_s=15.1, stop=None, options=OPTIONS) is None
    overdue = judge(mark, now_s=15.1, stop=None, options=OPTIONS, others=Others(in_vain=True))
    assert overdue is not None
    assert overdue.hangs
    assert overdue.exit_code == EXIT_TRANSPORT
    assert ["15.1 s" in overdue.reason, "15 s)" in overdue.reason, str(mark) in overdue.reason] == [True] * 3
    lost = judge(mark, now_s=15.1, stop=None, options=OPTIONS, others=Others(LostPeer("rank 1", 0.0)))
    assert lost is not None
    assert not lost.hangs


@pytest.mark.parametrize("begun", [True, False])
def test_stacks_are_shown_of_what_trains_and_not_of_what_is_being_built(begun: bool) -> None:
    mark = replace(mark_of(Phase.FORWARD if begun else Phase.BUILD), first_step_done=begun)
    overdue = judge(
        mark, now_s=1000.0, stop=StopRequest("SIGINT", 0.0), options=replace(OPTIONS, init_timeout_s=1e4, step_timeout_s=1e4)
    )
    assert overdue is not None
    assert overdue.show_stacks is begun


DEFAULTS = FaultGroup()
lengths_s = st.floats(0.001, 1e4)


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


@given(usual=lengths_s, multiple=st.floats(1.0, 100.0), floor=lengths_s, ceiling=lengths_s)
def test_the_bound_lies_between_floor_and_ceiling_and_the_ceiling_is_stronger(
    usual: float, multiple: float, floor: float, ceiling: float
) -> None:
    options = FaultGroup(hang_multiple=multiple, hang_floor_s=floor, step_timeout_s=ceiling)
    bound = bound_s(ProgressMark(Phase.REDUCE, 7, 0, 0.0, True, usual_s=usual), options)
    assert min(floor, ceiling) <= bound <= ceiling
    assert bound == min(ceiling, max(floor, multiple * usual))


def test_without_knowledge_the_ceiling_holds() -> None:
    assert bound_s(ProgressMark(Phase.REDUCE, 7, 0, 0.0, True), DEFAULTS) == DEFAULTS.step_timeout_s


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
        self.ended |= judge(mark, now_s=self.now_s, stop=None, options=DEFAULTS, others=Others(in_vain=True)) is not None

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
    expected = max(DEFAULTS.hang_floor_s, 10.0 * step_s)
    life.tracker.set_phase(Phase.FORWARD, step=30)
    assert math.isclose(bound_s(life.tracker.mark, DEFAULTS), expected, rel_tol=1e-6)
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
    assert (bound_s(mark, DEFAULTS), limit_s(mark, DEFAULTS)) == (10.0, 120.0)
    assert judge(mark, now_s=mark.since_s + 119.0, stop=None, options=DEFAULTS) is None
    assert judge(mark, now_s=mark.since_s + 11.0, stop=None, options=DEFAULTS, others=Others(in_vain=True)) is not None
    overdue = judge(mark, now_s=mark.since_s + 121.0, stop=None, options=DEFAULTS)
    assert overdue is not None
    assert overdue.hangs


def test_a_compiler_inside_a_step_takes_the_time_that_start_up_has_and_is_no_part_of_a_step() -> None:
    life = Life()
    for step in range(1, 30):
        life.step(step, 0.1)
    life.tracker.set_phase(Phase.FORWARD, step=30)
    life.tracker.compiling(begins=True)
    assert bound_s(life.tracker.mark, DEFAULTS) == DEFAULTS.init_timeout_s
    life.now_s += 300.0
    life.tracker.compiling(begins=False)
    assert bound_s(life.tracker.mark, DEFAULTS) == 10.0
    assert life.tracker.mark.since_s == life.now_s
    life.step(31, 0.1)
    life.step(32, 0.1)
    assert life.tracker.mark.usual_s < 0.2
    assert life.tracker.mark.longest_s < 0.2
