import errno
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import pytest

from elastictrain.net.interfaces import is_loopback
from elastictrain.preflight.host.names import (
    MAPPED_LOOPBACK,
    LookUp,
    NameFacts,
    check_port,
    find_holder,
    judge_lookups,
    judge_name,
    judge_port,
    look_up,
    parse_hosts,
    read_names,
    try_port,
)
from elastictrain.preflight.verdict import Status
from tests.unit.preflight.conftest import HostMaker

HOSTS = "127.0.0.1 localhost\n# 127.0.1.1 h1 in a comment\n\n127.0.1.1\th1.example.org h1 # by the installer\n"


@dataclass
class FakeResolver:
    """Answers from a table of names; some questions take their time."""

    forward: Mapping[str, Sequence[str]] = field(default_factory=dict)
    delays: Mapping[str, float] = field(default_factory=dict)

    def __call__(self, question: str) -> Sequence[str]:
        time.sleep(self.delays.get(question, 0))
        if question[0] in "0123456789:":
            return [question]
        if question not in self.forward:
            raise OSError(-2, "Name or service not known")
        return self.forward[question]


def facts(*answers: str, hosts: str = HOSTS, address: str | None = "10.0.0.3") -> NameFacts:
    return NameFacts("h1", LookUp("h1", answers, 0.001), address=address, lines=parse_hosts(hosts))


def test_loopback_is_wrong_among_several_hosts() -> None:
    verdict = judge_name(facts("127.0.1.1"), several_hosts=True)
    assert verdict.status is Status.FAIL
    assert (verdict.subject, verdict.measured) == ("h1", "127.0.1.1")
    assert verdict.remedy == (
        "in /etc/hosts on h1, change line 4 from `127.0.1.1 h1.example.org h1` to `10.0.0.3 h1.example.org h1`"
    )


def test_other_names_of_the_line_stay_where_they_are() -> None:
    verdict = judge_name(facts("127.0.0.1", hosts="127.0.0.1 localhost h1\n"), several_hosts=True)
    assert verdict.remedy.endswith("change line 1 from `127.0.0.1 localhost h1` to `10.0.0.3 h1` and `127.0.0.1 localhost`")


def test_loopback_from_elsewhere_than_the_hosts_file() -> None:
    verdict = judge_name(facts("127.0.0.2", hosts="127.0.0.1 localhost\n"), several_hosts=True)
    assert verdict.status is Status.FAIL
    assert "`10.0.0.3 h1`" in verdict.remedy


def test_unknown_own_address_is_a_blank_to_fill_in() -> None:
    verdict = judge_name(facts("127.0.1.1", address=None), several_hosts=True)
    assert "`ADDRESS h1.example.org" in verdict.remedy


def test_loopback_after_an_address_is_a_warning() -> None:
    assert judge_name(facts("10.0.0.3", "127.0.1.1"), several_hosts=True).status is Status.WARN


def test_right_address() -> None:
    assert judge_name(facts("10.0.0.3"), several_hosts=True).status is Status.PASS


def test_a_host_alone_may_be_loopback() -> None:
    assert judge_name(facts("127.0.1.1"), several_hosts=False).status is Status.PASS


@pytest.mark.parametrize(("several", "status"), [(True, Status.WARN), (False, Status.SKIP)])
def test_name_that_nobody_knows(several: bool, status: Status) -> None:
    unknown = NameFacts("h1", LookUp("h1", None, 0.01, "Name or service not known"), address="10.0.0.3")
    verdict = judge_name(unknown, several_hosts=several)
    assert (verdict.status, verdict.measured) == (status, unknown.own.error)
    assert "`10.0.0.3 h1`" in verdict.remedy


def test_name_that_is_not_answered() -> None:
    verdict = judge_name(NameFacts("h1", LookUp("h1", None, 2.0)), several_hosts=True)
    assert (verdict.status, "2.0" in str(verdict.measured)) == (Status.WARN, True)


def test_reading(make_host: HostMaker) -> None:
    host = make_host({"etc/hosts": HOSTS})
    loopback = read_names(host, ask=FakeResolver(), towards="127.0.0.1")
    assert loopback.address is None
    assert (loopback.own.answers, loopback.own.stalled) == (None, False)
    host = replace(host, probe=lambda _: ("10.0.0.1", "10.0.0.3"))
    assert read_names(host, ask=FakeResolver(), towards=None).address is None
    found = read_names(host, ask=FakeResolver({"h1": ["127.0.1.1"]}), towards="10.0.0.1")
    assert judge_name(found, several_hosts=True).status is Status.FAIL
    assert (list(found.lines), found.address) == ([1, 4], "10.0.0.3")


