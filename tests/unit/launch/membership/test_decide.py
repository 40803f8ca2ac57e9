from dataclasses import replace

import pytest

from elastictrain.errors import EXIT_BUG, EXIT_STOPPED, EXIT_TRANSPORT, EXIT_UNFIT
from elastictrain.launch.membership.decide import decide
from elastictrain.launch.membership.records import (
    Create,
    EndKind,
    Finish,
    Generation,
    GenerationOutcome,
    HostRecord,
    HostState,
    Join,
    Leave,
    LeaveOut,
    Wait,
)
from tests.unit.launch.membership.made import NOW_S, OPTIONS, at, cluster, end, generation, observed, record

READY, BUSY, UNFIT, GONE = HostState.READY, HostState.BUSY, HostState.UNFIT, HostState.GONE
TERMINAL = (GenerationOutcome.DONE, GenerationOutcome.GIVE_UP)


def test_a_member_of_the_newest_generation_takes_part() -> None:
    newest = generation(3, "ab")
    assert decide(cluster(newest=newest, me=record("a", ended=2)), OPTIONS) == Join(newest)


def test_a_generation_that_is_done_with_here_is_not_adopted_again() -> None:
    assert not isinstance(decide(cluster(newest=generation(3, "ab"), me=record("a", ended=3)), OPTIONS), Join)


def test_a_launcher_that_was_started_again_is_another_host() -> None:
    decision = decide(cluster(observed(record("b", BUSY, ended=2)), newest=generation(3, "ab"), me=record("a2")), OPTIONS)
    assert isinstance(decision, Wait)


def test_a_generation_that_has_ended_is_not_begun() -> None:
    looked = cluster(
        observed(record("b", BUSY)), newest=generation(1, "ab"), ends=[end("b", EndKind.FAILED, EXIT_BUG)], ended_s=NOW_S - 1.0
    )
    assert isinstance(decide(looked, OPTIONS), Wait)


def test_who_is_unfit_or_asked_to_leave_takes_no_part() -> None:
    newest = generation(1, "ab")
    assert decide(cluster(newest=newest, me=record("a", UNFIT)), OPTIONS) == Wait()
    decision = decide(cluster(newest=newest, stop_reason="asked to leave"), OPTIONS)
    assert isinstance(decision, Leave)
    assert decision.exit_code == EXIT_STOPPED


def test_nothing_is_to_be_done_while_all_is_well() -> None:
    newest = generation(1, "abc")
    others = (observed(record("b", BUSY)), observed(record("c", BUSY)))
    assert decide(cluster(*others, running=newest, newest=newest), OPTIONS) == Wait()


@pytest.mark.parametrize(
    "newer", [generation(5, "bc"), generation(5, "abc"), generation(5, "abc", outcome=GenerationOutcome.GIVE_UP)]
)
@pytest.mark.parametrize("stop_reason", ["asked to leave", ""])
def test_what_is_not_the_newest_any_more_stops_at_once(newer: Generation, stop_reason: str) -> None:
    looked = cluster(running=generation(3, "abc"), newest=newer, stop_reason=stop_reason)
    decision = decide(looked, OPTIONS)
    assert isinstance(decision, Finish)
    assert decision.at_once
    assert (decision.end.generation, decision.end.host) == (3, "a")


def test_a_reading_that_is_older_than_what_runs_says_nothing() -> None:
    old = [end("b", EndKind.FAILED, EXIT_BUG, number=2)]
    assert decide(cluster(running=generation(3, "ab"), newest=generation(2, "ab"), ends=old), OPTIONS) == Wait()
    assert decide(cluster(running=generation(3, "ab"), newest=None), OPTIONS) == Wait()


@pytest.mark.parametrize(
    ("kind", "at_once"),
    [
        (EndKind.LEAVING, False),
        (EndKind.GROW, False),
        (EndKind.FAILED, True),
        (EndKind.LOST, True),
    ],
)
def test_the_end_on_another_host_is_followed(kind: EndKind, at_once: bool) -> None:
    newest, others = generation(1, "ab"), end("b", kind)
    assert decide(cluster(running=newest, newest=newest, ends=[others]), OPTIONS) == Finish(others, at_once)


def test_an_orderly_end_is_cut_short_when_a_host_is_lost_meanwhile() -> None:
    newest = generation(1, "abc")
    lost = end("c", EndKind.LOST, lost="b")
    ends = [end("a", EndKind.GROW), end("b", EndKind.LEAVING), lost]
    assert decide(cluster(running=newest, newest=newest, ends=ends), OPTIONS) == Finish(lost, at_once=True)


def test_the_own_word_is_not_followed() -> None:
    newest = generation(1, "ab")
    assert decide(cluster(running=newest, newest=newest, ends=[end("a", EndKind.GROW)]), OPTIONS) == Wait()


def test_hosts_that_reach_the_last_step_first_do_not_stop_the_others() -> None:
    newest = generation(1, "ab")
    looked = cluster(running=newest, newest=newest, ends=[end("b", EndKind.DONE)], ended_s=NOW_S)
    assert at(looked, NOW_S + looked.stop_limit_s - 1.0) == Wait()
    assert at(looked, NOW_S + looked.stop_limit_s + 1.0) == Finish(end("b", EndKind.DONE), at_once=False)


@pytest.mark.parametrize("broken", [True, False])
def test_a_host_that_is_asked_to_leave_says_so(broken: bool) -> None:
    newest = generation(1, "ab")
    ends = [end("b", EndKind.FAILED, EXIT_TRANSPORT)] if broken else []
    decision = decide(cluster(running=newest, newest=newest, ends=ends, stop_reason="asked to leave"), OPTIONS)
    assert isinstance(decision, Finish)
    assert (decision.end.kind, decision.end.host, decision.at_once) == (EndKind.LEAVING, "a", broken)


