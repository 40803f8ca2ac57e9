from collections.abc import Mapping

from elastictrain.preflight.group.attendance import Attendance, PartState, RankResult
from elastictrain.preflight.group.judge_attendance import agreed, judge_attendance, scope_of
from elastictrain.preflight.group.members import introduced, strangers
from elastictrain.preflight.policy import decide, host_of
from elastictrain.preflight.verdict import Scope, Status
from tests.unit.preflight.group.ranks import members
from tests.unit.preflight.made import verdict

GROUP = members("h1", "h1", "h2", "h2")


def test_scope() -> None:
    assert scope_of([2], GROUP) is Scope.HOST
    assert scope_of([2, 3], GROUP) is Scope.HOST
    assert scope_of([1, 2], GROUP) is Scope.GROUP
    assert scope_of([], GROUP) is Scope.GROUP
    assert scope_of([0, 1], members("h1", "h1")) is Scope.GROUP


def test_parts_of_a_check_that_blame_one_host() -> None:
    found = [
        verdict("fail", check="collectives", subject="all", scope="group"),
        verdict("fail", check="collectives", subject="rank 2 on h2"),
        verdict("fail", check="collectives", subject="rank 3 on h2"),
    ]
    assert agreed(found) == found
    assert [decide(found, host=host, hosts=["h1", "h2"]).exit_code for host in ("h1", "h2")] == [71, 69]


def test_parts_of_a_check_that_blame_several_hosts() -> None:
    first = verdict("fail", check="collectives", subject="rank 0 on h1")
    second = verdict("fail", check="collectives", subject="rank 3 on h2")
    slow, other = (
        verdict("warn", check="matmul", subject="rank 0 on h1"),
        verdict("fail", check="matmul", subject="rank 2 on h2"),
    )
    found = agreed([first, slow, second, other])
    assert [one.scope for one in found] == [Scope.GROUP, Scope.HOST, Scope.GROUP, Scope.HOST]
    # Not 78, as if every host failed by itself.
    assert decide(agreed([first, second]), host="h1", hosts=["h1", "h2"]).exit_code == 71


DONE = RankResult(PartState.DONE, [])
STUCK = RankResult(PartState.STUCK, detail="known float32, small", num_begun=1)


def blamed(words: Mapping[int, RankResult], *, entered: frozenset[int] = frozenset(range(3))) -> list[tuple[str, str]]:
    attendance = Attendance("all_reduce", 3, 5.0, words, entered | frozenset(words))
    verdicts = judge_attendance("collectives", attendance, members("h1", "h2", "h3"))
    assert all(verdict.status is Status.FAIL and verdict.check == "collectives" for verdict in verdicts)
    return [(verdict.subject, str(verdict.measured)) for verdict in verdicts]


def test_all_through() -> None:
    assert blamed({0: DONE, 1: DONE, 2: DONE}) == []


def test_who_did_not_enter_comes_first() -> None:
    assert blamed({0: STUCK}, entered=frozenset((0, 1))) == [("rank 2 on h3", "did not enter all_reduce within 5 s")]


def test_then_who_gave_no_word() -> None:
    broken = RankResult(PartState.BROKEN, detail="RuntimeError: Connection closed by peer")
    assert blamed({0: broken, 2: STUCK}) == [("rank 1 on h2", "entered all_reduce and gave no word within 5 s")]


def test_then_who_raised() -> None:
    assert blamed({0: STUCK, 1: RankResult(PartState.BROKEN, detail="no room"), 2: STUCK}) == [
        ("rank 1 on h2", "broke in all_reduce: no room")
    ]


def test_then_who_came_least_far() -> None:
    far = RankResult(PartState.STUCK, detail="random float32, large", num_begun=4)
    expected = "no answer from all_reduce at known float32, small within 5 s"
    assert blamed({0: far, 1: STUCK, 2: far}) == [("rank 1 on h2", expected)]
    assert [subject for subject, _ in blamed({0: DONE, 1: far, 2: DONE})] == ["rank 1 on h2"]


def test_the_remedy_knows_the_process_if_it_has_introduced_itself() -> None:
    known, unknown = members("h1", "h2"), strangers(["h1", "h2"])
    attendance = Attendance("present", 2, 5.0, {0: DONE}, frozenset((0,)))
    assert "py-spy dump --pid 1001" in judge_attendance("present", attendance, known)[0].remedy
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
    assert scopes({0: DONE, 1: STUCK, 2: DONE}, "h1", "h2", "h3") == {Scope.HOST}


def test_else_it_is_the_groups() -> None:
    assert scopes({0: STUCK}, "h1", "h2", "h3", entered=frozenset((0,))) == {Scope.GROUP}
    assert scopes({0: STUCK, 1: STUCK}, "h1", "h2") == {Scope.GROUP}
    # On a single host all ranks are stuck alike: nobody is singled out.
    assert scopes({0: STUCK, 1: STUCK}, "h1", "h1") == {Scope.GROUP}
    # What a rank raises is often about the other end.
    assert scopes({0: DONE, 1: RankResult(PartState.BROKEN, detail="Connection closed by peer")}, "h1", "h2") == {Scope.GROUP}


def test_many_culprits_stay_readable() -> None:
    attendance = Attendance("present", 100, 5.0, {0: DONE}, frozenset((0,)))
    verdicts = judge_attendance("present", attendance, strangers([f"h{rank}" for rank in range(100)]))
    assert len(verdicts) == 9
    assert verdicts[-1].measured == "91 more ranks likewise"


def test_introductions() -> None:
    before = strangers(["h1", "h1", "h2"])
    assert [(one.local_rank, one.pid) for one in before] == [(0, None), (1, None), (0, None)]
    row = {"rank": 2, "host": "h2", "local_rank": 0, "pid": 5, "device": "x", "new": 1}
    after = introduced(before, {2: row, 1: None, 0: "?"})
    assert after[:2] == before[:2]
    assert (after[2].pid, after[2].device) == (5, "x")
