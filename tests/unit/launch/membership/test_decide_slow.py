"""What a host decides whose rank holds up the others, and what becomes of it."""

from dataclasses import replace
from random import Random

import pytest

from elastictrain.config.composed import LaunchGroup
from elastictrain.errors import EXIT_STOPPED, EXIT_UNFIT
from elastictrain.fault.reasons import SlowRank
from elastictrain.launch.membership.decide import decide
from elastictrain.launch.membership.observation import ClusterState, HostObservation
from elastictrain.launch.membership.records import Decision, EndKind, Finish, Generation, HostState, Leave, Rejoin, Wait
from tests.unit.launch.membership.made import NOW_S, OPTIONS, cluster, end, generation, observed, record

SLOW = SlowRank(0, "rank 0 is slow")


@pytest.mark.parametrize(
    ("hosts", "min_hosts", "leaves"), [("abc", 2, True), ("ab", 1, True), ("abc", 3, False), ("a", 1, False)]
)
def test_a_host_that_holds_up_the_others_leaves_if_enough_others_remain(hosts: str, min_hosts: int, leaves: bool) -> None:
    newest, options = generation(1, hosts), LaunchGroup(min_hosts=min_hosts)
    looked = cluster(running=newest, newest=newest, straggles=SLOW)
    decision = decide(looked, options)
    if not leaves:
        assert decision == Wait()
        return
    assert isinstance(decision, Finish)
    assert (decision.end.kind, decision.end.exit_code, decision.at_once) == (EndKind.LEAVING, EXIT_UNFIT, False)
    assert (decision.end.slow_rank, decision.end.reason) == (SLOW.rank, SLOW.sentence)
    # One host at a time, and not before what another one has ended already.
    other = decide(replace(looked, ends={"b": end("b", EndKind.LEAVING, EXIT_UNFIT)}), options)
    assert isinstance(other, Finish)
    assert other.end.host == "b"
    # Whoever is asked to leave does not come back as an unfit host.
    asked = decide(replace(looked, stop_reason="asked to leave"), options)
    assert isinstance(asked, Finish)
    assert asked.end.exit_code == EXIT_STOPPED


def test_a_host_that_holds_up_the_others_stays_if_another_is_lost() -> None:
    newest = generation(1, "abc")
    decision = decide(cluster(running=newest, newest=newest, straggles=SLOW, silent="c"), OPTIONS)
    assert isinstance(decision, Finish)
    assert (decision.end.kind, decision.end.lost, decision.at_once) == (EndKind.LOST, "c", True)


@pytest.mark.parametrize(
    ("host", "rank", "ago_s", "leaves"),
    [
        ("b", 1, 601.0, True),
        ("b", 1, 599.0, False),
        # The same rank on another host before: it is slow by its work, whatever the host and however long ago.
        ("b", 0, 601.0, False),
        ("a", 0, 599.0, False),
        # The same host has come back, and is as slow as before.
        ("a", 0, 601.0, True),
    ],
)
def test_one_host_at_a_time_is_left_out_and_not_one_after_the_other_for_one_rank(
    host: str, rank: int, ago_s: float, leaves: bool
) -> None:
    newest = generation(3, "acd", slow=end(host, EndKind.LEAVING, EXIT_UNFIT, slow_rank=rank))
    looked = cluster(running=newest, newest=newest, straggles=SLOW, slow_since_s=NOW_S - ago_s)
    assert isinstance(decide(looked, OPTIONS), Finish) is leaves


def left_out(*others: HostObservation, newest: Generation, reason: str = "") -> ClusterState:
    """Host a, after it has left generation 1 because it held up the others."""
    own = end("a", EndKind.LEAVING, EXIT_UNFIT, slow_rank=0)
    me = replace(record("a", HostState.UNFIT, ended=1, reason=reason or own.reason), end=own)
    return cluster(*others, me=me, newest=newest)


