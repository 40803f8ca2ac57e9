from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastictrain.config.composed import LaunchGroup
from elastictrain.errors import (
    EXIT_BUG,
    EXIT_CONFIG,
    EXIT_OK,
    EXIT_STOPPED,
    EXIT_STORAGE,
    EXIT_TRANSPORT,
    EXIT_UNFIT,
    EXIT_USAGE,
)
from elastictrain.launch.membership import messages
from elastictrain.launch.membership.policy import judge, pause_s
from elastictrain.launch.membership.records import End, EndKind, Generation, GenerationFailure, GenerationOutcome
from tests.unit.launch.membership.made import OPTIONS, by_host, end, generation

DONE, LEAVING, GROW, FAILED, LOST = EndKind
KILLED = 137
KILLED_TIMES = 10


def after(
    *ends: End,
    hosts: str = "abc",
    ready: str = "abc",
    unaware: str = "",
    unheard: str = "",
    failures: tuple[GenerationFailure, ...] = (),
    options: LaunchGroup = OPTIONS,
    ended: Generation | None = None,
    committed: int = 0,
) -> Generation:
    return judge(
        ended or generation(1, hosts, failures=failures),
        by_host(ends),
        options,
        ready=frozenset(ready),
        unaware=frozenset(unaware),
        unheard=frozenset(unheard),
        committed_step=committed,
    )


def failed(
    host: str = "a", code: int = EXIT_BUG, *, step: int = 412, committed: int = 400, blames: tuple[str, ...] = ()
) -> End:
    return end(host, FAILED, code, step=step, committed=committed, phase="backward", blames=blames)


def failure(
    number: int = 1, *, hosts: tuple[str, ...] = (), step: int = 412, committed: int = 400, phase: str = "backward"
) -> GenerationFailure:
    return GenerationFailure(number, hosts, EXIT_BUG, phase, step, committed, "a: it broke")


def test_a_run_whose_hosts_are_all_done_is_done() -> None:
    following = after(*(end(host, DONE) for host in "abc"))
    assert (following.outcome, following.exit_code) == (GenerationOutcome.DONE, EXIT_OK)


@pytest.mark.parametrize("other", [None, failed("c"), end("c", LEAVING), end("c", LOST, lost="a")])
def test_a_run_of_which_not_all_hosts_are_done_goes_on(other: End | None) -> None:
    ends = [end("a", DONE), end("b", DONE)] + ([other] if other else [])
    assert after(*ends).outcome is GenerationOutcome.RUN


@pytest.mark.parametrize("code", [EXIT_CONFIG, EXIT_USAGE])
def test_what_is_wrong_everywhere_is_not_tried_again(code: int) -> None:
    following = after(failed("b", code), failed("a", EXIT_TRANSPORT), end("c", LEAVING))
    assert (following.outcome, following.exit_code) == (GenerationOutcome.GIVE_UP, code)
    assert following.reason == "b: failed-b"


@pytest.mark.parametrize(
    "ends",
    [
        [end("c", LEAVING)],
        [end("c", LEAVING), failed("a"), failed("b", EXIT_TRANSPORT)],
        [end("a", LOST, lost="c"), end("b", LOST, lost="c")],
        [end("a", LOST, lost="c"), failed("b", EXIT_TRANSPORT)],
        [failed("a", EXIT_TRANSPORT), failed("b", EXIT_TRANSPORT)],
        [end("c", LOST, lost="a"), failed("b", EXIT_TRANSPORT)],
        [],
    ],
)
def test_the_loss_of_a_host_is_nobodys_failure(ends: list[End]) -> None:
    before = (failure(),)
    following = after(*ends, ready="ab", failures=before)
    assert following.outcome is GenerationOutcome.RUN
    assert (following.failures, following.pause_s) == (before, 0.0)
    assert following.reason.startswith("c ")


def test_an_interruption_to_grow_is_no_failure() -> None:
    ends = [end("a", GROW), failed("b", EXIT_STOPPED), failed("c", EXIT_TRANSPORT)]
    following = after(*ends)
    assert (following.outcome, following.failures, following.reason) == (GenerationOutcome.RUN, (), "grow-a")


def test_a_crash_while_it_is_interrupted_to_grow_is_a_failure() -> None:
    assert len(after(end("a", GROW), failed("b", EXIT_BUG)).failures) == 1


