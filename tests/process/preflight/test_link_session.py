"""Groups of hosts on loopback, each in a thread of its own."""

import math
import socket
import time
from dataclasses import replace

import pytest

from elastictrain.bounded_json import encode_record, parse_record
from elastictrain.config.preflight import PreflightLimits
from elastictrain.distributed.exchange import get_record, put_record
from elastictrain.errors import TransportError
from elastictrain.net.listening import read_port_range
from elastictrain.preflight.links.messages import Contact, Order, Roster
from elastictrain.preflight.links.probes import PeerProbe
from elastictrain.preflight.links.session import LinkReport, LinkSession
from elastictrain.preflight.verdict import Scope, Status, Verdict, failures
from tests.unit.preflight.links.groups import QUICK, host, names, run_group
from tests.unit.preflight.links.made import introduction
from tests.unit.preflight.table import Table

QUICK_CHECKS = ["roster", "reachable", "mtu", "loss", "latency", "clock"]


def failed(report: LinkReport) -> list[tuple[str, str]]:
    return [(verdict.check, verdict.subject) for verdict in failures(report.verdicts)]


def find(report: LinkReport, check: str) -> Verdict:
    (found,) = [verdict for verdict in report.verdicts if verdict.check == check]
    return found


def num_rounds(table: Table) -> int:
    """How often bandwidth was measured."""
    return sum(parse_record(data, Order).measure for key, data in table.rows.items() if "/order/" in key)


def test_a_quick_check_of_three_hosts() -> None:
    began, table = time.monotonic(), Table()
    reports = run_group(3, table=table)
    assert time.monotonic() - began < 2.0
    assert [verdict.check for verdict in reports[0].verdicts] == QUICK_CHECKS
    assert failed(reports[0]) == []
    # The first host speaks for all.
    assert [report.verdicts for report in reports[1:]] == [(), ()]
    assert num_rounds(table) == 0


@pytest.mark.parametrize("num_hosts", [2, 3, 5])
def test_a_full_check_measures_bandwidth(num_hosts: int) -> None:
    table = Table()
    reports = run_group(num_hosts, full=True, table=table)
    bandwidth = [verdict for verdict in reports[0].verdicts if verdict.check == "bandwidth"]
    assert bandwidth
    assert all(isinstance(verdict.measured, float) and verdict.measured > 0.01 for verdict in bandwidth)
    assert (1 if num_hosts == 2 else 3) <= num_rounds(table) <= math.ceil(math.log2(num_hosts)) + 3
    assert {verdict.check for verdict in failures(reports[0].verdicts)} <= {"bandwidth"}  # many threads, few processors


def test_a_lone_host_has_no_links() -> None:
    (report,) = run_group(1, full=True)
    assert [(verdict.check, verdict.status) for verdict in report.verdicts] == [
        ("roster", Status.PASS),
        ("reachable", Status.SKIP),
    ]


def test_an_absent_host_is_named_and_the_others_go_on() -> None:
    reports = run_group(3, started=(0, 2), options=replace(QUICK, roster_s=0.5))
    assert [failed(report) for report in reports] == [[("roster", "h2")], []]
    verdict = find(reports[0], "roster")
    assert f"{verdict.measured}".startswith("no word in 0.5")
    assert verdict.expected == "3 hosts"
    assert "`torchrun --nnodes=2:3`" in verdict.remedy
    assert find(reports[0], "reachable").measured == "2 links"


def test_without_the_first_host_nobody_waits_for_ever() -> None:
    options = replace(QUICK, roster_s=0.1, grace_s=0.1)
    reports = run_group(3, started=(1, 2), options=options)
    assert [failed(report) for report in reports] == [[("roster", "h1")]] * 2


def test_a_clock_that_is_off_is_named() -> None:
    def skew(session: LinkSession) -> None:
        if session.host.name == "h1":
            session.wall = lambda: time.time() + 20.0

    reports = run_group(3, session=skew)
    assert failed(reports[0]) == [("clock", "h1")]
    assert find(reports[0], "clock").measured == pytest.approx(20.0, abs=0.5)


def test_two_hosts_that_claim_the_same_node_rank_are_told() -> None:
    table = Table()
    board = table.rows
    other = introduction(1, name="other", nonce="ab")
    session = LinkSession(host=host(1), names=names(2), exchange=table, options=replace(QUICK, roster_s=0.2))
    board["links/roster"] = encode_record(Roster(hosts=(introduction(0), other), absent=(), waited_s=0.0, token="00"))
    report = session.run()
    assert failed(report) == [("roster", "h2, other")]
    assert "--node-rank" in report.verdicts[0].remedy


def test_a_doubled_node_rank_is_named_at_once() -> None:
    """By the host that came second and by the first host, although another one is missing now."""
    table, began = Table(), time.monotonic()
    put_record(table, "links/hello/1", introduction(1, name="other", nonce="ab"))
    reports = run_group(3, started=(0, 1), table=table)
    assert time.monotonic() - began < QUICK.roster_s / 2
    assert [one[0] for one in map(failed, reports)] == [("roster", "other, h2"), ("roster", "h2, other")]
    assert {report.verdicts[0].scope for report in reports} == {Scope.GROUP}


