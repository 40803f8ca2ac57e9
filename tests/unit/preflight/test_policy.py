from collections.abc import Sequence
from dataclasses import replace

import pytest

from elastictrain.config.preflight import PreflightChecks, PreflightGroup
from elastictrain.preflight.policy import (
    STARTS,
    Level,
    apply_modes,
    choose_level,
    decide,
    drop_symptoms,
    find_repeated,
    find_slow,
    host_of,
)
from elastictrain.preflight.verdict import Status, Verdict
from tests.unit.preflight.made import link, rank, verdict

SLOW = {"check": "bandwidth", "subject": "b"}
FLAPS = {"check": "counters", "subject": "c"}
HANG = [71, 71, 71]


@pytest.mark.parametrize(
    ("first", "exit_codes", "level", "after_failure"),
    [
        (True, [], "full", False),
        (True, HANG, "full", False),
        (False, [], "quick", False),
        (False, HANG, "full", True),
        # A rank that said nothing was killed: that the others then failed says nothing about the network.
        (False, [71, 71, None], "quick", False),
        (False, [75, 75, 75], "quick", False),
        (False, [70, 71, 71], "full", True),
    ],
)
def test_the_level_follows_from_how_the_last_incarnation_ended(
    first: bool, exit_codes: list[int | None], level: str, after_failure: bool
) -> None:
    chosen = choose_level(first_start=first, exit_codes=exit_codes)
    assert (chosen.level, chosen.after_failure) == (Level(level), after_failure)
    assert chosen.reason


def test_what_is_off_is_left_out_and_what_only_warns_does_not_fail() -> None:
    found = [verdict("fail", check="mtu"), verdict("fail", check="disk"), verdict("fail", check="xid"), verdict(check="mtu")]
    kept = apply_modes(found, {"mtu": "warn", "disk": "off"})
    assert [(one.check, one.status) for one in kept] == [("mtu", "warn"), ("xid", "fail"), ("mtu", "pass")]


HOSTS = ["a", "b", "c"]


@pytest.mark.parametrize(
    ("slow", "broken", "spare", "excused"),
    [
        ("b", "", None, False),
        ("b", "", 2, False),
        ("b", "", 1, False),
        ("b", "", 0, True),
        ("bc", "", 1, True),
        # Without the broken one, no other is left to spare.
        ("b", "c", 1, True),
        ("b", "c", 2, False),
    ],
)
def test_a_slow_host_is_left_out_if_enough_others_remain(slow: str, broken: str, spare: int | None, excused: bool) -> None:
    found = [verdict("fail", check="matmul", subject=rank(3, host)) for host in slow]
    found += [verdict("fail", check="disk", subject=host) for host in broken]
    kept = apply_modes(found, {"matmul": "exclude", "disk": "fail"}, spare=spare)
    wanted = ("warn", True) if excused else ("fail", False)
    assert [(one.status.value, one.excused) for one in kept] == [wanted] * len(slow) + [("fail", False)] * len(broken)


def test_training_goes_on_over_a_slow_link() -> None:
    found = [verdict("fail", check="bandwidth", subject=link("a", "b"), scope="link")]
    assert [one.excused for one in apply_modes(found, {"bandwidth": "exclude"}, spare=2)] == [True]
    assert apply_modes(found, {"bandwidth": "exclude"}) == found


def test_the_only_host_of_a_run_trains_although_it_is_slow_and_not_if_that_must_not_be() -> None:
    found = [verdict("fail", check="matmul", subject=rank(3, "a"))]
    for settings, code in ((PreflightGroup(), 0), (PreflightGroup(strict=True), 69)):
        assert codes(apply_modes(found, settings.modes, spare=0), hosts=["a"]) == {"a": code}


@pytest.mark.parametrize("check", ["bus_bandwidth", "p2p", "nccl_transport"])
def test_gates_that_only_warn_until_they_are_to_fail(check: str) -> None:
    found, failing = [verdict("fail", check=check, subject="a")], PreflightChecks(**{check: "fail"})
    wanted = ((PreflightGroup(), 0), (PreflightGroup(strict=True), 69), (PreflightGroup(checks=failing), 69))
    for settings, code in wanted:
        assert codes(apply_modes(found, settings.modes, spare=0), hosts=["a"]) == {"a": code}
    off = PreflightGroup(strict=True, checks=PreflightChecks(**{check: "off"}))
    assert apply_modes(found, off.modes) == []


def left(*found: Verdict, hosts: str = "abc") -> list[tuple[str, str]]:
    return [(one.check, one.subject) for one in drop_symptoms(found, hosts=hosts)]


def test_a_cause_swallows_the_symptoms_of_its_host() -> None:
    cause = verdict("fail", check="interface", subject="b")
    symptoms = [
        verdict("fail", check="reachable", subject=link("a", "b"), scope="link"),
        verdict("fail", check="reachable", subject="b"),
        verdict("warn", check="bandwidth", subject="b"),
        verdict("fail", check="roster", subject="b"),
    ]
    others = [
        verdict("fail", check="disk", subject="b"),
        verdict("fail", check="reachable", subject=link("a", "c"), scope="link"),
        verdict("warn", check="interface", subject="c"),
        verdict(check="latency", subject="b"),
    ]
    kept = left(*symptoms, *others, cause)
    assert kept[0] == ("interface", "b")
    assert sorted(kept[1:]) == sorted((one.check, one.subject) for one in others)
    # A warning explains no failure.
    assert ("roster", "b") in left(*symptoms, *others, replace(cause, status=Status.WARN))


def test_a_cause_on_a_link_explains_that_link_only() -> None:
    def on(check: str, source: str, target: str) -> Verdict:
        return verdict("fail", check=check, subject=link(source, target), scope="link")

    kept = left(on("reachable", "b", "a"), on("bandwidth", "a", "c"), on("mtu", "a", "b"))
    assert kept == [("mtu", link("a", "b")), ("bandwidth", link("a", "c"))]


