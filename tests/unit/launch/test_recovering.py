"""Which rung of the ladder follows a failure, by a table and over random histories."""

from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastictrain.identity import RecoveryPlan, Rung
from elastictrain.launch.membership.records import End, EndKind, Generation, GenerationFailure
from elastictrain.launch.recovering import Recovering, after_end
from tests.unit.launch.membership.made import end, generation, member

DIED = end("a", EndKind.FAILED, 137, step=7)
BROKE = end("a", EndKind.FAILED, 71, step=7)
SILENT = end("a", EndKind.LOST, 71, lost="b")
HUNG = end("a", EndKind.FAILED, 71, blames=("b",))
BUG = end("b", EndKind.FAILED, 70)


def after(last: End, *, hosts: str = "ab", times: int = 1) -> Recovering:
    return Recovering(generation(1, hosts), last, since=1234.5, times=times, lost=("rank 1 on a",), finished_step=5)


@pytest.mark.parametrize(
    ("last", "following", "times", "rung"),
    [
        (DIED, "ab", 1, "in_place"),
        (DIED, "ab", 2, "in_place"),
        (DIED, "ab", 3, "restart"),
        (DIED, "ab", 30, "restart"),
        (BUG, "ab", 1, "in_place"),
        (HUNG, "ab", 1, "in_place"),
        (SILENT, "ab", 1, "in_place"),
        # Only connections broke, which may be the network.
        (BROKE, "ab", 1, "restart"),
        (BROKE, "a", 1, "regroup"),
        (DIED, "a", 1, "regroup"),
        (DIED, "abc", 1, "regroup"),
        (DIED, "b", 3, "regroup"),
        # Ranks belong to other hosts then.
        (DIED, "ba", 1, "regroup"),
        (SILENT, "a", 1, "regroup"),
    ],
)
def test_the_cheapest_rung_that_can_work(last: End, following: str, times: int, rung: Rung) -> None:
    assert after(last, times=times).rung(generation(2, following)) == rung


def test_another_number_of_workers_is_another_group() -> None:
    following = generation(2, "ab")
    more = replace(following, members=(member("a", processes=2), following.members[1]))
    assert after(DIED).rung(more) == "regroup"


@pytest.mark.parametrize("change", ["number", "port", "address"])
def test_what_a_new_generation_changes_anyway_changes_no_rung(change: str) -> None:
    following = generation(2, "ab")
    following = {
        "number": replace(following, number=9),
        "port": replace(following, master_port=1),
        "address": replace(following, members=tuple(replace(one, address="other", watch_port=1) for one in following.members)),
    }[change]
    assert after(DIED).rung(following) == "in_place"


def test_the_plan_tells_what_is_known_and_the_newest_step_that_was_finished() -> None:
    plan = after(DIED).plan(generation(2, "ab"))
    assert plan == RecoveryPlan("in_place", ("rank 1 on a",), DIED.reason, 1234.5, 5)


ends = st.builds(
    end,
    st.sampled_from("ab"),
    st.sampled_from([EndKind.FAILED, EndKind.LOST]),
    st.sampled_from([64, 69, 70, 71, 74, 75, 78, 137, 143]),
    step=st.integers(0, 50),
    lost=st.sampled_from(["", "b"]),
    blames=st.sampled_from([(), ("a",), ("b",)]),
)
groups = st.lists(st.sampled_from("abcd"), min_size=1, max_size=4, unique=True).map("".join)


@given(st.lists(st.tuples(groups, ends), min_size=1, max_size=12), groups)
def test_over_any_history(history: list[tuple[str, End]], last: str) -> None:
    """Generation after generation fails before its first step."""
    made: list[Generation] = [generation(number, hosts) for number, (hosts, _) in enumerate([*history, (last, DIED)], 1)]
    in_a_row = 0
    for times, (_, ended) in enumerate(history, 1):
        failed, following = made[times - 1], made[times]
        recovering = Recovering(failed, ended, 0.0, times, ())
        plan = recovering.plan(following)
        same = [one.host for one in failed.members] == [one.host for one in following.members]
        assert plan.rung in get_args(Rung)
        assert (plan.rung == "regroup") == (not same)
        if plan.rung == "in_place":
            assert recovering.keeps_workers(following)
            in_a_row += 1
        if ended.kind is EndKind.FAILED and ended.exit_code == 71 and not ended.blames:
            assert not recovering.keeps_workers(following), "the network must be checked"
    assert in_a_row <= 2, "a state that cannot be taken over is not tried for ever"


def test_who_keeps_processes_does_not_depend_on_who_follows() -> None:
    """Processes that fit are kept over a change of hosts, too."""
    recovering = after(DIED)
    assert recovering.keeps_workers(generation(2, "a"))
    assert recovering.rung(generation(2, "a")) == "regroup"


@pytest.mark.parametrize("last", [DIED, BROKE, SILENT, HUNG])
@pytest.mark.parametrize(("code", "hosts", "keeps"), [(137, (), True), (71, ("b",), True), (71, (), False), (70, ("a",), True)])
def test_the_record_that_all_hosts_share_decides(last: End, code: int, hosts: tuple[str, ...], keeps: bool) -> None:
    """A host may have noticed no more than broken connections, and all must do the same."""
    following = replace(generation(2, "ab"), failures=(GenerationFailure(1, hosts, code, "", 7, 0, "it failed"),))
    assert after(last).keeps_workers(following) is keeps
    assert after(last).rung(following) == ("in_place" if keeps else "restart")
    # Of an earlier generation it says nothing.
    older = replace(following, failures=(replace(following.failures[0], generation=0),))
    assert after(last).keeps_workers(older) is after(last).keeps_workers(generation(2, "ab"))
    assert not after(last, times=3).keeps_workers(following)


failing = st.builds(end, st.sampled_from("ab"), st.sampled_from([EndKind.FAILED, EndKind.LOST]), st.sampled_from([70, 71, 137]))
orderly = st.builds(end, st.sampled_from("ab"), st.sampled_from([EndKind.DONE, EndKind.LEAVING, EndKind.GROW]), st.just(75))


@given(st.lists(st.tuples(failing | orderly, st.booleans()), max_size=12))
def test_failures_count_from_the_last_step_or_orderly_end(history: list[tuple[End, bool]]) -> None:
    """Each generation may do a step before it ends, and is known by the time at which that begins."""
    recovering, row, began, newest = None, 0, 0.0, 0
    for number, (ended, does_a_step) in enumerate(history, 1):
        if does_a_step:
            recovering, row = None, 0
        finished = 7 * number % 5
        new = generation(number, "ab")
        recovering = after_end(recovering, new, ended, since=float(number), lost=("b",), finished_step=finished)
        if not ended.loses_state:
            row = 0
            assert recovering is None
            continue
        row += 1
        began, newest = (float(number), finished) if row == 1 else (began, max(newest, finished))
        assert recovering is not None
        assert (recovering.times, recovering.since, recovering.finished_step) == (row, began, newest)
        assert (recovering.failed.number, recovering.end) == (number, ended), "the last failure counts"
