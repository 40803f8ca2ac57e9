import signal
import time
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from itertools import combinations
from math import inf

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastictrain.errors import (
    EXIT_BUG,
    EXIT_CONFIG,
    EXIT_STOPPED,
    EXIT_STORAGE,
    EXIT_TRANSPORT,
    EXIT_UNFIT,
    EXIT_USAGE,
)
from elastictrain.fault.reasons import NO_RANK, Reason
from elastictrain.fault.stop import StopRequest
from elastictrain.launch.attempt import Attempt, judge_end, what_died
from elastictrain.launch.membership.records import End, EndKind, Generation, GenerationMember
from elastictrain.launch.workers_of_generation import WorkersEnd
from tests.unit.launch.membership.made import end, generation

CLEAREST_FIRST = (EXIT_CONFIG, EXIT_USAGE, EXIT_UNFIT, EXIT_BUG, EXIT_STORAGE)
NOTICED = (EXIT_TRANSPORT, EXIT_STOPPED)


def reason(rank: int, code: int, *, step: int = 12) -> Reason:
    return Reason(rank, code, "reduce", step, f"{rank}:{code}")


def three_hosts(before: int) -> Generation:
    """Of which `a-1` has so many ranks before its own four."""
    members = [GenerationMember(host, host[0], "10.0.0.1", 1, 4) for host in ("a-1", "b-1", "c-1")]
    if before:
        members.insert(0, GenerationMember("z-1", "z", "10.0.0.1", 1, before))
    return replace(generation(7, "a"), members=tuple(members))


def ended_by(local_rank: int, what: str) -> str:
    """What is said of a worker that a signal ended: the one place for the sentence."""
    return f"local rank {local_rank} was ended by {what}"


def judged(
    *reasons: Reason, codes: Mapping[int, int] | None = None, code: int = 1, before: int = 0, begun: int | None = None
) -> End:
    ended = WorkersEnd(code, codes or {}, begun=begun, reasons=reasons)
    return judge_end(ended, generation=three_hosts(before), host="a-1", committed_step=10)


def test_all_workers_ended_well() -> None:
    found = judged(code=0)
    assert replace(found, reason="") == End(7, "a-1", EndKind.DONE, 0, "", 0, 10, "")


def test_the_step_from_which_a_generation_began_is_told() -> None:
    failed = Reason(0, EXIT_BUG, "backward", 12, "it broke")
    assert judged(failed, begun=9).restored_step == 9
    # Before its first step is done it has not told it.
    assert judged(failed).restored_step == 11
    assert judged(msgspec.structs.replace(failed, step=0)).restored_step == 0


def test_what_a_worker_says_is_passed_on() -> None:
    found = judged(reason(3, EXIT_BUG))
    assert found == End(7, "a-1", EndKind.FAILED, EXIT_BUG, "reduce", 12, 10, "3:70", restored_step=11)


def test_hosts_whose_ranks_were_not_met_are_lost_and_nobody_failed() -> None:
    # Of those of this host nobody else is to blame.
    found = judged(msgspec.structs.replace(reason(0, EXIT_TRANSPORT), missing=(3, 4, 8)))
    assert (found.kind, found.exit_code, found.lost, found.blames) == (EndKind.LOST, EXIT_TRANSPORT, "b-1", ("b-1", "c-1"))
    assert found.committed_step == 10
    assert "b and" in found.reason
    found = judged(msgspec.structs.replace(reason(9, EXIT_TRANSPORT), missing=(0,)), before=8)
    assert (found.kind, found.lost) == (EndKind.LOST, "z-1")


def test_a_rank_of_this_host_that_was_not_met_blames_nobody() -> None:
    found = judged(msgspec.structs.replace(reason(0, EXIT_TRANSPORT), missing=(1,)))
    assert (found.kind, found.lost, found.blames) == (EndKind.FAILED, "", ())


def test_what_explains_more_than_a_host_that_was_not_met_counts() -> None:
    assert judged(msgspec.structs.replace(reason(1, EXIT_TRANSPORT), missing=(4,)), reason(0, EXIT_BUG)).kind is EndKind.FAILED