def test_a_member_that_the_watch_does_not_hear_is_lost() -> None:
    newest = generation(1, "abc")
    decision = decide(cluster(running=newest, newest=newest, silent="c"), OPTIONS)
    assert isinstance(decision, Finish)
    assert (decision.end.kind, decision.end.lost, decision.at_once) == (EndKind.LOST, "c", True)
    # Its workers still run: the host's record tells later what they reached.
    assert (decision.end.step, decision.end.committed_step) == (0, 0)
    assert decision.end.reason.startswith("c ")
    assert "4 s" in decision.end.reason


def test_the_watch_is_not_trusted_before_all_can_have_joined() -> None:
    newest = generation(1, "abc")
    looked = cluster(running=newest, newest=newest, silent="c", newest_since_s=NOW_S)
    assert at(looked, NOW_S + OPTIONS.lost_s) == Wait()
    assert isinstance(at(looked, NOW_S + OPTIONS.lost_s + 0.1), Finish)


def test_silence_of_a_host_that_is_no_member_means_nothing() -> None:
    newest = generation(1, "abc")
    assert decide(cluster(running=newest, newest=newest, silent="d"), OPTIONS) == Wait()


@pytest.mark.parametrize("state", [GONE, UNFIT])
def test_a_member_that_never_took_part_is_not_waited_for(state: HostState) -> None:
    newest = generation(2, "ab")
    backed_out = observed(record("b", state, ended=1, reason="no memory"), since_s=11.0)
    decision = decide(cluster(backed_out, running=newest, newest=newest, newest_since_s=10.0), OPTIONS)
    assert isinstance(decision, Finish)
    assert (decision.end.kind, decision.end.lost) == (EndKind.LOST, "b")
    # What it said before it was chosen is out of date.
    before = observed(record("b", state, ended=1), since_s=9.0)
    assert decide(cluster(before, running=newest, newest=newest, newest_since_s=10.0), OPTIONS) == Wait()


def test_a_member_that_has_ended_without_a_word_is_lost_after_a_while() -> None:
    newest = generation(2, "ab")
    looked = cluster(observed(record("b", READY, ended=2), since_s=NOW_S), running=newest, newest=newest)
    assert at(looked, NOW_S + OPTIONS.lost_s) == Wait()
    assert isinstance(at(looked, NOW_S + OPTIONS.lost_s + 0.1), Finish)


@pytest.mark.parametrize("outcome", TERMINAL)
def test_the_end_of_the_run_ends_its_launchers(outcome: GenerationOutcome) -> None:
    over = generation(4, "ab", outcome=outcome, exit_code=70)
    assert decide(cluster(newest=over), OPTIONS) == Leave(70, "made-up")
    spare = cluster(newest=over, me=record("z"), began_s=100.0, newest_since_s=200.0)
    assert decide(spare, OPTIONS) == Leave(70, "made-up")


@pytest.mark.parametrize("outcome", TERMINAL)
def test_a_launcher_that_is_started_after_the_end_begins_anew(outcome: GenerationOutcome) -> None:
    over = generation(4, "ab", outcome=outcome, exit_code=70)
    decision = decide(cluster(newest=over, me=record("z"), began_s=100.0, newest_since_s=100.0), OPTIONS)
    assert isinstance(decision, Create)
    created = decision.generation
    assert (created.number, created.outcome, [one.host for one in created.members]) == (5, GenerationOutcome.RUN, ["z"])
    assert (created.failures, created.exit_code) == ((), 0)


def test_a_spare_waits() -> None:
    newest = generation(1, "bc")
    decision = decide(cluster(observed(record("b", BUSY)), observed(record("c", BUSY)), newest=newest), OPTIONS)
    assert isinstance(decision, Wait)
    assert "generation 1" in decision.for_what


def test_who_is_left_out_rests_once_for_each_generation_that_says_so() -> None:
    newest = generation(3, "bc", excluded=("a",))
    others = (observed(record("b", BUSY)), observed(record("c", BUSY)))
    decision = decide(cluster(*others, newest=newest, me=record("a", ended=2)), OPTIONS)
    assert isinstance(decision, LeaveOut)
    assert decision.generation == 3
    assert "made-up" in decision.reason
    assert decide(cluster(*others, newest=newest, me=record("a", UNFIT, ended=3)), OPTIONS) == Wait()
    assert "generation 3" in str(decide(cluster(*others, newest=newest, me=record("a", ended=3)), OPTIONS))


@pytest.mark.parametrize("line", [record("a", ended=2), record("a", UNFIT, ended=3)])
def test_an_unfit_host_leaves_at_once_where_it_is_not_tried_again(line: HostRecord) -> None:
    newest = generation(3, "bc", excluded=("a",))
    decision = decide(cluster(newest=newest, me=line), replace(OPTIONS, retry_unfit_s=0.0))
    assert isinstance(decision, Leave)
    assert decision.exit_code == EXIT_UNFIT


def test_a_host_whose_address_has_changed_ends_its_part_at_once_unless_it_trains_alone() -> None:
    moved = replace(record("a", HostState.BUSY), address="10.0.0.9")
    decision = decide(cluster(me=moved, running=generation(3, "ab"), newest=generation(3, "ab")), OPTIONS)
    assert isinstance(decision, Finish)
    assert (decision.end.kind, decision.end.lost, decision.at_once) == (EndKind.LOST, "a", True)
    assert decide(cluster(me=moved, running=generation(3, "a"), newest=generation(3, "a")), OPTIONS) == Wait()
