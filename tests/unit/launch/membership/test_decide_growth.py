from dataclasses import replace

import pytest

from elastictrain.config.composed import LaunchGroup
from elastictrain.launch.membership.decide import decide, should_grow
from elastictrain.launch.membership.observation import ClusterState, HostObservation
from elastictrain.launch.membership.records import EndKind, Finish, Generation, HostState, Wait
from tests.unit.launch.membership.made import NOW_S, OPTIONS, cluster, end, generation, member, observed, record

READY, UNFIT = HostState.READY, HostState.UNFIT
HERE_LONG = observed(record("z"))
WORTH = "z came: what a restart costs (20 s) is won back in 40 s"


def training(
    *others: HostObservation, hosts: str = "ab", restart_cost_s: float = 20.0, running: Generation | None = None
) -> ClusterState:
    running = running or generation(5, hosts)
    return cluster(*others, running=running, newest=running, restart_cost_s=restart_cost_s)


def grows(looked: ClusterState, options: LaunchGroup = OPTIONS) -> bool:
    assert looked.running is not None
    return should_grow(looked, looked.running, options) is not None


def test_the_first_member_ends_the_generation_for_a_host_that_came() -> None:
    decision = decide(training(HERE_LONG), OPTIONS)
    assert isinstance(decision, Finish)
    assert (decision.end.kind, decision.end.host, decision.end.generation, decision.at_once) == (EndKind.GROW, "a", 5, False)
    assert decision.end.reason == WORTH


def test_only_the_first_member_does_and_not_while_it_ends_anyway() -> None:
    assert decide(training(HERE_LONG, hosts="ba"), OPTIONS) == Wait()
    looked = training(HERE_LONG)
    assert decide(replace(looked, ends={"b": end("b", EndKind.DONE, number=5)}, ended_since_s=NOW_S), OPTIONS) == Wait()


@pytest.mark.parametrize(
    "other",
    [
        observed(record("z"), since_s=NOW_S - OPTIONS.grow_after_s + 1.0),
        observed(record("z", UNFIT)),
        observed(record("z", HostState.BUSY)),
        observed(record("z", HostState.GONE)),
        observed(record("z"), fresh=False),
        observed(record("z"), changed_s=NOW_S - 60.0),
        observed(record("b")),
        observed(record("z", processes=0)),
    ],
)
def test_only_hosts_that_are_there_to_stay_count(other: HostObservation) -> None:
    assert not grows(training(other))


def test_training_is_not_interrupted_often() -> None:
    looked = training(HERE_LONG)
    assert not grows(replace(looked, newest_since_s=NOW_S - OPTIONS.grow_every_s + 1.0))
    assert grows(replace(looked, newest_since_s=NOW_S - OPTIONS.grow_every_s))


def test_growth_can_be_switched_off_and_is_limited() -> None:
    assert not grows(training(HERE_LONG), replace(OPTIONS, grow=False))
    assert not grows(training(HERE_LONG), replace(OPTIONS, max_hosts=2))
    assert grows(training(HERE_LONG), replace(OPTIONS, max_hosts=3))


def test_workers_for_which_there_is_nothing_to_do_are_no_gain() -> None:
    assert not grows(replace(training(HERE_LONG), most_processes=2))
    assert grows(replace(training(HERE_LONG), most_processes=3))
    wide = observed(record("y", processes=8))
    looked = replace(training(wide, HERE_LONG), most_processes=3)
    assert should_grow(looked, generation(5, "ab"), OPTIONS) == WORTH


def test_one_host_among_many_must_stay_for_long_to_be_worth_it() -> None:
    hundred = replace(generation(5, "a"), members=tuple(member(f"h{number}", processes=8) for number in range(100)))
    one = observed(record("z", processes=8))
    assert not grows(training(one, running=hundred, restart_cost_s=60.0))
    assert grows(training(one, running=hundred, restart_cost_s=10.0))
    more = [observed(record(f"z{number}", processes=8)) for number in range(4)]
    assert grows(training(*more, running=hundred, restart_cost_s=60.0))


def test_a_cost_that_is_not_known_is_guessed() -> None:
    looked = training(HERE_LONG, restart_cost_s=0.0)
    assert "(30 s)" in str(should_grow(looked, generation(5, "ab"), OPTIONS))


def test_what_does_not_pay_before_the_run_ends_is_left() -> None:
    assert not grows(replace(training(HERE_LONG), left_s=39.0))
    assert grows(replace(training(HERE_LONG), left_s=41.0))


def test_a_host_that_is_left_out_is_no_newcomer_until_it_has_rested() -> None:
    running = generation(5, "ab", excluded=("z",))
    assert not grows(training(observed(record("z", ended=4)), running=running))
    assert grows(training(observed(record("z", ended=5)), running=running))


def test_a_host_that_not_all_members_hear_is_not_taken_in() -> None:
    def grows_with(hears: str, *, heard: str = "bz", b_hears: str = "az") -> bool:
        lines = (observed(record("z", hears=hears)), observed(record("b", HostState.BUSY, hears=b_hears)))
        return grows(replace(training(*lines), heard=frozenset(heard)))

    assert grows_with("ab")
    assert not grows_with("a")
    assert not grows_with("ab", heard="b")
    assert not grows_with("ab", b_hears="a")


def test_of_hosts_that_do_not_hear_each_other_the_first_is_taken_in() -> None:
    lines = [observed(record(host, hears="ab"), since_s=since_s) for host, since_s in (("y", 2.0), ("z", 1.0))]
    reason = should_grow(training(*lines), generation(5, "ab"), OPTIONS)
    assert reason is not None
    assert reason.startswith("z came")