def test_an_unfit_host_is_left_out_and_nobody_failed() -> None:
    following = after(failed("b", EXIT_UNFIT), failed("a", EXIT_TRANSPORT), ready="ac", failures=(failure(),))
    assert (following.outcome, following.excluded, following.failures) == (GenerationOutcome.RUN, ("b",), (failure(),))
    assert "b is" in following.reason
    # It may have passed its checks in the meantime.
    assert after(failed("b", EXIT_UNFIT), ready="abc").excluded == ()


def test_who_has_not_read_that_it_is_left_out_still_is() -> None:
    for ends in ([failed("b", EXIT_UNFIT)], [failed("b")], [end("b", LEAVING)]):
        assert "z" in after(*ends, unaware="z", ready="ac").excluded


@pytest.mark.parametrize("code", [EXIT_BUG, EXIT_TRANSPORT, EXIT_STORAGE, EXIT_STOPPED, KILLED])
def test_a_failure_is_remembered_and_tried_again(code: int) -> None:
    following = after(failed("b", code))
    assert following.outcome is GenerationOutcome.RUN
    (remembered,) = following.failures
    assert (remembered.generation, remembered.exit_code, remembered.step, remembered.committed_step) == (1, code, 412, 400)
    assert following.reason == remembered.reason == "b: failed-b"


def test_a_group_that_ends_without_a_reason_has_failed() -> None:
    (remembered,) = after().failures
    assert remembered.exit_code == EXIT_BUG
    assert remembered.reason


@pytest.mark.parametrize(
    ("ends", "unheard"),
    [
        ([end("a", LOST, lost="b"), end("b", LOST, lost="a")], ""),
        ([end("a", LOST, lost="b"), failed("b", EXIT_TRANSPORT), failed("c", EXIT_STOPPED)], ""),
        ([failed("a", EXIT_TRANSPORT), failed("b", EXIT_TRANSPORT), failed("c", EXIT_TRANSPORT)], "c"),
        ([end("c", LOST, lost="a")], "c"),
    ],
)
def test_a_network_that_is_out_while_all_hosts_live_is_never_the_runs_failure(ends: list[End], unheard: str) -> None:
    before = (failure(1), failure(2))
    for failures in ((), before):
        following = after(*ends, failures=failures, unheard=unheard)
        assert (following.outcome, following.failures, following.pause_s) == (GenerationOutcome.RUN, failures, 0.0)


def test_a_crash_while_the_network_is_out_is_a_failure() -> None:
    ends = (end("a", LOST, lost="c"), failed("b", EXIT_BUG), failed("c", EXIT_TRANSPORT))
    assert len(after(*ends, unheard="c").failures) == 1


def test_who_is_not_heard_makes_no_group_without_the_host_to_blame() -> None:
    failures = (blamed(1, "b"), blamed(2, "b"))
    two = replace(OPTIONS, min_hosts=2)
    assert after(failed("b", KILLED), failures=failures, options=two).excluded == ("b",)
    assert after(failed("b", KILLED), failures=failures, options=two, unheard="c").excluded == ()


@pytest.mark.parametrize(("last", "code"), [(EXIT_STORAGE, EXIT_STORAGE), (EXIT_BUG, EXIT_BUG)])
def test_a_run_that_only_storage_keeps_from_going_on_ends_with_its_code(last: int, code: int) -> None:
    """No checkpoint is valid, say."""
    failures: tuple[GenerationFailure, ...] = ()
    for _ in range(2):
        failures = after(failed(code=EXIT_STORAGE, step=0), failures=failures, hosts="a", ready="a").failures
    following = after(failed(code=last, step=0), failures=failures, hosts="a", ready="a")
    assert (following.outcome, following.exit_code) == (GenerationOutcome.GIVE_UP, code)


def test_of_a_long_reason_its_first_line_is_told_again() -> None:
    assert messages.headline("invalid:\n  - step 5: damaged\nNothing was deleted.") == "invalid"
    assert messages.headline("") == ""


