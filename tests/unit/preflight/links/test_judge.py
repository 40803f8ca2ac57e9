from dataclasses import replace

from elastictrain.preflight.links.judge import Evidence, judge
from elastictrain.preflight.links.judge_contacts import Silence
from elastictrain.preflight.links.options import LinkOptions
from elastictrain.preflight.verdict import Status, failures
from tests.unit.preflight.links.made import all_links, contacts, flows, roster

OPTIONS = LinkOptions()
HEALTHY = Evidence(roster=roster(3), contacts=contacts(3), flows=tuple(flows(all_links(3), lambda link: 10.0)), full=True)


def test_each_check_says_something() -> None:
    verdicts = judge(HEALTHY, options=OPTIONS)
    assert [verdict.check for verdict in verdicts] == ["roster", "reachable", "mtu", "latency", "clock", "bandwidth"]
    assert {verdict.status for verdict in verdicts} == {Status.PASS}


def test_what_silence_explains_is_not_held_against_links() -> None:
    found = contacts(3, lambda link: {"blocked": ((1, "no answer"),), "largest": 0} if 2 in link else {})
    slow = tuple(flows(all_links(3), lambda link: 0.0 if 2 in link else 10.0))
    evidence = replace(HEALTHY, contacts=found, flows=slow, flows_again=slow, silences=(Silence(2, "contacts were made", 5.0),))
    bad = [verdict for verdict in judge(evidence, options=OPTIONS) if verdict.status is not Status.PASS]
    assert [(verdict.check, verdict.subject) for verdict in bad] == [("roster", "h3")]
    (verdict,) = bad
    assert (verdict.measured, verdict.expected) == ("silent while contacts were made", "word within 5 s")


def test_absent_hosts_are_named_as_far_as_they_are_known() -> None:
    evidence = replace(HEALTHY, roster=roster(3, absent=(3, 4)))
    bad = failures(judge(evidence, options=OPTIONS, names={4: "h5"}))
    assert [verdict.subject for verdict in bad] == ["node rank 3", "h5"]
    assert {verdict.expected for verdict in bad} == {"5 hosts"}
    assert bad[0].remedy.startswith("start the launcher on the host of node rank 3, or look there")
    assert bad[1].remedy.startswith("start the launcher on h5, or look there")


def test_hosts_of_one_name_keep_theirs_whether_they_came_or_not() -> None:
    twins = roster(3, absent=(3,))
    hosts = (replace(twins.hosts[0], name="x (node rank 0)"), *twins.hosts[1:])
    evidence = replace(HEALTHY, roster=replace(twins, hosts=hosts), silences=(Silence(0, "contacts were made", 5.0),))
    bad = failures(judge(evidence, options=OPTIONS, names={0: "x (node rank 0)", 3: "x (node rank 3)"}))
    assert [verdict.subject for verdict in bad] == ["x (node rank 3)", "x (node rank 0)"]
