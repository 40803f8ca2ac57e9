import random
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastictrain.liveness.diagnosis import LEFT_TO_THE_GUILTY_S, RankStatus, diagnose, paragraph, progress_order
from elastictrain.liveness.flight_recorder import CollectiveCall, Entered
from elastictrain.liveness.progress import Phase, ProgressMark

IN_ORDER = (
    (Phase.START, 0, 0),
    (Phase.RENDEZVOUS, 0, 0),
    (Phase.PREFLIGHT, 0, 0),
    (Phase.BUILD, 0, 0),
    (Phase.RESTORE, 0, 0),
    (Phase.DATA, 1, 0),
    (Phase.FORWARD, 1, 0),
    (Phase.BACKWARD, 1, 0),
    (Phase.DATA, 1, 1),
    (Phase.FORWARD, 1, 1),
    (Phase.BACKWARD, 1, 1),
    (Phase.REDUCE, 1, 0),
    (Phase.UPDATE, 1, 0),
    (Phase.SAVE, 1, 0),
    (Phase.DATA, 2, 0),
    (Phase.END, 0, 0),
)


def status(
    rank: int,
    phase: Phase,
    step: int = 7,
    *,
    micro_batch: int = 0,
    silent_s: float = 11.0,
    still_s: float = 0.0,
    sequences: Mapping[str, int] | None = None,
    collective: str = "",
) -> RankStatus:
    mark = ProgressMark(phase, step, micro_batch, 0.0, True)
    calls = tuple(CollectiveCall(group, number, "all_reduce") for group, number in (sequences or {}).items())
    entered = Entered(sequences or {}, calls, last=collective)
    return RankStatus(rank, f"host-{rank}", mark, silent_s, 10.0, still_s, entered)


ABSENT = "did not enter"
MISMATCH = "mismatch"


def guilty(*statuses: RankStatus) -> tuple[str, list[int]]:
    found = diagnose(statuses, frozen_s=3.0)
    assert {one.rank for one in found.guilty} | {one.rank for one in found.waiting} == {one.rank for one in statuses}
    return found.reason, [one.rank for one in found.guilty]


def test_the_program_has_one_order() -> None:
    marks = [ProgressMark(phase, step, micro_batch, 0.0, True) for phase, step, micro_batch in IN_ORDER]
    assert sorted(random.Random(0).sample(marks, len(marks)), key=progress_order) == marks


def test_a_rank_that_is_behind_is_who_the_others_wait_for() -> None:
    assert guilty(status(0, Phase.REDUCE), status(1, Phase.DATA), status(2, Phase.REDUCE)) == ("behind", [1])
    assert guilty(status(0, Phase.UPDATE, 6), status(1, Phase.DATA, 7)) == ("behind", [0])


def test_a_frozen_rank_is_guilty_wherever_it_is() -> None:
    assert guilty(status(0, Phase.DATA), status(1, Phase.REDUCE, still_s=3.1)) == ("frozen", [1])


def test_where_all_are_silent_it_is_the_store_that_does_not_tell() -> None:
    assert guilty(status(0, Phase.DATA, still_s=9.0), status(1, Phase.REDUCE, still_s=9.0)) == ("behind", [0])


def test_at_the_same_place_the_one_is_guilty_that_did_not_enter_the_collective() -> None:
    entered = status(0, Phase.BACKWARD, sequences={"0": 57, "1": 3})
    absent = status(1, Phase.BACKWARD, sequences={"0": 56, "1": 3})
    assert guilty(entered, absent) == (ABSENT, [1])
    # Whoever tells nothing is not accused.
    assert guilty(entered, status(1, Phase.BACKWARD)) == ("nobody", [])


def test_when_all_are_in_the_same_collective_nobody_is_singled_out() -> None:
    both = [status(rank, Phase.BACKWARD, sequences={"0": 57}) for rank in (0, 1)]
    assert guilty(*both) == ("nobody", [])


def test_ranks_that_wait_for_each_other_are_at_fault_together_or_the_fewest() -> None:
    first, second = {"0": 5, "1": 4}, {"0": 4, "1": 5}
    assert guilty(*(status(rank, Phase.BACKWARD, sequences=one) for rank, one in enumerate([first, second]))) == (
        MISMATCH,
        [0, 1],
    )
    assert guilty(*(status(rank, Phase.BACKWARD, sequences=one) for rank, one in enumerate([first, second, first]))) == (
        MISMATCH,
        [1],
    )