def test_three_failures_without_progress_end_the_run() -> None:
    failures: tuple[GenerationFailure, ...] = ()
    pauses = []
    for _ in range(2):
        following = after(failed(step=0), failures=failures, hosts="a", ready="a")
        assert following.outcome is GenerationOutcome.RUN
        failures = following.failures
        pauses.append(following.pause_s)
    following = after(failed(step=0), failures=failures, hosts="a", ready="a")
    assert (following.outcome, following.exit_code) == (GenerationOutcome.GIVE_UP, EXIT_BUG)
    assert "3 times" in following.reason
    assert pauses == [0.0, 1.0]


def test_workers_that_are_killed_from_outside_are_given_up_ten_times_later_and_pause_later() -> None:
    failures: tuple[GenerationFailure, ...] = ()
    pauses = []
    for _ in range(KILLED_TIMES * OPTIONS.max_failures - 1):
        following = after(failed(code=KILLED, step=0), failures=failures, hosts="a", ready="a")
        assert following.outcome is GenerationOutcome.RUN
        failures = following.failures
        pauses.append(following.pause_s)
    following = after(failed(code=KILLED, step=0), failures=failures, hosts="a", ready="a")
    assert (following.outcome, following.exit_code) == (GenerationOutcome.GIVE_UP, EXIT_BUG)
    at_once = OPTIONS.max_failures + 1
    assert pauses[:at_once] == [0.0] * at_once, "the cause is outside, and a recovery in place is cheap"
    assert pauses[at_once : at_once + 3] == [1.0, 2.0, 4.0]
    assert max(pauses) == OPTIONS.backoff_limit_s


@pytest.mark.parametrize("code", [EXIT_BUG, EXIT_TRANSPORT, EXIT_STORAGE, 139])
def test_one_failure_of_another_kind_ends_that(code: int) -> None:
    killed = tuple(replace(failure(number), exit_code=KILLED) for number in range(1, OPTIONS.max_failures))
    assert after(failed(code=code), failures=killed, hosts="a", ready="a").outcome is GenerationOutcome.GIVE_UP


def test_progress_refills_the_budget() -> None:
    before = (failure(1), failure(2))
    following = after(failed(step=600, committed=500), failures=before)
    assert following.outcome is GenerationOutcome.RUN
    assert [one.committed_step for one in following.failures] == [500]
    assert following.pause_s == 0.0
    assert after(end("b", LEAVING, committed=500), failures=before).failures == ()


@pytest.mark.parametrize("kind", [LOST, LEAVING, GROW])
def test_what_the_lines_know_to_be_committed_refills_the_budget_whatever_the_kind_of_the_end(kind: EndKind) -> None:
    before = (failure(1), failure(2))
    ends = [end("a", kind, lost="b"), failed("b", EXIT_TRANSPORT, committed=0)]
    following = after(*ends, failures=before, committed=500)
    assert following.outcome is GenerationOutcome.RUN
    assert {one.committed_step for one in following.failures} <= {500}
    assert len(following.failures) <= 1


def test_an_end_that_knows_of_less_is_no_progress() -> None:
    following = after(failed(committed=0), failures=(failure(1),))
    assert [one.committed_step for one in following.failures] == [400, 400]


def test_storage_that_fails_is_given_time_from_the_first_failure_on() -> None:
    assert after(failed(code=EXIT_STORAGE)).pause_s == OPTIONS.backoff_s


def test_the_pause_doubles_up_to_its_limit() -> None:
    assert [pause_s(times, options=OPTIONS) for times in range(10)] == [0, 0, 1, 2, 4, 8, 16, 32, 60, 60]
    assert pause_s(10**6, options=OPTIONS) == 60.0


def blamed(number: int, *hosts: str) -> GenerationFailure:
    return failure(number, hosts=hosts, step=number)


def test_a_host_that_is_to_blame_three_times_in_a_row_is_left_out() -> None:
    following = after(failed("b", KILLED, step=3), failures=(blamed(1, "b"), blamed(2, "b")))
    assert (following.outcome, following.excluded) == (GenerationOutcome.RUN, ("b",))
    assert following.reason.startswith("b was")
    assert [one.step for one in following.failures] == [3]
    # Others that are left out, and have not read so yet, stay so.
    following = after(failed("b", KILLED), failures=(blamed(1, "b"), blamed(2, "b")), unaware="z")
    assert following.excluded == ("b", "z")