def test_what_explains_most_counts_whichever_rank_says_it() -> None:
    for clear, other in combinations((*CLEAREST_FIRST, *NOTICED), 2):
        for said in ((clear, other), (other, clear)):
            found = judged(*(reason(rank, code) for rank, code in enumerate(said)))
            assert (found.exit_code, found.reason) == (clear, f"{said.index(clear)}:{clear}")


def test_of_equal_reasons_the_first_ranks_counts() -> None:
    assert judged(reason(2, EXIT_TRANSPORT), reason(5, EXIT_TRANSPORT)).reason == "2:71"


@pytest.mark.parametrize("code", CLEAREST_FIRST)
def test_a_clear_reason_counts_more_than_the_death_of_another(code: int) -> None:
    assert judged(reason(1, code), codes={0: -9, 1: code}).exit_code == code


def test_a_death_explains_what_the_others_noticed() -> None:
    found = judged(reason(0, EXIT_TRANSPORT), reason(1, EXIT_STOPPED), codes={2: -9})
    assert found == End(7, "a-1", EndKind.FAILED, 137, "reduce", 12, 10, ended_by(2, "SIGKILL"))
    assert judged(codes={0: -11, 1: -9}).reason == ended_by(0, "SIGSEGV")
    assert judged(codes={0: -77}).reason == ended_by(0, "signal 77")


def test_who_is_ended_because_it_hung_is_explained_by_what_was_left_for_it() -> None:
    """The watcher of the host kills it and writes why; that it was killed says less."""
    found = judged(reason(0, EXIT_TRANSPORT), codes={0: -9})
    assert (found.exit_code, found.reason) == (EXIT_TRANSPORT, "0:71")
    # On the second host of four workers each, local rank 1 is rank 5.
    found = judged(reason(4, EXIT_TRANSPORT), reason(5, EXIT_TRANSPORT), codes={1: -9}, before=4)
    assert found.exit_code == EXIT_TRANSPORT
    found = judged(reason(4, EXIT_TRANSPORT), codes={1: -9}, before=4)
    assert (found.exit_code, found.reason) == (137, ended_by(1, "SIGKILL"))
    # One of them hung because another had died.
    found = judged(reason(0, EXIT_TRANSPORT), codes={0: -9, 1: -7})
    assert found.reason == ended_by(1, "SIGBUS")


def test_who_was_asked_to_end_is_no_cause() -> None:
    assert judged(reason(0, EXIT_TRANSPORT), codes={1: -signal.SIGTERM}).exit_code == EXIT_TRANSPORT
    assert judged(codes={0: -signal.SIGTERM, 1: -9}).reason == ended_by(1, "SIGKILL")
    found = judged(codes={0: -signal.SIGTERM})
    assert (found.exit_code, found.reason) == (143, ended_by(0, "SIGTERM"))


def test_an_end_without_a_word_is_a_bug() -> None:
    found = judged(reason(1, EXIT_TRANSPORT), codes={0: 1, 1: EXIT_TRANSPORT})
    assert found.exit_code == EXIT_BUG
    assert "code 1" in found.reason
    assert (found.phase, found.step) == ("reduce", 12)
    found = judged()
    assert found.exit_code == EXIT_BUG


def test_the_death_of_the_fork_server_explains_what_its_workers_noticed() -> None:
    """They follow it with a SIGTERM, and may find the time to save, or to miss a peer that was killed before them."""
    for noticed in NOTICED:
        found = judged(reason(0, noticed), code=-9)
        assert (found.exit_code, found.kind) == (137, EndKind.FAILED)
        assert "server" in found.reason
        assert "SIGKILL" in found.reason
    assert judged(code=-9).exit_code == 137
    assert judged(reason(0, EXIT_BUG), code=-9).reason == "0:70"


def test_what_the_fork_server_says_of_itself_counts_as_what_workers_say_but_after_it() -> None:
    for code in (EXIT_TRANSPORT, EXIT_UNFIT, EXIT_BUG):
        own = reason(NO_RANK, code)
        assert judged(own).exit_code == code
        assert judged(own).reason == f"-1:{code}"
        assert judged(own, reason(3, code), reason(4, code), before=3).reason == f"3:{code}"
    assert judged(reason(NO_RANK, EXIT_TRANSPORT), codes={0: -9}).reason == ended_by(0, "SIGKILL")


