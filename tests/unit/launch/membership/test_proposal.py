import random
from dataclasses import replace

import pytest

from elastictrain.config.composed import LaunchGroup
from elastictrain.errors import EXIT_BUG, EXIT_CONFIG, EXIT_OK, EXIT_STOPPED
from elastictrain.identity import PoisonedSteps
from elastictrain.launch.membership.decide import decide
from elastictrain.launch.membership.observation import ClusterState, HostObservation, takeover_s
from elastictrain.launch.membership.proposal import in_vacant_places, likely_generation
from elastictrain.launch.membership.records import (
    Create,
    Decision,
    End,
    EndKind,
    Generation,
    GenerationFailure,
    GenerationOutcome,
    HostRecord,
    HostState,
    Leave,
    Wait,
)
from tests.unit.examples import examples
from tests.unit.launch.membership.made import NOW_S, OPTIONS, at, cluster, end, generation, member, observed, record

READY, BUSY, UNFIT, GONE = HostState.READY, HostState.BUSY, HostState.UNFIT, HostState.GONE
LOST_S = OPTIONS.lost_s
TO_END, UNREAD = "c to end generation 1", "the records of all hosts to be read"


def created(decision: Decision) -> Generation:
    assert isinstance(decision, Create), decision
    return decision.generation


def members(decision: Decision) -> str:
    return "".join(one.host for one in created(decision).members)


def waits_for(decision: Decision) -> str:
    assert isinstance(decision, Wait), decision
    return decision.for_what


def is_wait(decision: Decision, part: str, *, until_s: float) -> bool:
    """Whether this is waited for, and until then."""
    return part in waits_for(decision) and isinstance(decision, Wait) and decision.until_s == until_s


def beginning(*others: HostObservation, expected_hosts: int = 0) -> ClusterState:
    """This host, `a`, has just begun, and there has never been a generation."""
    return cluster(*others, began_s=NOW_S, expected_hosts=expected_hosts)


def newcomer(host: str, **more: int) -> HostObservation:
    return observed(record(host, **more), since_s=NOW_S)


def leftover(host: str, state: HostState = READY) -> HostObservation:
    return observed(record(host, state), fresh=False, since_s=NOW_S)


def ended(
    *others: HostObservation, hosts: str = "abc", ends: tuple[End, ...] = (), number: int = 1, **more: object
) -> ClusterState:
    """Generation 1 has ended just now, first of all on this host."""
    told = ends or (end("a", EndKind.GROW, number=number),)
    newest = generation(number, hosts)
    looked = cluster(*others, me=record("a", ended=number), newest=newest, ends=told, ended_s=NOW_S)
    return replace(looked, **more)  # type: ignore[arg-type]


def done(host: str, number: int = 1, state: HostState = READY, *, since_s: float = NOW_S - 1.0) -> HostObservation:
    return observed(record(host, state, ended=number), since_s=since_s)


@pytest.mark.parametrize("kind", [EndKind.LOST, EndKind.LEAVING, EndKind.GROW])
def test_what_a_member_says_to_be_committed_is_progress_and_what_others_say_is_not(kind: EndKind) -> None:
    failures = tuple(GenerationFailure(number, (), 71, "", 0, 400, "b: a peer is gone") for number in (2, 3))
    newest = generation(4, "ab", failures=failures)
    ends = (end("a", kind, number=4, lost="b"), end("b", EndKind.FAILED, 71, number=4))

    def after(line: HostRecord, me: HostRecord) -> Decision:
        return at(ended(observed(line, since_s=NOW_S - 1.0), ends=ends, number=4, newest=newest, me=me), NOW_S + 30)

    def of(host: str, committed: int) -> HostRecord:
        return record(host, ended=4, committed=committed)

    for line, me in ((of("b", 500), of("a", 0)), (of("b", 0), of("a", 500))):
        assert {one.committed_step for one in created(after(line, me)).failures} <= {500}
    assert {one.committed_step for one in created(after(of("z", 500), of("a", 0))).failures} == {400}


# The first generation.


