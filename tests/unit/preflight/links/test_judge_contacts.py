from typing import Any

import pytest

from elastictrain.config.preflight import PreflightThresholds
from elastictrain.preflight.links.judge import judge_latency, suspicious_contacts
from elastictrain.preflight.links.judge_contacts import judge_clocks, judge_mtu, judge_reach, offsets_from_group
from elastictrain.preflight.links.messages import Link
from elastictrain.preflight.verdict import Scope, Status, Verdict
from tests.unit.preflight.links.made import contacts, roster
from tests.unit.preflight.made import link

THRESHOLDS = PreflightThresholds()


def subjects(verdicts: list[Verdict]) -> list[tuple[Status, Scope, str]]:
    return [(verdict.status, verdict.scope, verdict.subject) for verdict in verdicts]


def mtu(bad: set[Link], *, largest: int | None = 1500) -> list[Verdict]:
    return judge_mtu(contacts(3, lambda link: {"largest": largest} if link in bad else {}), roster=roster(3))


EVERY = {(a, b) for a in range(3) for b in range(3) if a != b}
OF_H3 = {link for link in EVERY if 2 in link}


def test_healthy_links_pass_everything() -> None:
    found = contacts(3)
    verdicts = judge_reach(found, roster=roster(3)) + judge_mtu(found, roster=roster(3))
    verdicts += judge_latency(found, roster=roster(3), thresholds=THRESHOLDS)
    verdicts += judge_clocks(found, roster=roster(3), thresholds=THRESHOLDS)
    assert subjects(verdicts) == [(Status.PASS, Scope.GROUP, "all")] * 4
    assert suspicious_contacts(found, thresholds=THRESHOLDS) == set()


def test_nothing_known_is_skipped() -> None:
    unknown: dict[str, Any] = {"largest": None, "latency_s": None, "offset_s": None}
    found = contacts(3, lambda link: unknown)
    verdicts = judge_mtu(found, roster=roster(3)) + judge_reach({}, roster=roster(3))
    verdicts += judge_latency(found, roster=roster(3), thresholds=THRESHOLDS)
    verdicts += judge_clocks(found, roster=roster(3), thresholds=THRESHOLDS)
    assert {verdict.status for verdict in verdicts} == {Status.SKIP}


def test_large_frames_vanish_everywhere() -> None:
    (verdict,) = mtu(EVERY)
    assert subjects([verdict]) == [(Status.FAIL, Scope.GROUP, "all")]
    assert ("1500" in str(verdict.measured), "9000" in str(verdict.expected)) == (True, True)
    # Commands are typed as they are.
    assert "`ip link set dev eth0 mtu 1500` on h1, h2, h3" in verdict.remedy


def test_large_frames_vanish_at_one_host() -> None:
    (verdict,) = mtu(OF_H3)
    assert subjects([verdict]) == [(Status.FAIL, Scope.HOST, "h3")]
    assert "h3" in verdict.remedy
    assert "h1" not in verdict.remedy
    (sent,) = mtu({(2, 0), (2, 1)})
    assert (sent.subject, "sends" in str(sent.measured)) == ("h3", True)


def test_large_frames_vanish_on_one_link() -> None:
    (verdict,) = mtu({(2, 0)})
    assert subjects([verdict]) == [(Status.FAIL, Scope.LINK, link("h3", "h1"))]


def test_a_smaller_interface_on_one_side_is_nothing_to_find() -> None:
    found = contacts(3, lambda link: {"largest": 1500, "intended": 1500} if 2 in link else {})
    assert subjects(judge_mtu(found, roster=roster(3))) == [(Status.PASS, Scope.GROUP, "all")]


def reach(bad: set[Link], *, reason: str = "no answer") -> list[Verdict]:
    found = contacts(3, lambda link: {"blocked": ((29502, reason),)} if link in bad else {})
    return judge_reach(found, roster=roster(3))


def test_a_port_blocked_one_way() -> None:
    (verdict,) = reach({(2, 0)})
    assert subjects([verdict]) == [(Status.FAIL, Scope.LINK, link("h3", "h1"))]
    assert "29502" in str(verdict.measured)
    command = "iptables -I INPUT -p tcp -s 10.0.0.3 -m multiport --dports 29502 -j ACCEPT"
    assert command in verdict.remedy


@pytest.mark.parametrize("bad", [{(2, 0)}, OF_H3, EVERY])
def test_a_port_that_the_kernel_picked_stands_for_its_range(bad: set[Link]) -> None:
    """It is never used again, so no remedy names it."""
    found = contacts(3, lambda link: {"blocked": ((29501, "no answer"),)} if link in bad else {})
    (verdict,) = judge_reach(found, roster=roster(3))
    assert "29501" not in verdict.remedy
    assert "32768-60999" in verdict.remedy
    assert ("--dports 32768:60999 -j" in verdict.remedy) == (bad == {(2, 0)})


