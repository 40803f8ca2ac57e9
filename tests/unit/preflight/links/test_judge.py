from dataclasses import replace
from typing import Any

from elastictrain.config.preflight import PreflightThresholds
from elastictrain.preflight.links.judge import judge_links
from elastictrain.preflight.links.messages import Roster
from elastictrain.preflight.verdict import Status, Verdict, failures
from tests.unit.preflight.links.made import all_links, contacts, flows, roster


def judged(found: Roster | None = None, **changed: Any) -> list[Verdict]:
    """Of three healthy hosts, but for what is changed."""
    healthy = flows(all_links(3), lambda link: 10.0)
    evidence = {"contacts": contacts(3), "flows": (healthy, []), "silences": {}, "names": ("h1", "h2", "h3"), **changed}
    return judge_links(found or roster(3), thresholds=PreflightThresholds(), **evidence)


def test_each_check_says_something() -> None:
    verdicts = judged()
    assert [verdict.check for verdict in verdicts] == ["roster", "reachable", "mtu", "loss", "latency", "clock", "bandwidth"]
    assert {verdict.status for verdict in verdicts} == {Status.PASS}


def test_what_silence_explains_is_not_held_against_links() -> None:
    found = contacts(
        3, lambda link: {"blocked": ((1, "no answer"),), "largest": 576, "sent": 100, "lost": 90} if 2 in link else {}
    )
    slow = tuple(flows(all_links(3), lambda link: 0.0 if 2 in link else 10.0))
    found_bad = judged(contacts=found, flows=(slow, slow), silences={2: ("contacts were made", 5.0)})
    bad = [verdict for verdict in found_bad if verdict.status is not Status.PASS]
    assert [(verdict.check, verdict.subject) for verdict in bad] == [("roster", "h3")]
    (verdict,) = bad
    assert "contacts" in str(verdict.measured)
    assert "5 s" in str(verdict.expected)


def test_a_host_that_cannot_listen_is_named_and_tells_why() -> None:
    found = roster(3)
    ill = replace(found, hosts=(*found.hosts[:2], replace(found.hosts[2], trouble="in use")))
    among_others = {link: contact for link, contact in contacts(3).items() if 2 not in link}
    bad = failures(judged(ill, contacts=among_others))
    assert [(one.check, one.subject, one.measured) for one in bad] == [("reachable", "h3", "in use")]
    alone = failures(judged(replace(ill, hosts=ill.hosts[2:]), contacts={}, flows=None))
    assert [(one.check, one.subject) for one in alone] == [("reachable", "h3")]


def test_absent_hosts_are_named() -> None:
    twin = "x (node rank 3)"
    names = ("h1", "h2", "h3", twin, "h5")
    bad = failures(judged(roster(3, absent=(3, 4)), names=names))
    assert [verdict.subject for verdict in bad] == [twin, "h5"]
    assert {verdict.expected for verdict in bad} == {"5 hosts"}
    assert twin in bad[0].remedy