def test_a_host_that_may_not_be_alone_looks_around_first() -> None:
    looked = beginning(expected_hosts=0)
    assert decide(looked, OPTIONS) == Wait("", NOW_S + 2 * OPTIONS.poll_s)
    assert isinstance(at(looked, NOW_S + 2 * OPTIONS.poll_s - 0.1), Wait)
    assert members(at(looked, NOW_S + 2 * OPTIONS.poll_s)) == "a"
    # As soon as workers could start, and not before another host was looked for.
    assert isinstance(at(replace(looked, ready=True), NOW_S + OPTIONS.poll_s - 0.1), Wait)
    assert members(at(replace(looked, ready=True), NOW_S + OPTIONS.poll_s)) == "a"


def test_a_single_host_starts_at_once() -> None:
    first = created(decide(beginning(expected_hosts=1), OPTIONS))
    assert (first.number, first.outcome, first.master_port, first.proposer) == (1, GenerationOutcome.RUN, 29_500, "a")
    assert [(one.host, one.address, one.watch_port, one.processes) for one in first.members] == [("a", "address-a", 7, 1)]


def test_leftovers_delay_a_single_host_a_little_and_hosts_that_have_left_do_not() -> None:
    looked = beginning(leftover("old"), expected_hosts=1)
    assert "of old" in waits_for(decide(looked, OPTIONS))
    assert isinstance(at(looked, NOW_S + LOST_S - 0.1), Wait)
    assert members(at(looked, NOW_S + LOST_S + 0.1)) == "a"
    assert members(decide(beginning(leftover("old", GONE), expected_hosts=1), OPTIONS)) == "a"
    long_known = observed(record("old"), fresh=False, changed_s=NOW_S - 60.0)
    assert members(decide(beginning(long_known, expected_hosts=1), OPTIONS)) == "a"


def test_a_stream_of_new_lines_delays_nobody_for_longer() -> None:
    latest_s = NOW_S + LOST_S + 0.1
    looked = replace(beginning(), now_s=latest_s, read_s=latest_s)
    new = replace(leftover("new"), changed_s=latest_s, since_s=latest_s)
    assert members(decide(replace(looked, observed={"new": new}), OPTIONS)) == "a"


def test_a_group_starts_when_all_that_are_expected_are_there() -> None:
    assert members(decide(beginning(newcomer("b"), newcomer("c"), expected_hosts=3), OPTIONS)) == "abc"
    assert "3 of" in waits_for(decide(beginning(newcomer("b"), newcomer("c"), expected_hosts=4), OPTIONS))


def test_leftovers_are_not_waited_for_where_all_are_there() -> None:
    assert members(decide(beginning(newcomer("b"), leftover("old"), expected_hosts=2), OPTIONS)) == "ab"


def test_a_group_that_has_its_most_hosts_starts() -> None:
    most = replace(OPTIONS, max_hosts=2)
    assert members(decide(beginning(newcomer("b")), most)) == "ab"
    assert members(decide(beginning(newcomer("b"), newcomer("c")), most)) == "ab"


def test_others_may_join_for_a_while() -> None:
    looked = beginning(newcomer("b"))
    decision = decide(looked, OPTIONS)
    assert is_wait(decision, "2 that", until_s=NOW_S + OPTIONS.join_s)
    assert isinstance(at(looked, NOW_S + OPTIONS.join_s - 0.1), Wait)
    assert members(at(looked, NOW_S + OPTIONS.join_s)) == "ab"


def test_the_time_to_join_begins_when_there_are_enough() -> None:
    two = replace(OPTIONS, min_hosts=2)
    looked = cluster(newcomer("b"), began_s=NOW_S - 500.0)
    assert is_wait(decide(looked, two), "2 that", until_s=NOW_S + OPTIONS.join_s)


def test_a_host_that_expects_others_waits_for_them_alone() -> None:
    looked = beginning(expected_hosts=2)
    assert isinstance(decide(looked, OPTIONS), Wait)
    assert members(at(looked, NOW_S + OPTIONS.join_s)) == "a"