@pytest.mark.parametrize(
    ("bad", "subject", "scope"),
    [
        (OF_H3, "h3", Scope.HOST),
        ({(2, 0), (2, 1)}, "h3", Scope.HOST),
        ({(0, 2), (1, 2)}, "h3", Scope.HOST),
        (EVERY, "all", Scope.GROUP),
    ],
)
def test_who_cannot_be_reached(bad: set[Link], subject: str, scope: Scope) -> None:
    (verdict,) = reach(bad)
    assert subjects([verdict]) == [(Status.FAIL, scope, subject)]
    assert "29502" in str(verdict.measured)


def test_the_direction_that_is_dead_is_said() -> None:
    said = {str(reach(bad)[0].measured) for bad in (OF_H3, {(2, 0), (2, 1)}, {(0, 2), (1, 2)})}
    assert len(said) == 3


def test_an_address_that_another_host_answers_at() -> None:
    for bad in ({(0, 2), (1, 2)}, {(0, 2)}):
        (verdict,) = reach(bad, reason="another host answers at this address")
        assert "twice" in verdict.remedy
        assert "10.0.0.3" in verdict.remedy


def late(bad: set[Link], *, num_hosts: int = 3, latency_s: float = 0.04) -> list[Verdict]:
    found = contacts(num_hosts, lambda link: {"latency_s": latency_s} if link in bad else {})
    return judge_latency(found, roster=roster(num_hosts), thresholds=THRESHOLDS)


def test_a_late_host() -> None:
    (verdict,) = late(OF_H3)
    assert subjects([verdict]) == [(Status.FAIL, Scope.HOST, "h3")]
    assert (verdict.measured, verdict.expected, verdict.unit) == (40.0, 0.2, "ms")


def test_a_busy_processor_is_not_late() -> None:
    assert subjects(late(OF_H3, latency_s=0.004)) == [(Status.PASS, Scope.GROUP, "all")]


def test_a_late_link_is_told_once() -> None:
    assert subjects(late({(0, 1), (1, 0)})) == [(Status.WARN, Scope.LINK, link("h1", "h2"))]


def test_two_hosts_are_late_to_each_other() -> None:
    both = {(0, 1), (1, 0)}
    assert subjects(late(both, num_hosts=2)) == [(Status.PASS, Scope.GROUP, "all")]
    (verdict,) = late({(0, 1)}, num_hosts=2)
    assert subjects([verdict]) == [(Status.FAIL, Scope.LINK, link("h1", "h2"))]


def clocks(num_hosts: int, ahead: dict[int, float]) -> list[Verdict]:
    found = contacts(num_hosts, lambda link: {"offset_s": ahead.get(link[1], 0.0) - ahead.get(link[0], 0.0)})
    return judge_clocks(found, roster=roster(num_hosts), thresholds=THRESHOLDS)


def test_clocks() -> None:
    (off,) = clocks(3, {0: 20.0})
    assert (off.status, off.subject, off.measured) == (Status.FAIL, "h1", 20.0)
    assert subjects(clocks(3, {2: -1.5})) == [(Status.WARN, Scope.HOST, "h3")]
    assert subjects(clocks(3, {2: 0.9})) == [(Status.PASS, Scope.GROUP, "all")]
    (pair,) = clocks(2, {1: 3.0})
    assert subjects([pair]) == [(Status.FAIL, Scope.GROUP, "h1, h2")]


def test_all_that_looks_bad_is_tried_again() -> None:
    changes: dict[Link, dict[str, Any]] = {
        (0, 1): {"blocked": ((1, "refused"),)},
        (1, 2): {"largest": 1500},
        (2, 3): {"lost": 100},
        (3, 0): {"latency_s": 0.5},
    }
    found = contacts(4, lambda link: changes.get(link, {}))
    assert suspicious_contacts(found, thresholds=THRESHOLDS) == changes.keys()


def test_offsets_add_up_along_a_ring_and_the_median_is_the_time() -> None:
    true = {0: 20.0, 1: 0.0, 2: 0.1, 3: -0.1}
    ring = {(a, (a + 1) % 4): true[(a + 1) % 4] - true[a] for a in range(3)}
    found = offsets_from_group(ring)
    assert {host: round(offset, 6) for host, offset in found.items()} == {0: 20.0, 1: 0.0, 2: 0.1, 3: -0.1}


def test_of_two_hosts_the_first_has_the_time() -> None:
    assert offsets_from_group({(1, 0): 5.0}) == {0: 0.0, 1: -5.0}


def test_nobody_asked_nothing_known() -> None:
    assert offsets_from_group({}) == {}


def test_who_was_not_reached_is_left_out() -> None:
    assert offsets_from_group({(0, 1): 0.0}).keys() == {0, 1}