def test_a_doubled_first_host_is_named_at_once() -> None:
    table = Table()
    put_record(table, "links/hello/0", introduction(0, name="other", nonce="ab"))
    (report,) = run_group(2, started=(0,), table=table)
    assert failed(report) == [("roster", "h1, other")]


def test_ports_are_spread() -> None:
    table = Table()
    run_group(2, table=table, session=lambda session: setattr(session, "host", replace(session.host, tcp_ports=(0, 0, 0))))
    roster = get_record(table, "links/roster", Roster, limit_s=0.0)
    assert roster is not None
    for one in roster.hosts:
        (first, last), size = read_port_range(), len(one.tcp_ports)
        assert size == 3
        assert [int(size * (port - first) / (last - first)) for port in one.tcp_ports] == [0, 1, 2]
        assert set(one.port_spans) == {f"{first}:{last}"}


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        report = LinkSession(host=host(0, tcp_ports=(port,)), names=names(1), exchange=Table()).run()
    assert failed(report) == [("reachable", "h1")]
    assert str(port) in str(find(report, "reachable").measured)


def test_a_host_that_cannot_listen_takes_no_part_and_holds_nobody_up() -> None:
    def occupied(session: LinkSession) -> None:
        if session.host.name == "h2":
            session.host = replace(session.host, tcp_ports=(taken.getsockname()[1],))

    with socket.create_server(("127.0.0.2", 0)) as taken:
        reports = run_group(3, full=True, session=occupied)
    assert [failed(report) for report in reports] == [[("reachable", "h2")], [], []]


class Broken:
    """A table that cannot be reached."""

    def put(self, key: str, value: bytes) -> None:
        raise TransportError("gone")

    def get(self, key: str, *, limit_s: float) -> bytes | None:
        raise TransportError("gone")


def test_a_table_that_cannot_be_reached_is_a_verdict() -> None:
    report = LinkSession(host=host(0), names=names(2), exchange=Broken()).run()
    assert failed(report) == [("roster", "h1")]
    assert report.verdicts[0].scope is Scope.HOST
    assert report.verdicts[0].measured == "gone"


class Deaf(Table):
    """A table on which some records of one host never come, from one order on."""

    def __init__(self, place: int, number: int, *, words: tuple[str, ...] = ("found",)) -> None:
        super().__init__()
        self._lost = {f"links/{word}/{later}/{place}" for word in words for later in range(number, 20)}

    def put(self, key: str, value: bytes) -> None:
        if key not in self._lost:
            super().put(key, value)


@pytest.mark.parametrize(("number", "doing"), [(0, "contacts"), (1, "bandwidth")])
def test_a_host_that_falls_silent_is_named(number: int, doing: str) -> None:
    options = replace(QUICK, connect_s=0.1, answer_s=0.1, grace_s=0.1, limits=PreflightLimits(contact_s=1.0, stream_s=0.02))
    reports = run_group(3, full=True, options=options, table=Deaf(2, number))
    assert ("roster", "h3") in failed(reports[0])
    assert doing in str(find(reports[0], "roster").measured)
    assert not {verdict.subject for verdict in failures(reports[0].verdicts) if "h3" in verdict.subject} - {"h3"}


def test_a_host_that_does_not_take_up_an_order_is_not_waited_for() -> None:
    """Its ports still answer, as do those of a host that the first one cannot judge by them."""
    options, began = replace(QUICK, take_s=0.3, limits=PreflightLimits(stream_s=0.02)), time.monotonic()
    reports = run_group(3, full=True, options=options, table=Deaf(2, 1, words=("found", "taken")))
    assert ("roster", "h3") in failed(reports[0])
    assert time.monotonic() - began < 3.5


def test_a_host_whose_peer_lets_it_wait_for_ever_reports_in_time() -> None:
    """The link is named, and no host is silent."""

    def stuck(self: PeerProbe) -> Contact:
        if self.link == (2, 1):
            time.sleep(5.0)
        return real(self)

    real, patch = PeerProbe.contact, pytest.MonkeyPatch()
    options, began = replace(QUICK, limits=PreflightLimits(contact_s=0.5)), time.monotonic()
    with patch.context() as patched:
        patched.setattr(PeerProbe, "contact", stuck)
        reports = run_group(3, options=options)
    assert time.monotonic() - began < 4.0
    assert failed(reports[0]) == [("reachable", "h3 -> h2")]


class Garbling(Table):
    """A table on which one record is garbled."""

    def __init__(self, key: str, value: bytes) -> None:
        super().__init__()
        self._garbled = {key: value}

    def put(self, key: str, value: bytes) -> None:
        super().put(key, self._garbled.get(key, value))


@pytest.mark.parametrize(
    "report", [b"{", b'{"contacts":[],"flows":[{"link":[0,3],"gbps":1.0}]}'], ids=["no JSON", "a host that is not there"]
)
def test_a_host_that_reports_garbage_counts_as_silent(report: bytes) -> None:
    reports = run_group(3, table=Garbling("links/found/0/2", report))
    assert failed(reports[0]) == [("roster", "h3")]


def test_an_order_about_hosts_that_are_not_there_is_not_carried_out() -> None:
    options = replace(QUICK, take_s=0.2, grace_s=0.1, limits=PreflightLimits(contact_s=0.5))
    reports = run_group(2, options=options, table=Garbling("links/order/0", encode_record(Order(((1, 7),)))))
    assert failed(reports[1]) == [("roster", "h2")]
