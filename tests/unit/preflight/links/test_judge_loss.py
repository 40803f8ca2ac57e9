"""Losses that are drawn at random: who is named, in thousands of groups."""

import math
import random
from collections.abc import Callable

import pytest

from elastictrain.config.preflight import PreflightThresholds
from elastictrain.preflight.links.judge import judge_links, judge_loss, suspicious_contacts
from elastictrain.preflight.links.messages import Contact, Link, merged
from elastictrain.preflight.verdict import Scope, Status, Verdict, failures, findings
from tests.unit.examples import examples
from tests.unit.preflight.links.made import all_links, contacts, flows, roster
from tests.unit.preflight.made import link

THRESHOLDS = PreflightThresholds()
Named = set[tuple[Status, Scope, str]]


def draw(sent: int, part: float, source: random.Random) -> int:
    """How many of `sent` segments get lost: a binomial number."""
    mean = sent * part
    if mean > 50:
        return round(source.gauss(mean, math.sqrt(mean * (1 - part))))
    # The number of segments up to the next loss is geometric.
    lost, at = -1, 0.0
    while part and at <= sent:
        at += math.ceil(math.log(1.0 - source.random()) / math.log1p(-part))
        lost += 1
    return max(0, lost)


def measured(num_hosts: int, part: Callable[[Link], float], *, sent: int, source: random.Random) -> dict[Link, Contact]:
    """As a session does it: suspicious links are measured a second time."""
    found = contacts(num_hosts, lambda link: {"sent": sent, "lost": draw(sent, part(link), source)})
    again = sorted(suspicious_contacts(found, thresholds=THRESHOLDS))
    second = [Contact(link=link, sent=sent, lost=draw(sent, part(link), source)) for link in again]
    return merged([*found.values(), *second])


def named(verdicts: list[Verdict]) -> Named:
    return {(one.status, one.scope, one.subject) for one in findings(verdicts)}


def judged(num_hosts: int, part: Callable[[Link], float], *, sent: int = 10_000, seed: int = 0) -> list[Verdict]:
    found = measured(num_hosts, part, sent=sent, source=random.Random(seed))
    return judge_loss(found, roster=roster(num_hosts), thresholds=THRESHOLDS)


def test_no_host_is_accused_in_healthy_groups() -> None:
    """Up to a loss that is no finding, whatever the number of segments."""
    for seed in range(examples(1000)):
        source = random.Random(seed)
        part, sent = source.choice([0.0, 1e-5, 1e-4]), source.choice([100, 1000, 10_000])
        assert named(judged(3 + seed % 4, lambda link, part=part: part, sent=sent, seed=seed)) == set(), seed


@pytest.mark.parametrize(("percent", "status"), [(1, Status.WARN), (5, Status.FAIL), (20, Status.FAIL)])
def test_one_host_that_loses(percent: float, status: Status) -> None:
    ways: dict[str, Callable[[Link], bool]] = {
        "% loss sent": lambda link: link[0] == 2,
        "% loss received": lambda link: link[1] == 2,
        "% loss": lambda link: 2 in link,
    }
    for seed in range(examples(200)):
        for unit, is_bad in ways.items():
            verdicts = judged(3 + seed % 3, lambda link, is_bad=is_bad: percent / 100 * is_bad(link), seed=seed)
            assert named(verdicts) <= {(one, Scope.HOST, "h3") for one in (status, Status.FAIL)}, seed
            assert (verdicts[0].unit, str(verdicts[0].expected)) == (unit, "0.0")
            # The figure is a lower bound.
            assert 0.4 * percent < float(str(verdicts[0].measured)) <= 1.05 * percent


@pytest.mark.parametrize(("percent", "status"), [(1, Status.WARN), (5, Status.FAIL), (20, Status.FAIL)])
def test_one_link_that_loses(percent: float, status: Status) -> None:
    for seed in range(examples(200)):
        for num_hosts in (2, 3, 5):
            verdicts = judged(num_hosts, lambda link: percent / 100 * (link == (1, 0)), seed=seed)
            # At the threshold of 1 % the bound is above it once in 200 times.
            assert named(verdicts) <= {(one, Scope.LINK, link("h2", "h1")) for one in (status, Status.FAIL)}, seed
            assert verdicts[0].status is not Status.PASS


@pytest.mark.parametrize("percent", [1, 5, 20])
def test_two_hosts_of_five_that_lose(percent: float) -> None:
    for seed in range(examples(200)):
        found = named(judged(5, lambda link: percent / 100 * bool({1, 3} & set(link)), seed=seed))
        assert {(scope, subject) for _, scope, subject in found} == {(Scope.HOST, "h2"), (Scope.HOST, "h4")}, seed


