from collections.abc import Sequence
from dataclasses import replace

import pytest

from elastictrain.preflight.policy import (
    STARTS,
    Level,
    apply_modes,
    choose_level,
    decide,
    find_repeated,
    host_of,
)
from elastictrain.preflight.verdict import Verdict
from tests.unit.preflight.made import verdict

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
