import signal
from collections.abc import Mapping
from dataclasses import replace
from itertools import combinations

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
from elastictrain.launch.attempt import judge_end
from elastictrain.launch.membership.records import End, EndKind, Generation, GenerationMember
from elastictrain.launch.worker_group import WorkersEnd
from tests.unit.launch.membership.made import generation

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


def judged(*reasons: Reason, codes: Mapping[int, int] | None = None, code: int = 1, before: int = 0) -> End:
    ended = WorkersEnd(code, codes or {})
    return judge_end(ended, reasons, generation=three_hosts(before), host="a-1", committed_step=10)


def test_all_workers_ended_well() -> None:
    found = judged(code=0)
    assert replace(found, reason="") == End(7, "a-1", EndKind.DONE, 0, "", 0, 10, "")


def test_what_a_worker_says_is_passed_on() -> None:
    found = judged(reason(3, EXIT_BUG))
    assert found == End(7, "a-1", EndKind.FAILED, EXIT_BUG, "reduce", 12, 10, "3:70")


def test_hosts_whose_ranks_were_not_met_are_lost_and_nobody_failed() -> None:
    # Of those of this host nobody else is to blame.
    found = judged(replace(reason(0, EXIT_TRANSPORT), missing=(3, 4, 8)))
    assert (found.kind, found.exit_code, found.lost, found.blames) == (EndKind.LOST, EXIT_TRANSPORT, "b-1", ("b-1", "c-1"))
    assert found.committed_step == 10
    assert "b and" in found.reason
    found = judged(replace(reason(9, EXIT_TRANSPORT), missing=(0,)), before=8)
    assert (found.kind, found.lost) == (EndKind.LOST, "z-1")


def test_a_rank_of_this_host_that_was_not_met_blames_nobody() -> None:
    found = judged(replace(reason(0, EXIT_TRANSPORT), missing=(1,)))
    assert (found.kind, found.lost, found.blames) == (EndKind.FAILED, "", ())


def test_what_explains_more_than_a_host_that_was_not_met_counts() -> None:
    assert judged(replace(reason(1, EXIT_TRANSPORT), missing=(4,)), reason(0, EXIT_BUG)).kind is EndKind.FAILED


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
