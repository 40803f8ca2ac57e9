from dataclasses import replace

import pytest

from elastictrain.config.preflight import PreflightThresholds
from elastictrain.preflight.links.judge import judge_bandwidth, suspect_rounds
from elastictrain.preflight.links.messages import Flow, Link
from elastictrain.preflight.verdict import Scope, Status, Verdict
from tests.unit.preflight.links.made import all_links, flows, roster
from tests.unit.preflight.made import link as way

THRESHOLDS = PreflightThresholds()
SENT, RECEIVED = {(2, 0), (2, 1)}, {(0, 2), (1, 2)}


def judge(num_hosts: int, slow: set[Link], *, gbps: float = 0.1, again: bool = True) -> list[Verdict]:
    first = flows(all_links(num_hosts), lambda link: gbps if link in slow else 10.0)
    return judge_bandwidth(first, first if again else [], roster=roster(num_hosts), thresholds=THRESHOLDS)


def subjects(verdicts: list[Verdict]) -> list[tuple[Status, Scope, str, str]]:
    return [(verdict.status, verdict.scope, verdict.subject, verdict.unit) for verdict in verdicts]


@pytest.mark.parametrize(
    ("slow", "unit", "first_look"),
    [(SENT | RECEIVED, "Gbit/s", "ethtool"), (SENT, "Gbit/s sent", "tc"), (RECEIVED, "Gbit/s received", "ethtool")],
)
def test_a_slow_host(slow: set[Link], unit: str, first_look: str) -> None:
    (verdict,) = judge(3, slow)
    assert subjects([verdict]) == [(Status.FAIL, Scope.HOST, "h3", unit)]
    assert (verdict.measured, verdict.expected) == (0.1, 10.0)
    # The first command is the one to begin with.
    assert verdict.remedy.partition("`")[2].startswith(first_look)


def test_all_well_and_nothing_known() -> None:
    assert subjects(judge(3, set())) == [(Status.PASS, Scope.GROUP, "all", "Gbit/s")]
    (nothing,) = judge_bandwidth([], [], roster=roster(3), thresholds=THRESHOLDS)
    assert nothing.status is Status.SKIP


def test_a_slow_link_is_a_warning_and_a_hopeless_one_a_failure() -> None:
    assert subjects(judge(3, {(0, 1)}, gbps=3.0)) == [(Status.WARN, Scope.LINK, way("h1", "h2"), "Gbit/s")]
    assert subjects(judge(3, {(0, 1)}, gbps=0.3)) == [(Status.FAIL, Scope.LINK, way("h1", "h2"), "Gbit/s")]


def test_nobody_fails_by_one_measurement() -> None:
    (verdict,) = judge(3, {(0, 1)}, again=False)
    assert (verdict.status, verdict.subject) == (Status.WARN, way("h1", "h2"))
    assert "confirmed" in verdict.unit
    assert [verdict.status for verdict in judge(3, SENT, again=False)] == [Status.WARN]


def test_nobody_fails_for_want_of_a_processor() -> None:
    for slow in (SENT, {(0, 1)}):
        # 0.8 of the time without a processor: 2 Gbit/s may be 10, but 0.1 not more than 0.5.
        for gbps, waited, status in ((2.0, 0.8, Status.WARN), (0.1, 0.8, Status.FAIL), (0.1, 0.0, Status.FAIL)):
            first = flows(all_links(3), lambda link, slow=slow, gbps=gbps: gbps if link in slow else 10.0)
            again = [replace(flow, waited=waited) for flow in first]
            (verdict,) = judge_bandwidth(first, again, roster=roster(3), thresholds=THRESHOLDS)
            assert verdict.status is status


def test_slow_only_while_bytes_go_both_ways() -> None:
    first = [
        Flow(link=(a, b), gbps=1.0 if both and 2 in (a, b) else 10.0, both=both)
        for a, b in all_links(3)
        for both in (False, True)
    ]
    verdicts = judge_bandwidth(first, first, roster=roster(3), thresholds=THRESHOLDS)
    assert [row[:3] for row in subjects(verdicts)] == [(Status.FAIL, Scope.HOST, "h3")]
    assert verdicts[0].unit != judge(3, SENT | RECEIVED)[0].unit


def test_two_hosts() -> None:
    slow = set(all_links(2))
    assert subjects(judge(2, slow)) == [(Status.PASS, Scope.GROUP, "all", "Gbit/s")]
    assert [row[:3] for row in subjects(judge(2, {(0, 1)}))] == [(Status.FAIL, Scope.LINK, way("h1", "h2"))]


def test_suspects_are_measured_again_with_good_hosts() -> None:
    healthy = flows(all_links(4), lambda link: 10.0)
    assert suspect_rounds(healthy, num_hosts=4, thresholds=THRESHOLDS) == ()
    slow = flows(all_links(4), lambda link: 0.1 if 3 in link else 10.0)
    rounds = suspect_rounds(slow, num_hosts=4, thresholds=THRESHOLDS)
    assert [len(pairs) for pairs in rounds] == [1, 1]
    assert {suspect for ((_, suspect),) in rounds} == {3}
    link = flows(all_links(4), lambda link: 0.1 if link == (0, 2) else 10.0)
    assert suspect_rounds(link, num_hosts=4, thresholds=THRESHOLDS) == (((0, 2),), ((0, 2),))
