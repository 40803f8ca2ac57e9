from pathlib import Path

import pytest

from elastictrain.net.interfaces import Kind
from elastictrain.preflight.transport.judge import RENDEZVOUS, judge_addresses, judge_interface
from elastictrain.preflight.transport.plan import TransportFacts
from elastictrain.preflight.verdict import Scope, Status, Verdict
from tests.unit.preflight.made import link
from tests.unit.preflight.transport.made import MadeHost, set_by_hand

PEERS = {"h2": "10.0.0.2", "h3": "10.0.0.3"}


@pytest.fixture
def host(tmp_path: Path) -> MadeHost:
    made = MadeHost(tmp_path)
    made.card("eth0", ("10.0.0.1",))
    made.docker()
    made.card("eth1", ("192.168.9.1",))
    made.card("eth10", ("192.168.10.1",))
    for address in ("10.0.0.2", "10.0.0.3"):
        made.way(address, "10.0.0.1")
    return made


def only(host: MadeHost, **environment: str) -> Verdict:
    host.environment |= environment
    (verdict,) = judge_interface(host.facts(rendezvous="10.0.0.2", peers=PEERS))
    return verdict


def test_right(host: MadeHost) -> None:
    verdict = only(host)
    assert (verdict.status, verdict.scope, verdict.subject) == (Status.PASS, Scope.HOST, "h1")
    assert verdict.measured == "eth0 (10.0.0.1)"


@pytest.mark.parametrize("pin", ["=eth0", "eth0", "=eth0,eth1", "^docker,lo"])
def test_pins_of_nccl_that_are_right(host: MadeHost, pin: str) -> None:
    assert only(host, NCCL_SOCKET_IFNAME=pin).status is Status.PASS


NCCL, GLOO = "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"


@pytest.mark.parametrize(
    ("name", "pin", "status", "culprit"),
    [
        (NCCL, "docker0", Status.FAIL, f"docker0 is a {Kind.CONTAINER}"),
        (NCCL, "lo", Status.FAIL, f"lo is a {Kind.LOOPBACK}"),
        (NCCL, "^lo", Status.FAIL, f"docker0 is a {Kind.CONTAINER}"),
        (NCCL, "eth7", Status.FAIL, "no eth7"),
        (NCCL, "=eth0,ib0", Status.FAIL, "no ib0"),
        (NCCL, "^eth,lo,docker", Status.FAIL, "no interface"),
        (NCCL, "=eth1", Status.WARN, "eth1"),
        (NCCL, "eth1", Status.WARN, "eth1"),
        (GLOO, "docker0", Status.FAIL, f"docker0 is a {Kind.CONTAINER}"),
        (GLOO, "eth", Status.FAIL, "no 'eth'"),
        (GLOO, "=eth0", Status.FAIL, "no '=eth0'"),
        (GLOO, "eth0,,eth1", Status.FAIL, "no ''"),
        (GLOO, "eth1", Status.WARN, "eth1"),
    ],
)
def test_pins_that_contradict(host: MadeHost, name: str, pin: str, status: Status, culprit: str) -> None:
    verdict = only(host, **{name: pin})
    assert verdict.status is status
    assert culprit in str(verdict.measured).partition(": ")[2]
    assert verdict.expected == "eth0"
    # The remedy is typed as it is.
    assert verdict.remedy.startswith(f"unset {name}")
    assert verdict.remedy.endswith(f"{name}={'=eth0' if name == NCCL else 'eth0'}")


@pytest.mark.parametrize("pin", ["eth0", "eth0,eth1", "eth0,"])
def test_pins_of_gloo_that_are_right(host: MadeHost, pin: str) -> None:
    assert only(host, GLOO_SOCKET_IFNAME=pin).status is Status.PASS


def test_one_letter_is_no_pin(host: MadeHost) -> None:
    assert only(host, GLOO_SOCKET_IFNAME="x", NCCL_SOCKET_IFNAME="x").status is Status.PASS


def test_pins_of_an_interface_that_is_down_or_has_no_address(host: MadeHost) -> None:
    host.card("eth2")
    without = only(host, GLOO_SOCKET_IFNAME="eth2")
    assert (without.status, "no address" in str(without.measured)) == (Status.FAIL, True)
    host.addresses["eth2"] = ("10.7.0.1",)
    host.write("/sys/class/net/eth2/operstate", "down\n")
    assert (only(host).status, "down" in str(only(host).measured)) == (Status.FAIL, True)


def test_nccl_takes_no_interface_that_is_down(host: MadeHost) -> None:
    host.write("/sys/class/net/docker0/operstate", "down\n")
    assert only(host, NCCL_SOCKET_IFNAME="^lo").status is Status.PASS
    verdict = only(host, NCCL_SOCKET_IFNAME="docker0")
    assert (verdict.status, verdict.expected) == (Status.FAIL, "eth0")


def test_a_pin_in_a_file_is_undone_there(host: MadeHost) -> None:
    host.write("/etc/nccl.conf", "NCCL_SOCKET_IFNAME=docker0\n")
    assert only(host).remedy.startswith("remove NCCL_SOCKET_IFNAME from /etc/nccl.conf")


def test_a_missing_name_is_a_failure_on_one_host_too(host: MadeHost) -> None:
    host.environment["GLOO_SOCKET_IFNAME"] = "eth7"
    (verdict,) = judge_interface(host.facts(alone=True))
    assert verdict.status is Status.FAIL
    host.environment["GLOO_SOCKET_IFNAME"] = "docker0"
    (verdict,) = judge_interface(host.facts(alone=True))
    assert verdict.status is Status.PASS


