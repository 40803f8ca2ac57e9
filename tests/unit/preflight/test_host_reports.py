"""Where ranks stand among their hosts, and how what hosts report is judged together."""

from dataclasses import replace

import pytest

from elastictrain.bounded_json import MalformedJsonError
from elastictrain.distributed.exchange import get_record, put_record
from elastictrain.preflight.host.alike import SoftwareDigest
from elastictrain.preflight.host_preflight import HostReport, find_layout, judge_host_reports, relabel
from elastictrain.preflight.links.messages import HostIntroduction
from elastictrain.preflight.transport.infiniband import Rdma
from tests.unit.preflight.made import link, verdict
from tests.unit.preflight.table import Table


@pytest.mark.parametrize(
    ("rank", "local_rank", "node_rank", "host", "acts"),
    [
        (0, 0, 0, "a", True),
        (1, 1, 0, "a", False),
        (2, 0, 1, "b", True),
        (3, 0, 2, "c", True),
        (5, 2, 2, "c", False),
    ],
)
def test_hosts_may_have_different_numbers_of_ranks(rank: int, local_rank: int, node_rank: int, host: str, acts: bool) -> None:
    ranks = [("a", 2), ("a", 2), ("b", 1), ("c", 3), ("c", 3), ("c", 3)]
    layout = find_layout(ranks, rank=rank, local_rank=local_rank, rendezvous="a")
    assert layout.hosts == ("a", "b", "c")
    assert (layout.node_rank, layout.host, layout.local_rank == 0) == (node_rank, host, acts)
    assert layout.local_world_size == ranks[rank][1]
    assert layout.hosts_of_ranks == ("a", "a", "b", "c", "c", "c")


def test_hosts_of_one_name_are_told_apart() -> None:
    layout = find_layout([("x", 1), ("y", 1), ("x", 1)], rank=2, local_rank=0, rendezvous="x")
    first, other, second = layout.hosts
    assert (len(set(layout.hosts)), other, layout.host) == (3, "y", second)
    assert ("0" in first, "2" in second) == (True, True)


def word(*, code: str = "c0de", hcas: tuple[str, ...] = (), host: str = "a", address: str = "") -> HostReport:
    likeness = SoftwareDigest(code={"elastictrain/train": code}, folders={"elastictrain": "/x"}, versions={"torch": "2.13"})
    kinds = frozenset({Rdma.INFINIBAND}) if hcas else frozenset[Rdma]()
    met = HostIntroduction(name=host, node_rank=0, address=address or host, interface="eth0", mtu=None, kinds=kinds)
    return HostReport(verdicts=(verdict(check="disk", subject=host),), likeness=likeness, hcas=hcas, met=met)


def test_a_word_comes_back_as_it_went() -> None:
    one, table = word(hcas=("mlx5_0:1",)), Table()
    put_record(table, "word/0", one)
    assert get_record(table, "word/0", HostReport, limit_s=0.0) == one
    assert get_record(table, "word/1", HostReport, limit_s=0.0) is None


@pytest.mark.parametrize("data", [b"", b"7", b"{}", b"[]", b'{"verdicts": [], "likeness": "", "hcas": []}', b"[" * 9999])
def test_what_another_release_says_is_not_understood_and_the_key_is_named(data: bytes) -> None:
    table = Table()
    table.put("word/3", data)
    with pytest.raises(MalformedJsonError, match="word/3"):
        get_record(table, "word/3", HostReport, limit_s=0.0)


def test_a_host_with_other_code_is_named() -> None:
    words = {host: word(host=host) for host in ("a", "b")} | {"c": word(code="other", host="c")}
    found = judge_host_reports(words, waited_s=60)
    failed = [one for one in found if one.status == "fail"]
    assert [(one.check, one.subject) for one in failed] == [("alike", "c")]
    assert "elastictrain/train" in f"{failed[0].measured}"


def test_a_host_that_says_nothing_is_named_and_nobody_is_compared_with_it() -> None:
    found = judge_host_reports({"a": word(), "b": None}, waited_s=60)
    assert [(one.check, one.subject) for one in found if one.status == "fail"] == [("roster", "b")]


def test_hosts_with_fewer_ports_are_named() -> None:
    words = {"a": word(hcas=("m0", "m1")), "b": word(hcas=("m0",), host="b")}
    found = judge_host_reports(words, waited_s=60)
    assert [(one.check, one.subject, one.measured) for one in found if one.status == "warn"] == [("infiniband", "b", 1)]


def test_an_address_that_two_hosts_gave_is_named_unless_it_is_explained() -> None:
    addresses = {"a": "10.0.0.1", "b": "10.0.0.2", "c": "10.0.0.2"}
    for explained in (False, True):
        bad = verdict("fail" if explained else "warn", check="interface", subject="c")
        words = {host: replace(word(host=host, address=addresses[host]), machine=host) for host in "abc"}
        words["c"] = replace(words["c"], verdicts=(bad,))
        found = judge_host_reports(words, waited_s=60)
        named = [(one.check, one.subject) for one in found if one.status == "fail"]
        assert named == ([] if explained else [("interface", "b")]) + [("interface", "c")]


def test_one_host_is_compared_with_nobody() -> None:
    assert [one.check for one in judge_host_reports({"a": word()}, waited_s=60)] == ["disk"]


def test_a_host_gets_the_name_that_it_has_in_the_group() -> None:
    subjects = ["x", "GPU 3 on x", link("x", "the rendezvous"), "all", "ax", "on x y"]
    found = relabel([verdict(subject=subject) for subject in subjects], name="x", label="x1")
    assert [one.subject for one in found] == ["x1", "GPU 3 on x1", link("x1", "the rendezvous"), *subjects[3:]]
