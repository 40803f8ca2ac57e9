"""How long is waited for what, and what has been reached: pure."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastictrain.fault.stop import StopRequest
from elastictrain.train.context import left_s
from elastictrain.train.saving import LeaveDecision, Reached, SaveStatus, Tier, copy_limit_s, describe, judge, least

LATE = "storage was not reached in time, and is still written to as long as they live, for up to 12 h"
WAITS = SaveStatus(None)


@pytest.mark.parametrize(
    ("deadline_s", "now_s", "left"),
    [
        (None, 100.0, None),
        (220.0, 100.0, 100.0),  # of 120 s the end takes 20
        (130.0, 100.0, 22.5),  # of 30 s a quarter
        (105.0, 100.0, 3.75),
        (105.0, 104.0, -0.25),
        (90.0, 100.0, -10.0),  # it was past when the request came
    ],
)
def test_the_end_is_given_its_own_time(deadline_s: float | None, now_s: float, left: float | None) -> None:
    assert left_s(StopRequest("SIGTERM", 100.0, deadline_s), now_s=now_s, grace_s=20.0) == left
    assert left_s(None, now_s=now_s, grace_s=20.0) is None


def test_the_shortest_time_counts() -> None:
    assert least([None, 3.0, -1.0]) == -1.0
    assert least([None]) is None


@pytest.mark.parametrize(("left", "limit"), [(None, 90.0), (100.0, 90.0), (30.0, 30.0), (1.0, 5.0), (-7.0, 5.0)])
def test_a_copy_has_some_seconds_however_late_it_is(left: float | None, limit: float) -> None:
    assert copy_limit_s(left, most_s=90.0) == limit


@pytest.mark.parametrize(
    ("words", "replicating", "verdict"),
    [
        ([WAITS, WAITS], False, None),
        ([replace(WAITS, saved=True), WAITS], False, LeaveDecision("storage", limited=False)),
        ([WAITS, replace(WAITS, left_s=1.0)], True, None),
        ([replace(WAITS, saved=True), replace(WAITS, left_s=-1.0)], True, LeaveDecision("storage", limited=True)),
        ([WAITS, replace(WAITS, left_s=0.0)], False, LeaveDecision("memory", limited=True)),
        ([WAITS, replace(WAITS, left_s=0.0)], True, LeaveDecision("peer", limited=True)),
        ([replace(WAITS, sending=True), replace(WAITS, left_s=0.0)], True, LeaveDecision("memory", limited=True)),
        ([replace(WAITS, unsent=True), replace(WAITS, left_s=0.0)], True, LeaveDecision("memory", limited=True)),
        ([replace(WAITS, error="503"), WAITS], False, LeaveDecision("memory", limited=False, error="503")),
        ([replace(WAITS, error="503"), replace(WAITS, left_s=2.0)], True, LeaveDecision("peer", limited=True, error="503")),
        ([replace(WAITS, error="503"), replace(WAITS, left_s=-2.0)], True, LeaveDecision("peer", limited=True)),
    ],
)
def test_when_waiting_is_over(words: list[SaveStatus], replicating: bool, verdict: LeaveDecision | None) -> None:
    assert judge(words, replicating=replicating) == verdict


STAYS, LEAVES = replace(WAITS, left_s=60.0, stays=True), replace(WAITS, left_s=60.0)
HANDED_OVER = LeaveDecision("handover", limited=True)


@pytest.mark.parametrize(
    ("told", "replicating", "decision"),
    [
        ([STAYS, STAYS], False, HANDED_OVER),
        ([STAYS, LEAVES], False, None),
        ([STAYS, LEAVES], True, None),
        ([replace(STAYS, keeps=(1,)), LEAVES], False, None),
        ([replace(STAYS, keeps=(1,)), LEAVES], True, HANDED_OVER),
        ([replace(STAYS, keeps=(1,)), replace(LEAVES, keeps=(0,))], True, HANDED_OVER),
        ([replace(STAYS, keeps=(1,), sending=True), LEAVES], True, None),
        ([replace(STAYS, keeps=(1,), unsent=True), LEAVES], True, None),
        # The replica is on a host that leaves, too.
        ([replace(STAYS, keeps=(1,)), replace(LEAVES, keeps=(2,)), LEAVES], True, None),
        ([LEAVES, LEAVES], True, None),
        ([replace(STAYS, keeps=(1,)), replace(LEAVES, saved=True)], True, LeaveDecision("storage", limited=True)),
        # Somebody was not asked yet.
        ([STAYS, WAITS], True, None),
    ],
)
def test_hosts_that_stay_need_no_storage(told: list[SaveStatus], replicating: bool, decision: LeaveDecision | None) -> None:
    assert judge(told, replicating=replicating) == decision


a_word = st.builds(
    SaveStatus,
    st.none() | st.floats(-10, 10),
    sending=st.booleans(),
    unsent=st.booleans(),
    saved=st.booleans(),
    error=st.text(),
)


@given(st.lists(a_word, min_size=1, max_size=5), st.booleans())
def test_nobody_waits_once_time_is_up_and_more_time_never_makes_it_less_safe(
    words: list[SaveStatus], replicating: bool
) -> None:
    times = [word.left_s for word in words if word.left_s is not None]
    verdict = judge(words, replicating=replicating)
    if times and min(times) <= 0:
        assert verdict is not None
        assert not verdict.error
        assert (verdict.tier == "storage") == any(word.saved for word in words)
    if verdict is not None:
        assert verdict.limited == bool(times)


@pytest.mark.parametrize(
    ("tier", "reached", "text"),
    [
        ("storage", 7, ", which is saved in s3://b/run"),
        ("storage", 5, "; the newest step that is safe is 5, saved in s3://b/run"),
        (
            "peer",
            7,
            f", which is only in the memory of these hosts, but twice: {LATE}",
        ),
        (
            "memory",
            5,
            f"; the newest step that is safe is 5, only in the memory of these hosts: {LATE}",
        ),
        ("handover", 7, ", which is in the memory of the hosts that continue"),
        ("nothing", 0, "; nothing is saved yet"),
    ],
)
def test_it_is_told_where_state_is(tier: Tier, reached: int, text: str) -> None:
    assert describe(Reached(reached, tier), step=7, run_dir="s3://b/run", several_hosts=True) == text


def test_one_host_is_one_host() -> None:
    assert "of this host: " in describe(Reached(7, "memory"), step=7, run_dir="r", several_hosts=False)