def test_a_host_whose_rank_hangs_three_times_in_a_row_is_left_out() -> None:
    hung = failed("b", EXIT_TRANSPORT, blames=("b",))
    following = after(hung, failures=(blamed(1, "b"), blamed(2, "b")))
    assert (following.excluded, following.failures[-1].hosts) == (("b",), ("b",))
    # Connections that break accuse nobody, however often.
    assert after(replace(hung, blames=()), failures=(blamed(1, "b"), blamed(2, "b"))).excluded == ()


@pytest.mark.parametrize(
    ("failures", "ready", "min_hosts"),
    [
        ((blamed(1, "b"), blamed(2, "c")), "abc", 1),
        ((blamed(1, "b"), blamed(2)), "abc", 1),
        ((blamed(1, "b"), blamed(2, "b")), "abc", 3),
        # It is not there any more.
        ((blamed(1, "b"), blamed(2, "b")), "ac", 1),
    ],
)
def test_nobody_is_left_out_without_need_or_beyond_the_minimum(
    failures: tuple[GenerationFailure, ...], ready: str, min_hosts: int
) -> None:
    following = after(failed("b", KILLED), failures=failures, ready=ready, options=replace(OPTIONS, min_hosts=min_hosts))
    assert (following.outcome, following.excluded) == (GenerationOutcome.GIVE_UP, ())


def test_a_step_that_goes_on_failing_without_the_host_was_not_its_fault() -> None:
    failures: tuple[GenerationFailure, ...] = ()
    outcomes = []
    for host in "bbbcc":
        following = after(failed(host, EXIT_BUG), failures=failures)
        failures = following.failures
        outcomes.append(following.outcome)
    assert outcomes == [GenerationOutcome.RUN] * 4 + [GenerationOutcome.GIVE_UP]
    assert "step 412" in following.reason


def test_a_record_that_is_damaged_is_passed_over() -> None:
    following = after(ended=replace(generation(4, ""), reason="its record is damaged"))
    assert (following.outcome, following.failures) == (GenerationOutcome.RUN, ())
    assert "damaged" in following.reason


ends_of_anybody = st.builds(
    end,
    st.sampled_from("abcd"),
    st.sampled_from(list(EndKind)),
    st.sampled_from([0, 1, EXIT_USAGE, EXIT_UNFIT, EXIT_BUG, EXIT_TRANSPORT, EXIT_STORAGE, EXIT_STOPPED, EXIT_CONFIG, KILLED]),
    step=st.integers(0, 5),
    committed=st.integers(0, 5),
    lost=st.sampled_from(["", "a", "b", "z"]),
    blames=st.sampled_from([(), ("a",), ("b", "c"), ("z",)]),
)
hosts_of_some = st.sets(st.sampled_from("abcd"))


@given(
    rounds=st.lists(st.tuples(st.lists(ends_of_anybody, max_size=6), hosts_of_some), min_size=1, max_size=12),
    min_hosts=st.integers(1, 4),
    max_failures=st.integers(1, 4),
)
def test_whatever_happens_the_answer_is_the_same_in_any_order_and_failures_are_bounded(
    rounds: list[tuple[list[End], set[str]]], min_hosts: int, max_failures: int
) -> None:
    options = LaunchGroup(min_hosts=min_hosts, max_failures=max_failures)
    current = generation(1, "abcd")
    for ends, ready in rounds:
        told = by_host(ends)
        following = judge(current, told, options, ready=ready)
        shuffled = {host: told[host] for host in sorted(told, reverse=True)}
        assert judge(current, shuffled, options, ready=ready) == following
        assert following.reason
        assert 0.0 <= following.pause_s <= options.backoff_limit_s
        committed = [one.committed_step for one in following.failures]
        assert committed == sorted(committed)
        if following.outcome is not GenerationOutcome.RUN:
            assert (following.exit_code == EXIT_OK) == (following.outcome is GenerationOutcome.DONE)
            return
        killed = all(one.exit_code == KILLED for one in following.failures)
        assert len(following.failures) < max_failures * (KILLED_TIMES if killed else 1) or following.excluded
        culprits = set(following.excluded) & ready
        assert not culprits or len(ready - culprits) >= min_hosts
        current = replace(generation(current.number + 1, "abcd"), failures=following.failures)