def test_too_few_hosts_say_what_they_wait_for_and_until_when() -> None:
    three = replace(OPTIONS, min_hosts=3, wait_s=100.0)
    looked = beginning(newcomer("b"), observed(record("c", UNFIT, reason="no GPU"), since_s=NOW_S))
    for part in ("3 hosts", "`launch.min_hosts`", "a and b", "(no GPU)"):
        assert is_wait(decide(looked, three), part, until_s=NOW_S + 100.0)
    assert isinstance(at(looked, NOW_S + 99.0, three), Wait)
    decision = at(looked, NOW_S + 100.0, three)
    assert isinstance(decision, Leave)
    assert decision.exit_code == EXIT_STOPPED
    assert "`launch.wait_s`" in decision.reason
    assert "3 hosts" in decision.reason
    for_ever = at(looked, NOW_S + 1e6, replace(three, wait_s=0.0))
    assert isinstance(for_ever, Wait)
    assert for_ever.until_s is None


def test_each_host_leaves_those_before_it_time_to_propose() -> None:
    looked = replace(beginning(newcomer("a"), newcomer("b"), expected_hosts=3), me=record("c"))
    decision = decide(looked, OPTIONS)
    assert is_wait(decision, "a to", until_s=NOW_S + 2.0)
    assert members(at(looked, NOW_S + 2.0)) == "abc"


def test_members_are_in_the_order_that_the_cluster_gives_them() -> None:
    others = (newcomer("b", order=0), newcomer("c", order=1))
    looked = replace(beginning(*others, expected_hosts=3), me=record("a", order=2), began_s=NOW_S - 9.0)
    assert members(at(looked, NOW_S + 9.0)) == "bca"


def test_the_end_of_an_earlier_run_is_not_waited_for_and_who_leaves_with_it_is_no_member() -> None:
    over = generation(7, "xy", outcome=GenerationOutcome.GIVE_UP, exit_code=75)
    others = (observed(record("x", ended=6), since_s=NOW_S), newcomer("b"))
    looked = replace(beginning(*others, expected_hosts=2), newest=over, newest_since_s=NOW_S)
    decision = decide(looked, OPTIONS)
    assert (created(decision).number, members(decision)) == (8, "ab")


# After a generation has ended.


def test_those_who_stay_go_on_in_their_places_and_newcomers_follow() -> None:
    looked = ended(done("c"), done("b"), observed(record("aa")), hosts="cab")
    decision = at(looked, NOW_S + 1.0)
    assert members(decision) == "cabaa"
    assert (created(decision).number, created(decision).reason) == (2, "grow-a")


def test_the_last_host_that_was_left_out_for_being_slow_is_remembered() -> None:
    slow, before = (end(host, EndKind.LEAVING, 69, slow_rank=1) for host in "bc")
    others = (done("b", state=UNFIT), done("c"))
    looked = ended(*others, ends=(slow,))
    assert created(at(looked, NOW_S + 1.0)).slow == slow
    later = replace(looked, ends={"a": end("a", EndKind.GROW)}, newest=generation(1, "abc", slow=before))
    assert created(at(later, NOW_S + 1.0)).slow == before


def test_hosts_that_have_left_for_being_slow_and_come_back_train_together() -> None:
    """Nobody else may be left, and each has left the same generation. Who was asked to leave stays away."""
    options = replace(OPTIONS, min_hosts=2)
    slow = tuple(end(host, EndKind.LEAVING, 69, slow_rank=1) for host in "ab")
    gone = done("c", state=GONE)
    assert members(at(ended(done("b"), gone, ends=slow), NOW_S + 1.0, options)) == "ab"
    for other, ends in (
        (done("b"), (slow[0], end("b", EndKind.LEAVING, 75))),
        (done("b", state=UNFIT), slow),
        (observed(record("b")), slow),
    ):
        assert "2 hosts" in waits_for(at(ended(other, gone, ends=ends), NOW_S + 600.0, options))


def test_poisoned_steps_are_remembered_for_good() -> None:
    poisoned = PoisonedSteps(skipped=(412,), went_back=(9,), before_step=8, generation=3)
    newest = replace(generation(1, "abc"), poisoned=poisoned)
    looked = replace(ended(done("b"), done("c")), ends={"a": end("a", EndKind.GROW)}, newest=newest)
    assert created(at(looked, NOW_S + 1.0)).poisoned == poisoned
    failed = replace(looked, ends={"a": end("a", EndKind.FAILED, 70, step=3)})
    assert created(at(failed, NOW_S + 1.0)).poisoned == poisoned