@pytest.mark.parametrize("code", [*CLEAREST_FIRST, *NOTICED])
def test_an_exit_code_of_ours_says_enough_where_the_sentence_is_missing(code: int) -> None:
    """What could not be written, on a full disk say, must not make a wrong configuration one that is tried again."""
    found = judged(codes={0: EXIT_STOPPED, 1: code})
    assert found.exit_code == code
    assert f"code {code}" in found.reason


@pytest.mark.parametrize("code", [*CLEAREST_FIRST, *NOTICED])
def test_what_is_committed_is_passed_on_in_any_case(code: int) -> None:
    assert judged(reason(0, code)).committed_step == 10
    assert judged(codes={0: -9}).committed_step == 10
    assert judged().committed_step == 10


@settings(max_examples=60)
@given(
    st.lists(st.builds(reason, st.integers(0, 7), st.integers(-20, 300)), max_size=4),
    st.dictionaries(st.integers(0, 7), st.integers(-70, 300), max_size=4),
    st.integers(-20, 300),
)
def test_a_failure_never_looks_like_a_success(reasons: list[Reason], codes: dict[int, int], code: int) -> None:
    found = judged(*reasons, codes=codes, code=code)
    assert (found.kind is EndKind.DONE) == (code == 0)
    assert (found.exit_code == 0) == (code == 0)
    assert found.reason


DETACHED_S, ALONE_S, ASKED_S = 2.5, 0.5, 30.0
OURS = (0, EXIT_CONFIG, EXIT_USAGE, EXIT_UNFIT, EXIT_BUG, EXIT_STORAGE, EXIT_STOPPED)
DEATHS = (-signal.SIGKILL, -signal.SIGSEGV, -signal.SIGTERM, 1, 137, 255)


def attempt(*, hosts: int = 1) -> Attempt:
    members = tuple(GenerationMember(host, host, "10.0.0.1", 1, 2) for host in "abc"[:hosts])
    return Attempt(generation=replace(generation(7, "a"), members=members), joined_s=0.0)


def times(one: Attempt) -> tuple[float, float, float]:
    """When the workers are told to detach, are asked, and are killed, if they are told in time."""
    detach_s, told = one.detach_s, copy(one)
    if detach_s < inf:
        told.detaching(now_s=detach_s)
    return detach_s, one.ask_s, told.kill_s


class TestLosingWorkers:
    @pytest.mark.parametrize("code", OURS)
    def test_the_others_have_the_time_to_find_and_report_the_same_error(self, code: int) -> None:
        one = attempt()
        one.lose_worker({0: code}, now_s=100.0)
        assert times(one) == (inf, 100.0 + ALONE_S, 100.0 + ALONE_S + ASKED_S)
        assert not one.broken_off

    @pytest.mark.parametrize("code", [*DEATHS, EXIT_TRANSPORT])
    def test_a_death_or_a_broken_group_leaves_nothing_to_wait_for(self, code: int) -> None:
        before = time.time()
        one = attempt()
        one.lose_worker({0: code}, now_s=100.0)
        assert times(one) == (100.0, inf, 100.0 + DETACHED_S)
        assert one.broken_off
        assert before <= one.broken_at <= time.time()

    @pytest.mark.parametrize("death", DEATHS)
    @pytest.mark.parametrize("code", OURS)
    def test_a_death_counts_beside_any_code(self, code: int, death: int) -> None:
        one = attempt()
        one.lose_worker({0: code, 1: death}, now_s=100.0)
        assert times(one) == (100.0, inf, 100.0 + DETACHED_S)

    @given(st.lists(st.tuples(st.sampled_from([*OURS, *DEATHS, EXIT_TRANSPORT]), st.floats(0.0, 50.0)), max_size=8))
    def test_however_often_it_is_said_no_time_is_put_off(self, told: list[tuple[int, float]]) -> None:
        one, now_s, before = attempt(), 0.0, (inf, inf, inf)
        for code, later_s in told:
            now_s += later_s
            was_broken_off, broken_at = one.broken_off, one.broken_at
            one.lose_worker({0: code}, now_s=now_s)
            assert all(new <= old for new, old in zip(times(one), before, strict=True))
            assert one.broken_off >= was_broken_off
            assert not was_broken_off or one.broken_at == broken_at
            before = times(one)

    def test_an_error_after_the_group_was_broken_brings_no_workers_back(self) -> None:
        one = attempt()
        one.break_off(now_s=100.0)
        one.detaching(now_s=100.0)
        one.lose_worker({0: -9}, now_s=101.0)
        one.break_off(now_s=102.0)
        assert (one.detach_s, one.kill_s) == (inf, 100.0 + DETACHED_S), "they are told once"

    def test_who_was_asked_for_longer_is_killed_with_the_broken_group(self) -> None:
        one = attempt()
        one.lose_worker({0: EXIT_BUG}, now_s=100.0)
        one.lose_worker({0: EXIT_BUG, 1: -9}, now_s=101.0)
        assert times(one) == (101.0, 100.0 + ALONE_S, 101.0 + DETACHED_S)