def test_a_symptom_is_not_taken_for_a_cause() -> None:
    found = [verdict("fail", check="mtu", subject="b"), verdict("fail", check="bandwidth", subject="b")]
    assert left(*found, verdict("fail", check="reachable", subject="b")) == [("mtu", "b")]
    assert left(found[1], verdict("fail", check="name", subject="a")) == [("name", "a"), ("bandwidth", "b")]


def test_a_host_explains_its_links_also_in_one_check() -> None:
    on_link = verdict("fail", check="interface", subject=link("a", "b"), scope="link")
    assert left(on_link, verdict("fail", check="interface", subject="b")) == [("interface", "b")]
    assert left(on_link, verdict("fail", check="interface", subject="c")) == [("interface", "c"), ("interface", link("a", "b"))]


@pytest.mark.parametrize(("bad", "explained"), [("ab", True), ("a", False), ("", False)])
def test_where_one_good_host_is_left_nothing_more_is_known_of_the_group(bad: str, explained: bool) -> None:
    causes = [verdict("fail", check="interface", subject=host) for host in bad]
    kept = left(*causes, verdict("fail", check="reachable", subject="all", scope="group"))
    assert (("reachable", "all") not in kept) == explained


def codes(found: list[Verdict], *, hosts: Sequence[str] = HOSTS) -> dict[str, int]:
    """With which each host leaves; 0 goes on."""
    errors = {host: decide(found, host=host, hosts=hosts) for host in hosts}
    return {host: 0 if error is None else error.exit_code for host, error in errors.items()}


def test_nothing_failed() -> None:
    assert codes([verdict(), verdict("warn"), verdict("skip")]) == dict.fromkeys(HOSTS, 0)


def test_the_unfit_host_leaves_and_the_others_start_again_without_it() -> None:
    found = [verdict("fail", check="disk", subject="b"), verdict(check="disk", subject="a")]
    assert codes(found) == {"a": 71, "b": 69, "c": 71}
    assert "b: disk" in str(decide(found, host="a", hosts=HOSTS))


@pytest.mark.parametrize("subject", ["GPU 3 on b", "rank 5 on b", "b"])
def test_devices_and_ranks_are_of_their_host(subject: str) -> None:
    assert host_of(subject) == "b"
    assert codes([verdict("fail", subject=subject)])["b"] == 69


def test_what_fails_on_every_host_alike_is_not_tried_again() -> None:
    found = [verdict("fail", check="storage", subject=host) for host in HOSTS]
    assert codes(found) == dict.fromkeys(HOSTS, 78)
    assert "storage" in str(decide(found, host="a", hosts=HOSTS))
    assert codes(found[:2])["c"] == 71


def test_what_may_pass_is_tried_again_even_if_it_fails_on_every_host() -> None:
    found = [replace(verdict("fail", check="storage", subject=host), may_pass=host == "b") for host in HOSTS]
    assert codes(found) == dict.fromkeys(HOSTS, 71)


def test_a_host_that_is_alone_is_unfit() -> None:
    assert codes([verdict("fail", subject="a")], hosts=["a"]) == {"a": 69}


@pytest.mark.parametrize(("scope", "subject"), [("link", "a -> b"), ("group", "all")])
def test_links_and_groups_make_nobody_unfit(scope: str, subject: str) -> None:
    assert codes([verdict("fail", scope=scope, subject=subject)]) == dict.fromkeys(HOSTS, 71)


def test_what_comes_again_and_again_is_told() -> None:
    now = [
        verdict("warn", check="counters", subject="c"),
        verdict("fail", check="bandwidth", subject="b"),
        verdict(check="mtu"),
    ]
    first, second = find_repeated(now, [[SLOW], [], [SLOW, FLAPS], [{"check": "mtu", "subject": "a"}]])
    assert first == "bandwidth of b: 3 of the last 5 starts"
    assert (second.startswith("counters"), "2" in second) == (True, True)


def test_what_is_new_is_not() -> None:
    assert find_repeated([verdict("fail", check="disk", subject="b")], [[SLOW]]) == []
    assert find_repeated([verdict("fail", check="bandwidth", subject="b")], []) == []


def test_what_is_long_ago_is_forgotten_and_garbled_rows_say_nothing() -> None:
    before = [[SLOW], *([{}] for _ in range(STARTS - 1))]
    assert find_repeated([verdict("fail", check="bandwidth", subject="b")], before) == []


@pytest.mark.parametrize(
    ("before", "slow"),
    [
        ([], False),
        ([[{"check": "matmul", "subject": "rank 3 on b", "status": "fail"}], []], True),
        ([[{"check": "bandwidth", "subject": "b", "status": "fail"}]], True),
        # It is not back; it was broken; a link is nobody's.
        ([[{"check": "bandwidth", "subject": "d", "status": "fail"}]], False),
        ([[{"check": "disk", "subject": "b", "status": "fail"}]], False),
        ([[{"check": "bandwidth", "subject": link("a", "b"), "status": "fail"}]], False),
        ([[{"check": "bandwidth", "subject": "b", "status": "warn"}]], False),
        ([[{"check": "bandwidth", "subject": "b", "status": "warn", "excused": True}]], True),
        # It was measured again since then.
        ([[{"check": "bandwidth", "subject": "b", "status": "warn", "excused": True}], []], False),
        ([[{}, {"excused": "yes", "status": 7}]], False),
    ],
)
def test_what_was_slow_is_measured_again(before: list[list[dict[str, object]]], slow: bool) -> None:
    assert bool(find_slow(before, modes=PreflightGroup().modes, hosts=HOSTS)) is slow