@pytest.mark.parametrize(
    ("spares", "after"),
    [
        ("z", "azc"),
        # The first in the order of newcomers; the second comes after all.
        ("zy", "aycz"),
    ],
)
def test_a_newcomer_takes_the_place_of_a_member_that_is_gone(spares: str, after: str) -> None:
    """The others keep their ranks, and with them their processes."""
    new = [observed(record(host)) for host in spares]
    looked = ended(done("c"), *new, hosts="abc", ends=(end("b", EndKind.LEAVING, 75),))
    assert members(at(looked, NOW_S + 1.0)) == after


def test_the_store_is_where_the_first_host_is_though_it_is_a_newcomer() -> None:
    """Who was a member proposes: it knows first how the generation ended."""
    spare = observed(replace(record("z"), master_port=31_000))
    looked = ended(spare, hosts="ba", ends=(end("b", EndKind.LEAVING, 75),))
    decision = at(looked, NOW_S)
    assert members(decision) == "za"
    assert (created(decision).master_port, created(decision).proposer) == (31_000, "a")


def test_a_newcomer_with_another_number_of_workers_comes_last() -> None:
    looked = ended(done("c"), observed(record("z", processes=2)), hosts="abc", ends=(end("b", EndKind.LEAVING, 75),))
    assert members(at(looked, NOW_S + 1.0)) == "acz"


@pytest.mark.parametrize("seed", range(examples(200)))
def test_places(seed: int) -> None:
    chance = random.Random(seed)
    hosts = chance.sample("abcdefgh", 8)
    before = [member(host, processes=chance.randint(1, 2)) for host in hosts[: chance.randint(0, 6)]]
    chosen = [record(host, processes=chance.randint(1, 2)) for host in chance.sample(hosts, chance.randint(1, 8))]
    placed = in_vacant_places(chosen, before)
    assert sorted(one.host for one in placed) == sorted(one.host for one in chosen)
    old = [one.host for one in before]
    stay = [one.host for one in placed if one.host in old]
    assert stay == [host for host in old if host in stay], "members stay in their order"
    processes = {one.host: one.processes for one in before}
    after_old = [one.host not in old for one in placed]
    for place, one in enumerate(placed):
        if one.host not in old and False in after_old[place:]:
            assert place < len(before), "newcomers come last, or in the place of a member"
    if len(chosen) == len(before) and len({one.processes for one in (*chosen, *before)}) == 1:
        for place, host in enumerate(old):
            assert placed[place].host == host or host not in stay, (processes, placed)


@pytest.mark.parametrize(
    ("options", "me", "newest", "likely"),
    [
        (OPTIONS, record("z"), generation(3, "ab"), "abz"),
        (replace(OPTIONS, max_hosts=2), record("z"), generation(3, "ab"), "az"),
        (replace(OPTIONS, max_hosts=3), record("z"), generation(3, "ab"), "abz"),
        (replace(OPTIONS, grow=False), record("z"), generation(3, "ab"), "az"),
        (OPTIONS, record("b"), generation(3, "ab"), None),
        (OPTIONS, record("z", UNFIT), generation(3, "ab"), None),
        (OPTIONS, record("z"), generation(3, "ab", outcome=GenerationOutcome.DONE), None),
        (OPTIONS, record("z"), None, None),
    ],
)
def test_what_a_spare_host_may_have_to_do_next(
    options: LaunchGroup, me: HostRecord, newest: Generation | None, likely: str | None
) -> None:
    found = likely_generation(newest, me, options)
    assert (found and "".join(one.host for one in found.members)) == likely


def test_a_group_that_goes_on_waits_for_nobody_to_join() -> None:
    looked = ended(done("b", since_s=NOW_S - 1.0), done("c"), began_s=NOW_S - 5.0)
    assert members(decide(looked, OPTIONS)) == "abc"


def test_members_that_are_still_stopping_are_waited_for() -> None:
    looked = ended(done("b"), observed(record("c", BUSY)), ends=(end("a", EndKind.FAILED, EXIT_BUG),))
    assert waits_for(decide(looked, OPTIONS)) == TO_END
    assert isinstance(at(looked, NOW_S + 29.0), Wait)
    assert members(at(looked, NOW_S + 31.0)) == "ab"