class TestFinishing:
    def finish(self, one: Attempt, *, at_once: bool, now_s: float = 100.0, deadline_s: float | None = None) -> bool:
        asked = end("b", EndKind.FAILED if at_once else EndKind.LEAVING, 70, number=7)
        request = StopRequest("spot", now_s, deadline_s) if deadline_s is not None else None
        return one.finish(asked, at_once=at_once, now_s=now_s, stop_limit_s=40.0, request=request)

    def test_at_once_workers_detach_and_are_not_asked(self) -> None:
        one = attempt()
        assert self.finish(one, at_once=True)
        assert times(one) == (100.0, inf, 100.0 + DETACHED_S)
        assert not self.finish(one, at_once=True, now_s=105.0)
        assert times(one) == (100.0, inf, 100.0 + DETACHED_S)

    def test_who_is_told_late_has_as_much_time(self) -> None:
        one = attempt()
        self.finish(one, at_once=True)
        one.detaching(now_s=107.0)
        assert (one.detach_s, one.acknowledge_by_s, one.kill_s) == (inf, 107.5, 107.0 + DETACHED_S)

    def test_in_order_they_are_asked_and_keep_their_group(self) -> None:
        one = attempt()
        assert self.finish(one, at_once=False)
        assert times(one) == (inf, 100.0, 140.0)
        assert not one.broken_off
        message = one.stop_message(now_s=100.0)
        assert (message.reason, message.host_stays) == (one.reason, True)
        assert message.deadline == pytest.approx(time.time() + 40.0, abs=5.0)

    def test_workers_hear_that_their_host_leaves_after_all(self) -> None:
        """Until then its memory counted as safe."""
        one = attempt()
        self.finish(one, at_once=False)
        self.finish(one, at_once=False, now_s=101.0, deadline_s=120.0)
        message = one.stop_message(now_s=101.0)
        assert not message.host_stays
        assert message.deadline == pytest.approx(time.time() + 19.0, abs=5.0)
        one.finish(end("a", EndKind.GROW), at_once=False, now_s=102.0, stop_limit_s=40.0, request=None)
        assert one.stop_message(now_s=102.0).host_stays
        assert one.kill_s == 120.0

    def test_an_orderly_end_is_cut_short(self) -> None:
        one = attempt()
        self.finish(one, at_once=False)
        first = one.asked
        assert not self.finish(one, at_once=True, now_s=110.0)
        assert times(one) == (110.0, 100.0, 110.0 + DETACHED_S)
        assert one.asked is first, "the first end explains the generation"

    def test_a_deadline_before_that_stays(self) -> None:
        one = attempt()
        self.finish(one, at_once=False, deadline_s=101.0)
        self.finish(one, at_once=True, now_s=100.5, deadline_s=101.0)
        assert one.kill_s == 101.0


REUSED_S, IN_PLACE_S, MARGIN_S = 10.0, 10.0, 10.0