def test_no_way_to_a_peer(host: MadeHost) -> None:
    (verdict,) = judge_interface(host.facts(peers={**PEERS, "h4": "10.9.0.4"}))
    assert (verdict.status, verdict.scope, verdict.subject) == (Status.FAIL, Scope.LINK, link("h1", "h4"))
    assert "10.9.0.4" in str(verdict.measured)
    assert verdict.remedy.startswith("ip route get 10.9.0.4")
    host.routes["node4"] = OSError(-2, "Name or service not known")
    (verdict,) = judge_interface(host.facts(peers={**PEERS, "h4": "node4"}))
    assert verdict.remedy.startswith("getent hosts node4")


def test_a_peer_behind_docker0_or_loopback(host: MadeHost) -> None:
    host.way("h4", "172.17.0.1", remote="172.17.3.4")
    host.way("h5", "127.0.1.1", remote="127.0.1.1")
    # It has given its own docker0, which every host has: its own verdict says so.
    host.way("h6", "172.17.0.1", remote="172.17.0.1")
    loopback, docker = judge_interface(host.facts(peers={**PEERS, "h4": "h4", "h5": "h5", "h6": "h6"}))
    assert [(one.subject, one.scope) for one in (docker, loopback)] == [("h1", Scope.HOST), ("h5", Scope.HOST)]
    assert ("docker0" in str(docker.measured), "127.0.1.1" in str(loopback.measured)) == (True, True)
    assert "--local-addr" in loopback.remedy
    assert docker.status is loopback.status is Status.FAIL
    host.way("master", "127.0.1.1", remote="127.0.1.1")
    (verdict,) = judge_interface(host.facts(rendezvous="master", peers=PEERS))
    assert verdict.subject == link("h1", RENDEZVOUS)
    assert verdict.remedy.startswith("--rdzv-endpoint=ADDRESS:PORT")


def test_a_rendezvous_behind_docker0_makes_this_host_unfit(host: MadeHost) -> None:
    for remote in ("172.17.0.9", "172.17.0.1"):
        host.way("master", "172.17.0.1", remote=remote)
        (verdict,) = judge_interface(host.facts(rendezvous="master", peers=PEERS))
        assert (verdict.status, verdict.scope, verdict.subject) == (Status.FAIL, Scope.HOST, "h1")


def test_an_address_that_two_hosts_have() -> None:
    places = {"h1": ("10.0.0.1", "m1"), "h2": ("10.0.0.2", "m2"), "h3": ("10.0.0.1", "m3"), "h4": ("10.0.0.1", "m3")}
    assert [(one.subject, one.scope, one.status) for one in judge_addresses(places)] == [
        ("h1", Scope.HOST, Status.FAIL),
        ("h3", Scope.HOST, Status.FAIL),
        ("h4", Scope.HOST, Status.FAIL),
    ]


def test_groups_of_ranks_on_one_machine_may_share_its_address() -> None:
    assert judge_addresses({"h1": ("10.0.0.1", "m1"), "h2": ("10.0.0.1", "m1"), "h3": ("10.0.0.2", "m2")}) == []


def test_a_faster_card_that_idles(host: MadeHost) -> None:
    host.card("eth2", ("10.7.0.1",), speed="100000")
    verdict = only(host)
    assert (verdict.status, verdict.expected, "100 Gb/s" in str(verdict.measured)) == (Status.WARN, "eth2", True)
    # It was a choice; or RDMA uses it; or it has no address.
    assert only(host, NCCL_SOCKET_IFNAME="=eth0").status is Status.PASS
    host.environment.clear()
    del host.addresses["eth2"]
    assert only(host).status is Status.PASS
    host.addresses["eth2"] = ("10.7.0.1",)
    host.roce("mlx5_0", "10.7.0.1", netdev="eth2")
    assert only(host).status is Status.PASS


def test_peers_on_two_networks(host: MadeHost) -> None:
    host.way("192.168.9.4", "192.168.9.1")
    (verdict,) = judge_interface(host.facts(peers={**PEERS, "h4": "192.168.9.4"}))
    assert (verdict.status, verdict.scope) == (Status.WARN, Scope.HOST)
    assert ("eth0" in str(verdict.measured), "eth1" in str(verdict.measured)) == (True, True)


def test_another_address_of_the_interface_comes_first(host: MadeHost) -> None:
    host.addresses["eth0"] = ("169.254.1.1", "10.0.0.1")
    verdict = only(host)
    assert verdict.status is Status.WARN
    assert ("169.254.1.1" in str(verdict.measured), verdict.expected) == (True, "10.0.0.1")


def test_unknown_things_are_no_failures(host: MadeHost) -> None:
    host.way("h4", "192.0.2.9", remote="192.0.2.4")
    (verdict,) = judge_interface(host.facts(peers={**PEERS, "h4": "h4"}))
    assert (verdict.status, verdict.scope) == (Status.WARN, Scope.LINK)
    settings = set_by_hand(NCCL_SOCKET_IFNAME="eth0", GLOO_SOCKET_IFNAME="eth0")
    (verdict,) = judge_interface(TransportFacts("h1", settings=settings))
    assert verdict.status is Status.SKIP