def test_members_that_still_save_are_given_the_time_that_a_save_may_take() -> None:
    looked = ended(done("b"), observed(record("c", BUSY)))
    assert isinstance(at(looked, NOW_S + looked.stop_limit_s - 1.0), Wait)
    assert members(at(looked, NOW_S + looked.stop_limit_s + 1.0)) == "ab"


@pytest.mark.parametrize(
    "other",
    [
        observed(record("c", GONE)),
        done("c", state=UNFIT),
        observed(record("c", BUSY), changed_s=NOW_S - 60.0),
        observed(record("c", BUSY), changed_s=NOW_S - 60.0, fresh=False),
    ],
)
def test_who_cannot_come_is_not_waited_for(other: HostObservation) -> None:
    assert members(decide(ended(done("b"), other), OPTIONS)) == "ab"


def test_who_leaves_is_not_waited_for() -> None:
    looked = ended(done("b"), observed(record("c", BUSY)), ends=(end("c", EndKind.LEAVING),))
    decision = decide(looked, OPTIONS)
    assert members(decision) == "ab"
    assert "leaving-c" in created(decision).reason


@pytest.mark.parametrize("line", [done("c"), observed(record("c", READY, ended=0)), observed(record("c", BUSY))])
def test_who_leaves_is_no_member_whatever_its_line_says(line: HostObservation) -> None:
    looked = ended(done("b"), line, ends=(end("c", EndKind.LEAVING),))
    assert members(at(looked, NOW_S + 10.0)) == "ab"


@pytest.mark.parametrize("how", ["watch", "word"])
def test_silent_members_are_waited_for_a_little(how: str) -> None:
    ends = (end("b", EndKind.LOST, lost="c" if how == "word" else ""),)
    looked = ended(done("b"), observed(record("c", BUSY)), ends=ends, silent=frozenset("c" if how == "watch" else ""))
    assert waits_for(at(looked, NOW_S + LOST_S - 0.1)) == TO_END
    assert members(at(looked, NOW_S + LOST_S + 0.1)) == "ab"


def test_a_silent_member_that_has_said_why_it_ends_is_waited_for() -> None:
    """Where the network is out, it may be heard by others and make a larger group with them."""
    looked = ended(done("b"), observed(record("c", BUSY)), ends=(end("c", EndKind.LOST, lost="a"),), silent=frozenset("c"))
    assert waits_for(at(looked, NOW_S + LOST_S + 1.0)) == TO_END
    assert isinstance(at(looked, NOW_S + 31.0), Create)


def test_a_member_that_has_ended_has_said_all_that_it_will() -> None:
    """One that ended for the reason of another host has none of its own."""
    assert members(decide(ended(done("b"), done("c", since_s=NOW_S)), OPTIONS)) == "abc"


def test_a_line_from_before_the_generation_is_not_trusted_at_once() -> None:
    looked = ended(done("b"), observed(record("c", READY, ended=0)))
    assert waits_for(at(looked, NOW_S + LOST_S - 0.1)) == TO_END
    assert members(at(looked, NOW_S + LOST_S + 0.1)) == "abc"


def test_all_records_must_have_been_read_since_the_end() -> None:
    for lines in ((done("b"), observed(record("c", READY))), (done("b"), done("c"), newcomer("d"))):
        looked = replace(ended(*lines), read_s=NOW_S - 0.1)
        assert waits_for(decide(looked, OPTIONS)) == UNREAD


def test_where_all_members_have_told_that_they_are_ready_nothing_is_read() -> None:
    failed = (end("b", EndKind.FAILED, 1),)
    assert members(decide(replace(ended(done("b"), done("c"), ends=failed), read_s=NOW_S - 0.1), OPTIONS)) == "abc"
    # Whoever is to be taken in is known by its line alone.
    looked = replace(ended(done("b"), done("c"), ends=(end("b", EndKind.GROW),)), read_s=NOW_S - 0.1)
    assert waits_for(decide(looked, OPTIONS)) == UNREAD