@pytest.mark.parametrize("address", ["127.0.0.1", "127.8.9.1", "::1", "::ffff:127.0.0.1"])
def test_loopback(address: str) -> None:
    assert is_loopback(address)


@pytest.mark.parametrize("address", ["10.0.0.1", "fe80::1%eth0", "", "localhost", "::ffff:10.0.0.1"])
def test_not_loopback(address: str) -> None:
    assert not is_loopback(address)


def test_quick_lookups() -> None:
    quick = NameFacts("h1", LookUp("h1", None, 0.002, "unknown"), (LookUp(MAPPED_LOOPBACK, ("localhost",), 0.1),))
    verdict = judge_lookups(quick, host="h1")
    assert (verdict.status, verdict.measured, verdict.unit) == (Status.PASS, 0.1, "s")


def test_slow_reverse_lookup() -> None:
    reverse = (LookUp(MAPPED_LOOPBACK, ("localhost",), 5.01),)
    slow = NameFacts("h1", LookUp("h1", ("10.0.0.3",), 0.01), reverse, servers=("10.0.0.53",))
    verdict = judge_lookups(slow, host="h1")
    assert verdict.status is Status.WARN
    assert str(verdict.measured).split()[:2] == [f"{MAPPED_LOOPBACK}:", "5.0"]
    assert (
        'export RES_OPTIONS="timeout:1 attempts:1", and add `::ffff:127.0.0.1 localhost` to /etc/hosts on h1' in verdict.remedy
    )
    assert "10.0.0.53" in verdict.remedy


@pytest.mark.parametrize(("address", "advised"), [("10.0.0.3", "10.0.0.3"), (None, "ADDRESS")])
def test_a_slow_own_name_gets_the_address_towards_the_rendezvous(address: str | None, advised: str) -> None:
    slow = NameFacts("h1", LookUp("h1", ("192.168.9.1",), 5.0), address=address)
    assert f"add `{advised} h1` to /etc/hosts" in judge_lookups(slow, host="h1").remedy


def test_stalled_lookup(make_host: HostMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastictrain.preflight.host.names.LIMIT_S", 0.1)
    monkeypatch.setattr("elastictrain.preflight.host.names.SLOW_S", 0.05)
    host = make_host({"etc/resolv.conf": "nameserver 10.0.0.53\nsearch x\n"})
    resolver = FakeResolver({"h1": ["10.0.0.3"]}, delays={MAPPED_LOOPBACK: 0.5})
    began = time.monotonic()
    host = replace(host, probe=lambda _: ("10.0.0.1", "10.0.0.3"))
    found = read_names(host, ask=resolver, towards="10.0.0.1")
    assert time.monotonic() - began < 0.4
    assert [one.stalled for one in found.reverse] == [True, False]
    assert found.servers == ("10.0.0.53",)
    assert MAPPED_LOOPBACK in str(judge_lookups(found, host="h1").measured)


def test_system_resolver() -> None:
    local, wrong, back = look_up(["localhost", "a" * 70, "127.0.0.1"], limit_s=20)
    assert local.answers is not None
    assert all(map(is_loopback, local.answers))
    assert wrong.answers is None
    assert wrong.error
    assert back.answers is not None


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def test_free_and_taken(taken: int) -> None:
    assert try_port(taken) == errno.EADDRINUSE
    assert try_port(0) is None


def test_connections_that_are_over_are_no_hindrance() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", port))
        server, _ = listener.accept()
        server.close()  # its side waits for a minute now
        client.close()
    assert try_port(port) is None


def test_holder_is_found(taken: int) -> None:
    holder = find_holder(taken)
    assert holder is not None
    assert (holder[0], holder[2]) == (os.getpid(), True)
    assert find_holder(1) is None


def test_port_that_our_own_process_holds_is_no_fault(taken: int) -> None:
    assert check_port(taken, host="h1").status is Status.PASS


def test_verdicts() -> None:
    holder = (7, "python -m http.server", False)
    cases = [
        (29500, None, None),
        (29500, errno.EADDRINUSE, holder),
        (29500, errno.EADDRINUSE, None),
        (80, errno.EACCES, None),
        (29500, errno.EADDRNOTAVAIL, None),
    ]
    free, held, taken, denied, other = (judge_port(*case, host="h1") for case in cases)
    assert free.status is Status.PASS
    assert [verdict.status for verdict in (held, taken, denied, other)] == [Status.FAIL] * 4
    assert all(word in str(held.measured) for word in ("29500", "pid 7", "http.server"))
    assert "pid 7" in held.remedy
    assert "`kill 7`" in held.remedy
    assert "preflight.ports" in held.remedy
    assert "ss -ltnp" in taken.remedy
    assert "1024" in denied.remedy
    assert os.strerror(errno.EADDRNOTAVAIL) in str(other.measured)
