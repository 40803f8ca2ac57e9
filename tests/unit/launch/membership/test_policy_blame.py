import pytest

from elastictrain.errors import EXIT_BUG, EXIT_CONFIG, EXIT_STOPPED, EXIT_STORAGE, EXIT_TRANSPORT, EXIT_UNFIT, EXIT_USAGE
from elastictrain.launch.membership.policy import find_cause, to_blame
from elastictrain.launch.membership.records import End, EndKind
from tests.unit.launch.membership.made import by_host, end

KILLED = 137
CLEAREST_FIRST = [EXIT_CONFIG, EXIT_USAGE, EXIT_UNFIT, KILLED, EXIT_STORAGE, EXIT_TRANSPORT, EXIT_STOPPED]


def failed(host: str, code: int, *, blames: tuple[str, ...] = ()) -> End:
    return end(host, EndKind.FAILED, code, blames=blames)


def test_the_clearest_failure_explains_the_others() -> None:
    ends = [failed(host, code) for host, code in zip("gfedcba", reversed(CLEAREST_FIRST), strict=True)]
    found = []
    while ends:
        cause = find_cause(ends)
        assert cause is not None
        found.append(cause.exit_code)
        ends.remove(cause)
    assert found == CLEAREST_FIRST


def test_crashes_are_equal_and_the_first_counts() -> None:
    cause = find_cause([failed("b", KILLED), failed("a", EXIT_BUG), failed("c", 1)])
    assert cause is not None
    assert cause.host == "b"


def test_only_what_failed_is_a_cause() -> None:
    others = [end("a", kind, EXIT_BUG) for kind in EndKind if kind is not EndKind.FAILED]
    assert find_cause(others) is None


@pytest.mark.parametrize("code", [EXIT_BUG, KILLED, EXIT_STORAGE])
def test_hosts_that_crashed_are_to_blame_unless_all_did(code: int) -> None:
    ends = by_host([failed("a", EXIT_TRANSPORT), failed("b", code), failed("c", code)])
    assert to_blame(ends["b"], ends, members="abc") == ("b", "c")
    all_failed = by_host(failed(host, code) for host in "abc")
    assert to_blame(all_failed["b"], all_failed, members="abc") == ()
    alone = by_host([failed("a", code)])
    assert to_blame(alone["a"], alone, members="a") == ()


def test_who_only_noticed_is_not_to_blame() -> None:
    ends = by_host([failed("a", EXIT_TRANSPORT), failed("b", EXIT_TRANSPORT, blames=("c",)), failed("c", EXIT_TRANSPORT)])
    assert to_blame(ends["a"], ends, members="abc") == ("c",)


def test_the_one_that_most_others_accuse_is_to_blame() -> None:
    ends = [failed("a", 71, blames=("b", "c")), end("b", EndKind.LOST, lost="a"), end("c", EndKind.LOST, lost="a")]
    noticed = failed("c", EXIT_TRANSPORT)
    assert to_blame(noticed, by_host(ends), members="abc") == ("a",)
    assert to_blame(noticed, by_host(ends[:2]), members="abc") == ()


def test_a_host_whose_rank_hung_is_to_blame_whoever_follows_its_end() -> None:
    hung, noticed = failed("c", EXIT_TRANSPORT, blames=("c",)), failed("b", EXIT_TRANSPORT)
    ends = {"a": hung, "b": noticed, "c": hung}
    cause = find_cause([noticed, hung])
    assert cause == hung
    assert to_blame(cause, ends, members="abc") == ("c",)
    # Two that hang, each by its own account.
    assert to_blame(cause, {**ends, "a": failed("a", EXIT_TRANSPORT, blames=("a",)), "c": hung}, members="abc") == ()


def test_who_is_cut_off_is_not_to_blame_for_it_and_strangers_are_not() -> None:
    for one in (failed("a", EXIT_TRANSPORT, blames=("z",)), end("b", EndKind.LOST, lost="b")):
        assert to_blame(failed("a", EXIT_TRANSPORT), by_host([one]), members="abc") == ()