def test_nobody_grows_silent_while_the_roster_cannot_be_read() -> None:
    looked = ended(done("b"), done("c"))
    assert members(decide(replace(looked, now_s=NOW_S + 1e4), OPTIONS)) == "abc"
    assert members(decide(replace(looked, now_s=NOW_S + 1e4, read_s=NOW_S + 5.0), OPTIONS)) == "a"


def test_too_many_hosts_are_spares_and_members_stay() -> None:
    two = replace(OPTIONS, max_hosts=2)
    looked = ended(done("c"), observed(record("aa")), hosts="ca")
    assert members(at(looked, NOW_S + 1.0, two)) == "ca"
    looked = ended(observed(record("b", order=0)), done("c"), hosts="ca", me=record("a", ended=1, order=5))
    assert members(at(looked, NOW_S + 1.0, two)) == "ca"


def test_a_spare_proposes_when_no_member_does() -> None:
    two = replace(OPTIONS, max_hosts=2)
    looked = ended(done("b"), done("c"), hosts="bc", ends=(end("b", EndKind.FAILED, 1),), me=record("z"))
    assert isinstance(at(looked, NOW_S + 1.9, two), Wait)
    assert members(at(looked, NOW_S + 2.0, two)) == "bc"


def test_who_is_left_out_and_has_not_read_so_is_no_member_and_stays_left_out() -> None:
    newest = generation(4, "ab", excluded=("c", "d", "e"))
    others = (done("b", 4), done("c", 3), done("d", 4), observed(record("e", UNFIT, ended=4)))
    ends = (end("a", EndKind.GROW, number=4),)
    looked = cluster(*others, me=record("a", ended=4), newest=newest, ends=ends, ended_s=NOW_S)
    decision = decide(looked, OPTIONS)
    assert members(decision) == "abd"
    assert created(decision).excluded == ("c",)


def test_who_is_left_out_does_not_count_as_a_replacement() -> None:
    failures = tuple(GenerationFailure(number, ("b",), 139, "", 0, 0, "b: crashed") for number in (2, 3))
    newest = generation(4, "ab", excluded=("c",), failures=failures)
    ends = (end("b", EndKind.FAILED, 139, number=4),)
    looked = cluster(done("b", 4), done("c", 3), me=record("a", ended=4), newest=newest, ends=ends, ended_s=NOW_S)
    two = replace(OPTIONS, min_hosts=2)
    assert created(decide(looked, two)).outcome is GenerationOutcome.GIVE_UP
    rested = replace(looked, observed={**looked.observed, "c": done("c", 4)})
    assert created(decide(rested, two)).excluded == ("b",)


# The end of a run.


def test_the_end_of_the_run_is_told_to_all() -> None:
    ends = tuple(end(host, EndKind.DONE) for host in "abc")
    decision = decide(ended(done("b"), observed(record("c", GONE, ended=1)), observed(record("z")), ends=ends), OPTIONS)
    over = created(decision)
    assert (over.outcome, over.exit_code, over.master_port, members(decision)) == (GenerationOutcome.DONE, EXIT_OK, 0, "abcz")


def test_a_run_that_ends_as_soon_as_it_has_begun_concerns_its_hosts() -> None:
    looked = ended(done("b"), done("c"), ends=(end("b", EndKind.FAILED, EXIT_CONFIG),), began_s=NOW_S - 2.0)
    assert created(at(looked, NOW_S + 1.0)).outcome is GenerationOutcome.GIVE_UP


def test_the_end_needs_no_minimum() -> None:
    looked = ended(hosts="abc", ends=(end("a", EndKind.FAILED, EXIT_CONFIG),))
    over = created(decide(looked, replace(OPTIONS, min_hosts=3)))
    assert (over.outcome, over.exit_code) == (GenerationOutcome.GIVE_UP, EXIT_CONFIG)