TRAINS, SILENT = observed(record("b", HostState.BUSY)), observed(record("b", HostState.BUSY), changed_s=NOW_S - 100.0)


@pytest.mark.parametrize(
    ("others", "min_hosts", "retry_s", "number", "reason", "decision"),
    [
        ([TRAINS], 1, 600.0, 2, "", Wait()),
        ([SILENT], 1, 600.0, 2, "", Rejoin()),
        ([], 1, 600.0, 2, "", Rejoin()),
        ([TRAINS], 2, 600.0, 2, "", Rejoin()),
        ([observed(record("b", HostState.UNFIT))], 1, 600.0, 2, "", Rejoin()),
        ([observed(record("b", HostState.GONE))], 1, 600.0, 2, "", Rejoin()),
        # It is to leave at once: but not before the others train, who may be lost meanwhile.
        ([TRAINS], 1, 0.0, 1, "", Wait()),
        ([SILENT], 1, 0.0, 1, "", Rejoin()),
        # A check that fails now is another matter.
        ([], 1, 600.0, 2, "a GPU is gone", Wait()),
        ([], 1, 0.0, 1, "a GPU is gone", Leave(EXIT_UNFIT, "a GPU is gone")),
    ],
)
def test_a_host_that_was_left_out_for_being_slow_is_better_than_none(
    others: list[HostObservation], min_hosts: int, retry_s: float, number: int, reason: str, decision: Decision
) -> None:
    newest = generation(number, "bc" if number > 1 else "abc")
    options = LaunchGroup(min_hosts=min_hosts, retry_unfit_s=retry_s)
    assert decide(left_out(*others, newest=newest, reason=reason), options) == decision


def test_without_another_check_it_leaves_once_the_others_train() -> None:
    looked = left_out(TRAINS, newest=generation(2, "bc"))
    assert decide(looked, LaunchGroup(retry_unfit_s=0.0)) == Leave(EXIT_UNFIT, looked.me.reason)


def test_in_any_cluster_slowness_alone_leaves_enough_hosts_and_hides_nothing() -> None:
    random, leaves, rejoins = Random(1), 0, 0
    for _ in range(3000):
        hosts, min_hosts, retry_s = "abcde"[: random.randint(1, 5)], random.randint(1, 4), random.choice((0.0, 600.0))
        options = LaunchGroup(min_hosts=min_hosts, retry_unfit_s=retry_s)
        last = random.choice((None, end(random.choice("abx"), EndKind.LEAVING, EXIT_UNFIT, slow_rank=random.randint(0, 2))))
        newest, silent = generation(1, hosts, slow=last), random.choice(("", "", random.choice(hosts[1:] or "x")))
        since_s = NOW_S - random.choice((0.0, 300.0, 900.0))
        running = cluster(running=newest, newest=newest, straggles=SLOW, silent=silent, slow_since_s=since_s)
        decision = decide(running, options)
        if isinstance(decision, Finish) and decision.end.kind is EndKind.LEAVING:
            leaves += 1
            assert len(hosts) > min_hosts
            assert not silent or silent == "x"
            assert last is None or (NOW_S - since_s >= retry_s and (last.slow_rank > 0 or last.host == "a"))
        states = [random.choice((*HostState, HostState.BUSY)) for _ in hosts[1:]]
        quiet_s = [random.choice((0.0, 100.0)) for _ in states]
        others = [
            observed(record(host, state), changed_s=NOW_S - quiet)
            for host, state, quiet in zip(hosts[1:], states, quiet_s, strict=True)
        ]
        useful = [
            state in (HostState.BUSY, HostState.READY) and not quiet for state, quiet in zip(states, quiet_s, strict=True)
        ]
        decision = decide(left_out(*others, newest=newest), options)
        assert isinstance(decision, Rejoin) is (sum(useful) < min_hosts)
        rejoins += isinstance(decision, Rejoin)
    assert min(leaves, rejoins, 3000 - rejoins) > 100