def test_a_rank_that_is_one_call_too_far_ahead_is_not_the_innocent_one() -> None:
    waiting = [status(rank, Phase.BACKWARD, sequences={"0": 58}) for rank in (0, 2)]
    left_out = status(1, Phase.DATA, 8, sequences={"0": 57})
    assert guilty(waiting[0], left_out, waiting[1]) == (MISMATCH, [1])
    # The same with one call too many: then it waits for the others, and they have gone on.
    gone_on = [status(rank, Phase.DATA, 8, sequences={"0": 57}) for rank in (0, 2)]
    assert guilty(gone_on[0], status(1, Phase.BACKWARD, sequences={"0": 58}), gone_on[1]) == (MISMATCH, [1])
    # Of two, either may be wrong.
    assert guilty(waiting[0], left_out) == (MISMATCH, [0, 1])


def test_who_is_waited_for_by_a_rank_that_waits_itself_is_guilty() -> None:
    held_up = [status(0, Phase.BACKWARD, sequences={"0": 5, "1": 3}), status(1, Phase.BACKWARD, sequences={"0": 4, "1": 3})]
    sleeping = status(2, Phase.BACKWARD, sequences={"1": 2})
    assert guilty(*held_up, sleeping) == (ABSENT, [2])


def test_a_rank_that_is_alone_waits_for_nobody() -> None:
    assert guilty(status(0, Phase.FORWARD)) == ("behind", [0])


@pytest.mark.parametrize(
    ("silent_s", "in_vain"), [(10.0 + LEFT_TO_THE_GUILTY_S + 0.1, True), (10.0 + LEFT_TO_THE_GUILTY_S - 0.1, False)]
)
def test_who_waits_leaves_the_guilty_one_its_own_bound_and_a_little_more(silent_s: float, in_vain: bool) -> None:
    found = diagnose([status(0, Phase.REDUCE, silent_s=50.0), status(1, Phase.DATA, silent_s=silent_s)], frozen_s=3.0)
    assert found.is_in_vain(0) is in_vain
    assert found.is_in_vain(1)


def test_where_nobody_is_to_blame_waiting_may_help() -> None:
    found = diagnose([status(rank, Phase.REDUCE, silent_s=100.0) for rank in (0, 1)], frozen_s=3.0)
    assert not found.is_in_vain(0)


def test_time_passes_for_all() -> None:
    found = diagnose([status(0, Phase.REDUCE), status(1, Phase.DATA)], frozen_s=3.0).later(2.0)
    assert [one.silent_s for one in (*found.guilty, *found.waiting)] == [13.0, 13.0]


def test_the_paragraph_names_rank_host_place_and_who_waits() -> None:
    found = diagnose(
        [
            status(0, Phase.REDUCE, collective="all_reduce no. 58 of group 0"),
            status(1, Phase.FORWARD, micro_batch=1, silent_s=10.25, collective="all_reduce no. 57 of group 0"),
        ],
        frozen_s=3.0,
    )
    assert paragraph(found) == (
        "hang: rank 1 on host-1 has been in forward of step 7, micro-batch 1 for 10.2 s (bound 10 s); "
        "the last collective that it entered is all_reduce no. 57 of group 0. "
        "rank 0 on host-0 waits for it in reduce of step 7, all_reduce no. 58 of group 0"
    )


def test_a_thousand_ranks_are_not_all_listed() -> None:
    found = diagnose([status(rank, Phase.DATA if rank == 5 else Phase.REDUCE) for rank in range(1000)], frozen_s=3.0)
    text = paragraph(found)
    assert "host-5" in text
    assert "991" in text
    assert len(text) < 500
    many = diagnose([status(rank, Phase.REDUCE if rank == 0 else Phase.DATA) for rank in range(20)], frozen_s=3.0)
    assert "11 more" in paragraph(many)


positions = st.tuples(st.sampled_from([one for one in Phase if one is not Phase.END]), st.integers(1, 3), st.integers(0, 2))


@given(st.lists(positions, min_size=1, max_size=6))
def test_nobody_ahead_of_another_is_accused(places: list[tuple[Phase, int, int]]) -> None:
    statuses = [status(rank, phase, step, micro_batch=micro) for rank, (phase, step, micro) in enumerate(places)]
    found = diagnose(statuses, frozen_s=3.0)
    least = min(progress_order(one.mark) for one in statuses)
    assert all(progress_order(one.mark) == least for one in found.guilty)
