from elastictrain.preflight.group.blame import agreed, scope_of
from elastictrain.preflight.outcome import decide
from elastictrain.preflight.verdict import Scope
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
