import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastictrain.liveness.progress import Phase
from elastictrain.liveness.rank_monitor import ENDING_S, PULSE_S, SURVIVOR_S, judge
from tests.unit.liveness.observed_ranks import seen


def kinds(*ranks: object) -> list[tuple[int, str]]:
    return [(one.seen.marks.rank, one.kind) for one in judge(ranks)]  # type: ignore[arg-type]


def test_a_healthy_host_is_left_alone() -> None:
    assert kinds(seen(0), seen(1, unchanged_s=9.0, still_s=0.3)) == []


@pytest.mark.parametrize(("still_s", "expected"), [(8.1, [(1, "stopped")]), (7.9, [])])
def test_who_is_stopped_is_given_the_time_to_be_continued(still_s: float, expected: list[tuple[int, str]]) -> None:
    assert kinds(seen(0), seen(1, phase=Phase.SAVE, unchanged_s=still_s, still_s=still_s, stopped=True)) == expected


@pytest.mark.parametrize(
    ("unchanged_s", "still_s", "expected"),
    [
        (10.1, PULSE_S + 0.1, [(0, "frozen")]),
        (9.9, 9.9, []),
        # It runs: it knows more of the group than we, and ends itself.
        (100.0, 0.2, []),
        (143.1, 0.2, [(0, "stuck")]),
        (142.9, 0.2, []),
    ],
)
def test_who_cannot_end_itself_is_ended(unchanged_s: float, still_s: float, expected: list[tuple[int, str]]) -> None:
    assert kinds(seen(0, unchanged_s=unchanged_s, still_s=still_s)) == expected


def test_who_says_why_it_ends_is_not_taken_for_frozen() -> None:
    assert kinds(seen(0, unchanged_s=15.0, still_s=5.0, ending=True)) == []


def test_a_survivor_is_not_waited_for() -> None:
    gone = seen(1, gone_s=SURVIVOR_S + 0.1)
    assert kinds(seen(0), gone) == [(0, "left behind")]
    assert kinds(seen(0), seen(1, gone_s=SURVIVOR_S - 0.1)) == []
    assert kinds(seen(0, ending=True), gone) == []
    assert kinds(seen(0, ending=True), seen(1, gone_s=ENDING_S + 0.1)) == [(0, "left behind")]


def test_at_the_end_of_a_run_the_others_leave_first() -> None:
    assert kinds(seen(0), seen(1, phase=Phase.END, gone_s=60.0)) == []
    assert kinds(seen(0, phase=Phase.END), seen(1, gone_s=60.0)) == []


@given(unchanged_s=st.floats(0.0, 9.9), still_s=st.floats(0.0, 9.9), phase=st.sampled_from(list(Phase)))
def test_nobody_is_ended_within_its_bound(unchanged_s: float, still_s: float, phase: Phase) -> None:
    assert kinds(seen(0, phase=phase, unchanged_s=unchanged_s, still_s=still_s)) == []


@given(st.floats(0.0, 1e4), st.floats(0.0, 1e4), st.booleans())
def test_the_dead_are_not_ended_again(unchanged_s: float, still_s: float, stopped: bool) -> None:
    assert kinds(seen(0, unchanged_s=unchanged_s, still_s=still_s, stopped=stopped, gone_s=9.0)) == []
