import threading
import time
from collections.abc import Callable, Iterable, Mapping

import pytest

from elastictrain.preflight.group.attendance import (
    Attendance,
    Entries,
    PartState,
    RankResult,
    judge_attendance,
    run_act,
    scope_of,
)
from elastictrain.preflight.group.members import strangers
from elastictrain.preflight.policy import host_of
from elastictrain.preflight.verdict import Scope, Status
from tests.unit.preflight.group.ranks import members
from tests.unit.preflight.made import rank
from tests.unit.preflight.table import Table

DONE = RankResult(PartState.DONE, {"figure": 1.5})
LIMIT_S, GRACE_S = 0.2, 0.1


def settle(behaviour: list[Callable[[Entries, float], Attendance | None]]) -> list[Attendance | None]:
    """What each rank makes of a part in which each behaves in its own way."""
    table, found = Table(), [None] * len(behaviour)

    def be(rank: int) -> None:
        entries = Entries(table, rank=rank, world_size=len(behaviour), grace_s=GRACE_S)
        found[rank] = behaviour[rank](entries, time.monotonic())

    threads = [threading.Thread(target=be, args=(rank,)) for rank in range(len(behaviour))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def well(entries: Entries, began: float) -> Attendance:
    entries.enter("part")
    return entries.settle("part", DONE, began=began, limit_s=LIMIT_S)


def absent(entries: Entries, began: float) -> None:
    """Does nothing."""


def silent(entries: Entries, began: float) -> None:
    entries.enter("part")


def test_all_hear_the_same() -> None:
    found = settle([well, well, well])
    assert found[0] is not None
    assert found[0].complete
    assert found[0].words == {0: DONE, 1: DONE, 2: DONE}
    assert found[1] == found[2] == found[0]


def test_who_is_missing_and_who_entered() -> None:
    began = time.monotonic()
    found = settle([well, absent, silent, well])
    assert time.monotonic() - began < 1.0
    assert found[0] is not None
    assert not found[0].complete
    assert found[0].entered == {0, 2, 3}
    assert set(found[0].words) == {0, 3}
    assert found[3] == found[0]


def test_without_rank_0_the_others_find_out_for_themselves() -> None:
    found = settle([absent, well, well])
    for one in found[1:]:
        assert one is not None
        assert one.entered == {1, 2}
        assert set(one.words) == {1, 2}


def test_one_that_waits_for_trouble_gets_all_words() -> None:
    """A rank that fails at once must not publish before the others, which are stuck with it, have said so."""

    def broken(entries: Entries, began: float) -> Attendance:
        entries.enter("part")
        return entries.settle("part", RankResult(PartState.BROKEN, detail="no room"), began=began, limit_s=LIMIT_S)

    def stuck(entries: Entries, began: float) -> Attendance:
        entries.enter("part")
        time.sleep(LIMIT_S)
        return entries.settle("part", RankResult(PartState.STUCK, num_begun=2), began=began, limit_s=LIMIT_S)

    found = settle([broken, stuck, stuck])
    assert found[0] is not None
    assert [word.state for _, word in sorted(found[0].words.items())] == [PartState.BROKEN, PartState.STUCK, PartState.STUCK]


def test_parts_do_not_mix() -> None:
    table = Table()
    entries = Entries(table, rank=0, world_size=1, grace_s=0.0)
    entries.enter("a")
    first = entries.settle("a", DONE, began=0.0, limit_s=0.0)
    second = entries.settle("b", RankResult(PartState.BROKEN, detail="x"), began=0.0, limit_s=0.0)
    assert first.complete
    assert not second.complete


def test_an_act_has_a_result_whatever_happens() -> None:
    gate = threading.Event()

    def fine(at: Callable[[str], None]) -> object:
        at("one")
        at("two")
        return [1, 2]

    def broken(at: Callable[[str], None]) -> object:
        at("three")
        raise ValueError("first line\nsecond line")

    def unspeakable(at: Callable[[str], None]) -> object:
        return object()

    def endless(at: Callable[[str], None]) -> object:
        at("four")
        gate.wait(30)
        return None

    assert run_act(fine, limit_s=10) == RankResult(PartState.DONE, [1, 2], num_begun=2)
    found = run_act(broken, limit_s=10)
    assert (found.state, found.num_begun) == (PartState.BROKEN, 1)
    assert all(word in found.detail for word in ("ValueError", "first line", "(three)"))
    assert "second" not in found.detail
    assert run_act(unspeakable, limit_s=10).state is PartState.BROKEN
    assert run_act(endless, limit_s=0.1) == RankResult(PartState.STUCK, detail="four", num_begun=1)
    gate.set()


def test_what_is_done_in_the_background_changes_nothing_of_its_result() -> None:
    done, gate = threading.Event(), threading.Event()

    def act(at: Callable[[str], None]) -> object:
        return done.wait(30)

    def fails() -> None:
        done.set()
        raise OSError

    assert run_act(act, limit_s=30, in_background=fails) == RankResult(PartState.DONE, True)
    began = time.monotonic()
    assert run_act(act, limit_s=0.5, in_background=lambda: gate.wait(30) and None).state is PartState.DONE
    assert time.monotonic() - began < 20
    gate.set()


GROUP = members("h1", "h1", "h2", "h2")


def test_scope() -> None:
    assert scope_of([2], GROUP) is Scope.HOST
    assert scope_of([2, 3], GROUP) is Scope.HOST
    assert scope_of([1, 2], GROUP) is Scope.GROUP
    assert scope_of([], GROUP) is Scope.GROUP
    assert scope_of([0, 1], members("h1", "h1")) is Scope.GROUP


STUCK = RankResult(PartState.STUCK, detail="known float32, small", num_begun=1)


def blamed(words: Mapping[int, RankResult], *, entered: frozenset[int] = frozenset(range(3))) -> list[tuple[str, str]]:
    """Who is to blame, and the first word of why."""
    attendance = Attendance("all_reduce", 3, 5.0, words, entered | frozenset(words))
    verdicts = judge_attendance("collectives", attendance, members("h1", "h2", "h3"))
    assert all(verdict.status is Status.FAIL and verdict.check == "collectives" for verdict in verdicts)
    assert all("all_reduce" in str(verdict.measured) for verdict in verdicts)
    return [(verdict.subject, str(verdict.measured).split()[0]) for verdict in verdicts]


FAR = RankResult(PartState.STUCK, detail="random float32, large", num_begun=4)
BROKEN = RankResult(PartState.BROKEN, detail="no room")


@pytest.mark.parametrize(
    ("words", "entered", "culprits"),
    [
        ({0: DONE, 1: DONE, 2: DONE}, (), []),
        # Who did not enter comes first, then who gave no word, then who raised, then who came least far.
        ({0: STUCK}, (0, 1), [(rank(2, "h3"), "did")]),
        ({0: BROKEN, 2: STUCK}, range(3), [(rank(1, "h2"), "entered")]),
        ({0: STUCK, 1: BROKEN, 2: STUCK}, (), [(rank(1, "h2"), "broke")]),
        ({0: FAR, 1: STUCK, 2: FAR}, (), [(rank(1, "h2"), "no")]),
        ({0: DONE, 1: FAR, 2: DONE}, (), [(rank(1, "h2"), "no")]),
    ],
)
def test_who_is_to_blame(words: Mapping[int, RankResult], entered: Iterable[int], culprits: list[tuple[str, str]]) -> None:
    assert blamed(words, entered=frozenset(entered)) == culprits


def test_the_reason_is_told_with_what_was_going_on() -> None:
    stuck = judge_attendance("collectives", Attendance("all_reduce", 1, 5.0, {0: STUCK}, frozenset((0,))), members("h1"))
    assert STUCK.detail in str(stuck[0].measured)
    broken = judge_attendance("collectives", Attendance("all_reduce", 1, 5.0, {0: BROKEN}, frozenset((0,))), members("h1"))
    assert BROKEN.detail in str(broken[0].measured)


def test_the_remedy_knows_the_process_if_it_has_introduced_itself() -> None:
    known, unknown = members("h1", "h2"), strangers(["h1", "h2"])
    attendance = Attendance("present", 2, 5.0, {0: DONE}, frozenset((0,)))
    assert "--pid 1001" in judge_attendance("present", attendance, known)[0].remedy
    remedy = judge_attendance("present", attendance, unknown)[0].remedy
    assert "py-spy" not in remedy
    assert "on h2" in remedy


def scopes(words: Mapping[int, RankResult], *hosts: str, entered: frozenset[int] | None = None) -> set[Scope]:
    there = frozenset(range(len(hosts))) if entered is None else entered
    verdicts = judge_attendance("collectives", Attendance("all_reduce", len(hosts), 5.0, words, there), members(*hosts))
    assert all(host_of(verdict.subject) in hosts for verdict in verdicts if verdict.scope is Scope.HOST)
    return {verdict.scope for verdict in verdicts}


def test_one_host_is_to_blame_if_all_culprits_are_its_ranks() -> None:
    assert scopes({0: STUCK}, "h1", "h2", "h2", entered=frozenset((0,))) == {Scope.HOST}
    assert scopes({0: STUCK, 1: STUCK}, "h1", "h2", "h3") == {Scope.HOST}
    assert scopes({0: FAR, 1: STUCK, 2: FAR}, "h1", "h2", "h3") == {Scope.HOST}


def test_a_rank_that_answers_and_lags_behind_nobody_waits_for_a_peer() -> None:
    done = RankResult(PartState.DONE, figure=1, num_begun=1)
    assert scopes({0: done, 1: STUCK, 2: done}, "h1", "h2", "h3") == {Scope.GROUP}


def test_else_it_is_the_groups() -> None:
    assert scopes({0: STUCK}, "h1", "h2", "h3", entered=frozenset((0,))) == {Scope.GROUP}
    assert scopes({0: STUCK, 1: STUCK}, "h1", "h2") == {Scope.GROUP}
    # On a single host all ranks are stuck alike: nobody is singled out.
    assert scopes({0: STUCK, 1: STUCK}, "h1", "h1") == {Scope.GROUP}
    # What a rank raises is often about the other end.
    assert scopes({0: DONE, 1: BROKEN}, "h1", "h2") == {Scope.GROUP}


def test_many_culprits_stay_readable() -> None:
    attendance = Attendance("present", 100, 5.0, {0: DONE}, frozenset((0,)))
    verdicts = judge_attendance("present", attendance, strangers([f"h{rank}" for rank in range(100)]))
    assert len(verdicts) == 9
    assert (verdicts[-1].subject, str(verdicts[-1].measured).split()[0]) == ("all", "91")