@pytest.mark.parametrize(("kind", "code"), [(EndKind.DONE, 0), (EndKind.FAILED, EXIT_CONFIG)])
def test_who_is_started_after_all_have_left_goes_on(kind: EndKind, code: int) -> None:
    newest = generation(3, "a")
    others = observed(record("a", GONE, ended=3))
    looked = cluster(
        others,
        me=record("z"),
        newest=newest,
        ends=[end("a", kind, code, number=3)],
        ended_s=NOW_S,
        newest_since_s=NOW_S,
        began_s=NOW_S,
        expected_hosts=1,
    )
    following = created(decide(looked, OPTIONS))
    assert (following.number, following.outcome, following.failures) == (4, GenerationOutcome.RUN, ())
    # A spare has seen it happen, and is concerned.
    assert created(decide(replace(looked, began_s=0.0), OPTIONS)).outcome is not GenerationOutcome.RUN


def test_hosts_that_are_started_again_after_all_have_left_wait_for_each_other() -> None:
    newest = generation(3, "xy")
    looked = cluster(
        newcomer("b"),
        newest=newest,
        ends=[end("x", EndKind.LEAVING, number=3), end("y", EndKind.LEAVING, number=3)],
        ended_s=NOW_S,
        newest_since_s=NOW_S,
        began_s=NOW_S,
        expected_hosts=3,
    )
    assert "2 of" in waits_for(decide(looked, OPTIONS))


# A generation that nobody has ended.


def test_a_spare_takes_over_when_all_members_have_been_silent_for_long() -> None:
    newest = generation(2, "xy")
    looked = cluster(
        observed(record("x", BUSY), changed_s=NOW_S - 1.0),
        observed(record("y", BUSY), changed_s=NOW_S, fresh=False),
        newest=newest,
        newest_since_s=NOW_S - 50.0,
        began_s=NOW_S - 50.0,
    )
    last_s = NOW_S + takeover_s(OPTIONS)
    assert takeover_s(OPTIONS) >= 4 * LOST_S
    for now_s, expected in ((last_s - 0.1, Wait), (last_s + 0.1, Create)):
        decision = decide(replace(looked, now_s=now_s, read_s=now_s), OPTIONS)
        assert isinstance(decision, expected)
    following = created(decide(replace(looked, now_s=last_s + 1.0, read_s=last_s + 1.0), OPTIONS))
    assert (following.number, following.failures) == (3, ())
    assert "x and" in following.reason
    # Storage that cannot be read says nothing about anybody.
    assert "generation 2" in waits_for(decide(replace(looked, now_s=NOW_S + 1e4), OPTIONS))


def test_one_member_that_lives_is_enough_to_keep_a_generation() -> None:
    newest = generation(2, "xy")
    looked = cluster(observed(record("x", BUSY), changed_s=0.0), observed(record("y", BUSY)), newest=newest)
    assert isinstance(decide(looked, OPTIONS), Wait)


def test_members_that_have_left_or_are_unfit_keep_no_generation() -> None:
    looked = cluster(observed(record("x", GONE)), observed(record("y", UNFIT)), newest=generation(2, "xy"))
    assert members(decide(looked, OPTIONS)) == "a"


def test_a_generation_that_a_member_is_done_with_has_ended_even_if_its_reason_is_lost() -> None:
    newest = generation(2, "xy")
    looked = cluster(done("x", 2, since_s=NOW_S), done("y", 2, since_s=NOW_S), newest=newest)
    assert isinstance(at(looked, NOW_S + LOST_S - 0.1), Wait)
    following = created(at(looked, NOW_S + LOST_S + 2.0))
    assert [one.host for one in following.members] == ["x", "y", "a"]


def test_a_member_waits_for_its_own_word_to_be_stored() -> None:
    looked = cluster(observed(record("b", GONE)), me=record("a", ended=2), newest=generation(2, "ab"))
    assert isinstance(decide(looked, OPTIONS), Wait)


def test_a_record_that_is_damaged_is_followed_by_another() -> None:
    looked = cluster(newest=replace(generation(2, ""), reason="its record is damaged"))
    following = created(decide(looked, OPTIONS))
    assert following.number == 3
    assert "damaged" in following.reason


# Hosts that live and do not hear each other.


def of_part(host: str, hears: str, *, number: int = 1, hears_since_s: float = NOW_S) -> HostObservation:
    return observed(record(host, ended=number, hears=hears), since_s=NOW_S - 1.0, hears_since_s=hears_since_s)