class TestBeingLate:
    @pytest.mark.parametrize("hosts", [1, 2])
    @pytest.mark.parametrize("in_place", [False, True])
    @pytest.mark.parametrize("reused", [False, True])
    def test_limits_until_the_groups_are_made(self, reused: bool, in_place: bool, hosts: int) -> None:
        one = attempt(hosts=hosts)
        assert not one.late(now_s=1e9, silent=[0, 1], attached=False), "nothing was started"
        one.start(now_s=100.0, reused=reused, in_place=in_place, init_timeout_s=200.0)
        assert one.started
        met_s = 100.0 + (REUSED_S if reused else 200.0 + MARGIN_S)
        # Where something must be built first, here or on another host, its own limits count.
        limited = in_place and reused and hosts == 1
        made_s = met_s + IN_PLACE_S if limited else inf
        assert not one.late(now_s=met_s - 0.1, silent=[0, 1], attached=False)
        assert "1" in one.late(now_s=met_s, silent=[1], attached=False)
        assert not one.late(now_s=met_s, silent=[], attached=False)
        assert bool(one.late(now_s=1e9, silent=[], attached=False)) == limited
        if limited:
            assert not one.late(now_s=made_s - 0.1, silent=[], attached=False)
            assert one.late(now_s=made_s, silent=[], attached=False)
        assert not one.late(now_s=1e9, silent=[], attached=True)

    def test_an_end_that_is_under_way_needs_no_other_reason(self) -> None:
        one = attempt()
        one.start(now_s=0.0, reused=True, in_place=True, init_timeout_s=1.0)
        one.finish(end("a", EndKind.GROW), at_once=False, now_s=1.0, stop_limit_s=40.0, request=None)
        assert not one.late(now_s=1e9, silent=[0], attached=False)


def died(last: End, codes: Mapping[int, int], *, hung: Sequence[int] = (), before: int = 3) -> tuple[str, ...]:
    return what_died(last, Attempt(generation=three_hosts(before), joined_s=0.0, codes=codes, hung=hung), host="a-1")


def test_what_died_are_the_ranks_whose_codes_are_none_of_ours() -> None:
    last = end("a-1", EndKind.FAILED, 137)
    assert died(last, {1: -9, 0: 1, 2: EXIT_TRANSPORT, 3: EXIT_BUG}) == ("rank 3 on a", "rank 4 on a")


def test_a_rank_that_hung_has_died_though_it_ended_by_itself() -> None:
    last = end("a-1", EndKind.FAILED, EXIT_TRANSPORT)
    assert died(last, {1: EXIT_TRANSPORT}, hung=[4]) == ("rank 4 on a",)
    assert died(last, {0: -9, 1: -9}, hung=[4]) == ("rank 3 on a", "rank 4 on a")
    assert died(end("b-1", EndKind.FAILED, EXIT_TRANSPORT), {1: EXIT_TRANSPORT}, hung=[4]) == ("b",)


def test_without_a_death_here_the_host_that_failed_or_was_lost_is_named() -> None:
    assert died(end("b-1", EndKind.FAILED, 70), {0: EXIT_TRANSPORT}) == ("b",)
    assert died(end("a-1", EndKind.LOST, lost="c-1"), {0: EXIT_TRANSPORT}) == ("c",)
    assert died(end("a-1", EndKind.FAILED, 70), {}) == ("a",)
    assert died(end("nobody", EndKind.FAILED, 70), {}) == ("nobody",)


@pytest.mark.parametrize("code", DEATHS)
def test_a_death_here_is_no_death_on_the_host_that_failed(code: int) -> None:
    """Local ranks are this host's: a worker that was killed here because another host failed is not one of its ranks."""
    assert died(end("b-1", EndKind.FAILED, 70), {0: code}) == ("b",)


@pytest.mark.parametrize("asked_by", ["a", "b", None])
@pytest.mark.parametrize(
    ("kind", "code"),
    [(EndKind.DONE, 0), (EndKind.FAILED, EXIT_UNFIT), (EndKind.FAILED, EXIT_TRANSPORT), (EndKind.FAILED, EXIT_BUG)],
)
def test_what_was_asked_for_explains_an_end_but_not_one_that_stands_by_itself(
    asked_by: str | None, kind: EndKind, code: int
) -> None:
    one = attempt()
    one.asked = end(asked_by, EndKind.LOST, EXIT_TRANSPORT) if asked_by is not None else None
    own = end("a", kind, code)
    stands = asked_by is None or kind is EndKind.DONE or (asked_by == "b" and code == EXIT_UNFIT)
    assert one.conclude(own) is (own if stands else one.asked)