@pytest.mark.parametrize("percent", [0.4, 0.5])
def test_the_smallest_loss_that_is_found(percent: float) -> None:
    found = [named(judged(4, lambda link: percent / 100 * (link[0] == 0), seed=seed)) for seed in range(300)]
    assert found.count({(Status.WARN, Scope.HOST, "h1")}) >= 290


def test_few_segments_show_much_loss() -> None:
    """Under loss TCP sends little."""
    for seed in range(300):
        source = random.Random(seed)
        found = contacts(3, lambda link, source=source: {"sent": 150, "lost": draw(150, 0.2, source)} if link[0] == 2 else {})
        expected = {(Status.FAIL, Scope.HOST, "h3")}
        assert named(judge_loss(found, roster=roster(3), thresholds=THRESHOLDS)) == expected, seed


def test_few_segments_clear_nobody() -> None:
    """A link that sent hardly anything hides no host: neither alone, nor as the second measurement."""
    facts = {(2, 0): (30, 2), (2, 1): (1500, 75)}
    found = contacts(3, lambda link: dict(zip(("sent", "lost"), facts.get(link, (10_000, 0)), strict=True)))
    expected = {(Status.FAIL, Scope.HOST, "h3")}
    assert named(judge_loss(found, roster=roster(3), thresholds=THRESHOLDS)) == expected
    again = merged([*found.values(), Contact(link=(2, 0), sent=900, lost=45), Contact(link=(2, 1), sent=40, lost=3)])
    assert (again[2, 0].sent, again[2, 1].sent) == (900, 1500)
    assert named(judge_loss(again, roster=roster(3), thresholds=THRESHOLDS)) == expected


def test_what_was_not_counted_is_tried_again_if_others_were() -> None:
    some = contacts(3, lambda link: {"sent": 100 if link == (0, 1) else 0} if 0 in link else {})
    assert suspicious_contacts(some, thresholds=THRESHOLDS) == {link for link in some if 0 in link}
    assert suspicious_contacts(contacts(3, lambda link: {"sent": 0}), thresholds=THRESHOLDS) == set()


def test_one_burst_is_no_loss() -> None:
    """It does not come again."""
    burst = {(0, 1): Contact(link=(0, 1), sent=400, lost=8)}
    assert suspicious_contacts({**contacts(3), **burst}, thresholds=THRESHOLDS) == {(0, 1)}
    found = merged([*contacts(3).values(), *burst.values(), Contact(link=(0, 1), sent=600)])
    assert named(judge_loss(found, roster=roster(3), thresholds=THRESHOLDS)) == set()


def test_all_hosts_alike_are_the_group() -> None:
    assert named(judged(4, lambda link: 0.05)) == {(Status.FAIL, Scope.GROUP, "all")}


def test_what_is_not_counted_is_not_judged() -> None:
    unknown = judged(3, lambda link: 0.0, sent=0)
    assert [one.status for one in unknown] == [Status.SKIP]
    some = contacts(3, lambda link: {"sent": 0} if 2 in link else {})
    assert named(judge_loss(some, roster=roster(3), thresholds=THRESHOLDS)) == set()


def test_heavy_loss_explains_what_else_is_wrong_with_a_host() -> None:
    ill = {"blocked": ((29502, "no answer"),), "largest": 576, "latency_s": 0.5}
    slow = flows(all_links(3), lambda link: 0.01 if 2 in link else 10.0)

    def failed(sent: int, lost: int) -> set[tuple[str, str]]:
        found = contacts(3, lambda link: {**ill, "sent": sent, "lost": lost} if 2 in link else {})
        names = ("h1", "h2", "h3")
        verdicts = judge_links(roster(3), contacts=found, flows=(slow, slow), silences={}, thresholds=THRESHOLDS, names=names)
        return {(one.check, one.subject) for one in failures(verdicts)}

    assert failed(sent=500, lost=100) == {("loss", "h3")}
    # A little loss does not.
    assert failed(sent=10_000, lost=40) == {(check, "h3") for check in ("reachable", "mtu", "latency", "bandwidth")}


def test_who_is_slow_is_named_whatever_gets_lost_on_the_way() -> None:
    """A link may lose more than its host does on the whole."""
    slow, names = flows(all_links(3), lambda link: 0.01 if 2 in link else 10.0), ("h1", "h2", "h3")
    for seed in range(examples(2000)):
        source = random.Random(seed)
        sent = source.choice([200, 500, 3000])  # a slow link carries few segments
        parts = {link: source.choice([0.0, 0.004, 0.02, 0.1]) for link in all_links(3) if 2 in link}
        counts = {link: {"sent": sent, "lost": draw(sent, part, source)} for link, part in parts.items()}
        found = contacts(3, lambda link, counts=counts: counts.get(link, {"sent": 10_000}))
        verdicts = judge_links(roster(3), contacts=found, flows=(slow, slow), silences={}, thresholds=THRESHOLDS, names=names)
        assert any("h3" in one.subject for one in failures(verdicts)), seed