def apart(*others: HostObservation, heard: str, hosts: str = "abcd", **more: object) -> ClusterState:
    """Generation 1 of four hosts has ended here, host `a`, because another one was not heard any more."""
    ends = tuple(end(host, EndKind.LOST, lost=host) for host in hosts)
    looked = ended(*others, hosts=hosts, ends=ends, heard=frozenset(heard), heard_since_s=NOW_S)
    return replace(looked, **more)  # type: ignore[arg-type]


def test_the_largest_part_goes_on_once_it_is_certain_and_the_others_wait() -> None:
    looked = apart(of_part("b", "ac"), of_part("c", "ab"), of_part("d", ""), heard="bc")
    assert isinstance(at(looked, NOW_S + LOST_S / 2 - 0.1), Wait)
    following = created(at(looked, NOW_S + LOST_S / 2))
    assert "".join(one.host for one in following.members) == "abc"
    assert (following.outcome, following.failures) == (GenerationOutcome.RUN, ())
    alone = apart(of_part("b", "cd"), of_part("c", "bd"), of_part("d", "bc"), heard="")
    assert at(alone, NOW_S + 1e4) == Wait(waits_for(at(alone, NOW_S + 1e4)))
    assert "- b" in waits_for(at(alone, NOW_S + 1e4))


def test_of_two_equal_parts_that_of_the_first_host_goes_on() -> None:
    halves = (of_part("b", "a"), of_part("c", "d"), of_part("d", "c"))
    assert members(at(apart(*halves, heard="b"), NOW_S + LOST_S)) == "ab"
    assert isinstance(at(apart(*halves, heard="b", hosts="cdab"), NOW_S + LOST_S), Wait)


def test_parts_that_are_too_small_wait_until_the_network_is_back() -> None:
    two = replace(OPTIONS, min_hosts=2)
    alone = apart(of_part("b", ""), of_part("c", ""), of_part("d", ""), heard="")
    assert "- d" in waits_for(at(alone, NOW_S + 600.0, two))
    # Those that come first wait for those that are heard a moment later.
    back_s = NOW_S + 600.0
    coming = apart(of_part("b", "a", hears_since_s=back_s), of_part("c", ""), of_part("d", ""), heard="b")
    assert isinstance(at(coming, back_s + LOST_S / 4, two), Wait)
    lines = (of_part(host, "abcd", hears_since_s=back_s + 0.5) for host in "bcd")
    assert members(at(apart(*lines, heard="bcd"), back_s + 0.5, two)) == "abcd"


def test_what_this_host_has_just_begun_to_hear_is_waited_for_as_well() -> None:
    looked = apart(of_part("b", "a"), of_part("c", ""), heard="b", hosts="abc", heard_since_s=NOW_S + 50.0)
    assert isinstance(at(looked, NOW_S + 50.0), Wait)
    assert members(at(looked, NOW_S + 50.0 + LOST_S)) == "ab"


def test_a_part_that_is_as_large_as_a_group_may_be_waits_for_nobody() -> None:
    looked = apart(of_part("b", "a"), of_part("c", ""), of_part("d", ""), heard="b")
    assert members(at(looked, NOW_S, replace(OPTIONS, max_hosts=2))) == "ab"


def test_where_only_connections_broke_it_is_found_out_first_who_is_heard() -> None:
    ends = tuple(end(host, EndKind.FAILED, 71) for host in "abc")
    looked = ended(done("b"), done("c"), ends=ends)
    assert isinstance(at(looked, NOW_S + LOST_S / 2), Wait)
    assert members(at(looked, NOW_S + LOST_S)) == "abc"
    killed = (*ends[:2], end("c", EndKind.FAILED, 137))
    assert members(at(replace(looked, ends={one.host: one for one in killed}), NOW_S)) == "abc"


def test_a_run_that_is_done_is_done_for_hosts_that_are_not_heard() -> None:
    ends = tuple(end(host, EndKind.DONE) for host in "abc")
    looked = ended(of_part("b", "a"), of_part("c", ""), ends=ends, heard=frozenset("b"))
    assert created(at(looked, NOW_S + 60.0)).outcome is GenerationOutcome.DONE
