from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastictrain.preflight.transport.infiniband import Rdma, common, kinds_here
from elastictrain.preflight.transport.plan import (
    PlannedVariable,
    TransportFacts,
    TransportPlan,
    apply_plan,
    decide_transport,
    describe_plan,
)
from elastictrain.preflight.transport.settings import OWN_VARIABLES, Setting, read_settings
from elastictrain.surroundings import Surroundings
from tests.unit.preflight.transport.made import AWS, GOOGLE, MadeHost

PEERS = {"h2": "10.0.0.2", "h3": "10.0.0.3"}


def plain(root: Path, *, speed: str = "10000", vendor: str = "0x15b3") -> MadeHost:
    host = MadeHost(root)
    host.card("eth0", ("10.0.0.1", "fe80::1"), speed=speed, vendor=vendor)
    for address in ("10.0.0.2", "10.0.0.3"):
        host.way(address, "10.0.0.1")
    host.way("10.0.0.1", "10.0.0.1")
    return host


def decide(facts: TransportFacts, *, after_failure: bool = False) -> TransportPlan:
    """The plan of a host among its like."""
    agreed = common({"h1": kinds_here(facts.ports, settings=facts.settings)})
    return decide_transport(facts, agreed=agreed, after_failure=after_failure)


def values(plan: TransportPlan) -> dict[str, str]:
    return {one.name: one.value for one in plan.variables}


def test_a_plain_host(tmp_path: Path) -> None:
    plan = decide(plain(tmp_path).facts(rendezvous="10.0.0.1", peers=PEERS))
    assert values(plan) == {"NCCL_SOCKET_IFNAME": "=eth0", "GLOO_SOCKET_IFNAME": "eth0", "NCCL_IB_DISABLE": "1"}
    assert all(word in plan.variables[0].reason for word in ("rendezvous", "2 of 2", "eth0 (10.0.0.1)"))
    assert (plan.interface, plan.link_gbps) == ("eth0", 10.0)
    assert (plan.rdma, plan.hcas, plan.kept, plan.notes) == (Rdma.NONE, (), (), ())
    assert [line.partition("  # ")[0] for line in describe_plan(plan)] == [
        f"{name}={value}" for name, value in values(plan).items()
    ]


def test_roce_over_ipv6_gets_its_family(tmp_path: Path) -> None:
    host = plain(tmp_path)
    host.device("mlx5_0", link_layer="Ethernet", gids=[("fd00:0000:0000:0000:0000:0000:0000:0001", "RoCE v2")])
    plan = decide(host.facts(rendezvous="10.0.0.1", peers=PEERS))
    assert plan.rdma is Rdma.ROCE_IPV6
    wanted = {"NCCL_IB_HCA": "=mlx5_0:1", "NCCL_IB_GID_INDEX": "0", "NCCL_IB_ADDR_FAMILY": "AF_INET6"}
    assert wanted.items() <= values(plan).items()
    host.environment["NCCL_IB_ADDR_FAMILY"] = "AF_INET6"
    assert "NCCL_IB_ADDR_FAMILY" in [one.name for one in decide(host.facts(rendezvous="10.0.0.1", peers=PEERS)).kept]


def test_the_port_of_the_rendezvous_is_no_rail(tmp_path: Path) -> None:
    host = plain(tmp_path)
    for number, netdev in enumerate(("eth0", "rdma0", "rdma1")):
        host.roce(f"mlx5_{number}", f"10.0.{number}.1", netdev=netdev)
    plan = decide(host.facts(rendezvous="10.0.0.1", peers=PEERS))
    assert plan.hcas == ("mlx5_1:1", "mlx5_2:1")


@pytest.mark.parametrize(
    ("name", "value", "explained"),
    [
        ("NCCL_P2P_LEVEL", "phb", True),
        ("NCCL_P2P_LEVEL", "NVL", True),
        ("NCCL_CROSS_NIC", "1", True),
        ("NCCL_BUFFSIZE", "1", False),
    ],
)
def test_what_a_persons_settings_mean(name: str, value: str, explained: bool, tmp_path: Path) -> None:
    host = plain(tmp_path)
    host.environment[name] = value
    notes = decide(host.facts(rendezvous="10.0.0.1", peers=PEERS)).notes
    assert [note.partition(" ")[0] for note in notes] == ([f"{name}={value}"] if explained else [])


def test_docker_on_the_host_changes_nothing(tmp_path: Path) -> None:
    host = plain(tmp_path)
    host.docker()
    host.interface("veth12ab34c")
    assert decide(host.facts(rendezvous="10.0.0.2", peers=PEERS)).interface == "eth0"


def test_an_overlay_beside_the_interface_to_the_internet(tmp_path: Path) -> None:
    host = MadeHost(tmp_path)
    host.card("ens3", ("203.0.113.7",))
    host.interface(
        "tailscale0", ("100.64.0.1",), type="65534", tun_flags="0x1", operstate="unknown", speed="10", flags="0x10d1"
    )
    host.way("100.64.0.2", "100.64.0.1")
    plan = decide(host.facts(rendezvous="100.64.0.2", peers={"h2": "100.64.0.2"}))
    assert (plan.interface, plan.link_gbps) == ("tailscale0", None)


def test_a_bond_over_two_cards(tmp_path: Path) -> None:
    host = MadeHost(tmp_path)
    host.card("ens1")
    host.card("ens2")
    host.interface("bond0", ("10.0.0.1",), devtype="bond", bonding__mode="802.3ad 4", speed="50000")
    host.way("10.0.0.2", "10.0.0.1")
    plan = decide(host.facts(peers={"h2": "10.0.0.2"}))
    assert (plan.interface, plan.link_gbps) == ("bond0", 50.0)


def test_ipv6_only_and_ipv6_beside_ipv4(tmp_path: Path) -> None:
    host = MadeHost(tmp_path)
    host.card("eth0", ("fd00::1", "fe80::1"))
    host.way("fd00::2", "fd00::1")
    plan = decide(host.facts(rendezvous="fd00::2", peers={"h2": "fd00::2"}))
    assert values(plan).keys() == {"NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_IB_DISABLE"} | socket_names(25)
    host.addresses["eth0"] = ("192.168.7.1", "fd00::1", "fe80::1")
    plan = decide(host.facts(rendezvous="fd00::2", peers={"h2": "fd00::2"}))
    assert values(plan)["NCCL_SOCKET_FAMILY"] == "AF_INET6"


def socket_names(gbps: float) -> set[str]:
    return {"NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD"} if gbps >= 25 else set()


def test_two_rails_the_one_that_reaches_most_peers(tmp_path: Path) -> None:
    host = MadeHost(tmp_path)
    host.card("mgmt", ("10.0.0.1",), speed="1000")
    host.card("rail0", ("10.1.0.1",), speed="200000")
    host.way("10.0.0.2", "10.0.0.1")
    for address in ("10.1.0.2", "10.1.0.3"):
        host.way(address, "10.1.0.1")
    plan = decide(host.facts(rendezvous="10.0.0.2", peers={"h2": "10.1.0.2", "h3": "10.1.0.3"}))
    assert plan.interface == "rail0"
    # As many peers here as there: the rendezvous decides, and without one the faster.
    split = {"h2": "10.0.0.2", "h3": "10.1.0.2"}
    assert decide(host.facts(rendezvous="10.0.0.2", peers=split)).interface == "mgmt"
    assert decide(host.facts(peers=split)).interface == "rail0"


def test_before_peers_are_known_the_rendezvous_decides(tmp_path: Path) -> None:
    assert decide(plain(tmp_path).facts(rendezvous="10.0.0.2")).interface == "eth0"
    # On the host that holds the store the kernel answers with its own address.
    assert decide(plain(tmp_path).facts(rendezvous="10.0.0.1")).interface == "eth0"


@pytest.mark.parametrize("local", ["172.17.0.1", "127.0.0.1", "127.0.1.1", "192.0.2.99"])
def test_nothing_is_set_where_no_interface_is_fit(tmp_path: Path, local: str) -> None:
    host = plain(tmp_path)
    host.docker()
    host.way("h2", local, remote="172.17.0.2")
    plan = decide(host.facts(rendezvous="h2", peers={"h2": "h2"}))
    assert plan.interface is None
    assert values(plan) == {"NCCL_IB_DISABLE": "1"}
    assert len(plan.notes) == 1


def test_one_host_meets_over_loopback(tmp_path: Path) -> None:
    host = plain(tmp_path, speed="100000")
    plan = decide(host.facts(alone=True))
    assert values(plan) == {"NCCL_SOCKET_IFNAME": "=lo", "GLOO_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    host.addresses["lo"] = ("::1",)
    assert decide(host.facts(alone=True)).interface is None


@pytest.mark.parametrize(
    ("speed", "threads", "sockets"),
    [
        ("10000", None, None),
        ("-1", None, None),
        ("25000", "4", "1"),
        ("50000", "4", "1"),
        ("100000", "4", "4"),
        ("400000", "4", "4"),
    ],
)
def test_socket_threads_by_speed(tmp_path: Path, speed: str, threads: str | None, sockets: str | None) -> None:
    found = values(decide(plain(tmp_path, speed=speed).facts(peers=PEERS)))
    assert (found.get("NCCL_SOCKET_NTHREADS"), found.get("NCCL_NSOCKS_PERTHREAD")) == (threads, sockets)


@pytest.mark.parametrize("vendor", [AWS, GOOGLE])
def test_nccl_knows_the_cards_of_some_clouds(tmp_path: Path, vendor: str) -> None:
    found = values(decide(plain(tmp_path, speed="100000", vendor=vendor).facts(peers=PEERS)))
    assert "NCCL_SOCKET_NTHREADS" not in found


def test_debug_only_after_a_failure(tmp_path: Path) -> None:
    facts = plain(tmp_path).facts(peers=PEERS)
    assert "NCCL_DEBUG" not in values(decide(facts))
    assert values(decide(facts, after_failure=True))["NCCL_DEBUG"] == "INFO"


def test_infiniband(tmp_path: Path) -> None:
    host = plain(tmp_path, speed="100000")
    for number in range(3):
        host.device(f"mlx5_{number}")
    host.device("mlx5_3", state="1: DOWN", physical="2: Polling")
    plan = decide(host.facts(peers=PEERS))
    assert values(plan) == {
        "NCCL_SOCKET_IFNAME": "=eth0",
        "GLOO_SOCKET_IFNAME": "eth0",
        "NCCL_IB_HCA": "=mlx5_0:1,mlx5_1:1,mlx5_2:1",
    }
    assert (plan.rdma, plan.link_gbps) == (Rdma.INFINIBAND, 1200.0)


def test_roce(tmp_path: Path) -> None:
    host = plain(tmp_path)
    host.roce("mlx5_bond_0", "10.0.0.1")
    plan = decide(host.facts(peers=PEERS))
    assert (values(plan)["NCCL_IB_HCA"], values(plan)["NCCL_IB_GID_INDEX"]) == ("=mlx5_bond_0:1", "3")
    assert (plan.rdma, plan.link_gbps) == (Rdma.ROCE, 100.0)


def test_what_a_person_has_set_is_kept(tmp_path: Path) -> None:
    host = plain(tmp_path)
    host.card("eth1", ("10.1.0.1",))
    host.environment |= {"NCCL_SOCKET_IFNAME": "eth1", "GLOO_SOCKET_IFNAME": "eth0", "NCCL_DEBUG": "WARN"}
    plan = decide(host.facts(peers=PEERS), after_failure=True)
    assert values(plan).keys() == {"NCCL_IB_DISABLE", "NCCL_DEBUG_SUBSYS"}
    kept = {one.name: (one.value, one.reason) for one in plan.kept}
    assert kept["GLOO_SOCKET_IFNAME"][0] == "eth0"
    assert "=eth0" not in kept["GLOO_SOCKET_IFNAME"][1]
    assert kept["NCCL_SOCKET_IFNAME"][0] == "eth1"
    assert "=eth0" in kept["NCCL_SOCKET_IFNAME"][1]
    assert plan.interface == "eth0"


def plan(**values: str) -> TransportPlan:
    variables = tuple(PlannedVariable(name, value, "why") for name, value in values.items())
    return TransportPlan("h1", variables, (), "eth0", Rdma.NONE, (), None)


def settings_of(root: Path, environment: dict[str, str]) -> dict[str, Setting]:
    return read_settings(Surroundings(root=root, environment=environment))


def test_what_is_not_set_is_set_and_the_rest_is_kept(tmp_path: Path) -> None:
    environment = {"NCCL_DEBUG": "WARN", "GLOO_SOCKET_IFNAME": "", "PATH": "/bin"}
    done = apply_plan(plan(NCCL_DEBUG="INFO", GLOO_SOCKET_IFNAME="eth0", NCCL_IB_DISABLE="1"), environment)
    assert done == {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_IB_DISABLE": "1"}
    assert environment["NCCL_DEBUG"] == "WARN"
    assert environment["GLOO_SOCKET_IFNAME"] == "eth0"
    assert settings_of(tmp_path, environment) == {"NCCL_DEBUG": Setting("WARN")}


def test_the_next_plan_takes_back_what_the_last_one_set_but_nothing_of_a_person(tmp_path: Path) -> None:
    environment: dict[str, str] = {}
    apply_plan(plan(NCCL_SOCKET_IFNAME="=lo", NCCL_IB_DISABLE="1"), environment)
    environment["NCCL_IB_DISABLE"] = "0"
    assert settings_of(tmp_path, environment) == {"NCCL_IB_DISABLE": Setting("0")}
    apply_plan(plan(NCCL_SOCKET_IFNAME="=eth0"), environment)
    assert environment.pop(OWN_VARIABLES) == '{"NCCL_SOCKET_IFNAME": "=eth0"}'
    assert environment == {"NCCL_SOCKET_IFNAME": "=eth0", "NCCL_IB_DISABLE": "0"}


def test_files_of_nccl_count_as_set_by_a_person(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/nccl.conf").write_text("# ours\nNCCL_DEBUG=WARN\nNCCL_SOCKET_IFNAME==eth9\nPATH=/x\nnonsense\n")
    (tmp_path / "home").mkdir()
    (tmp_path / "home/.nccl.conf").write_text("NCCL_DEBUG=INFO\n")
    found = settings_of(tmp_path, {"HOME": "/home", "NCCL_IB_HCA": "mlx5"})
    assert found == {
        "NCCL_IB_HCA": Setting("mlx5"),
        "NCCL_DEBUG": Setting("INFO", "/home/.nccl.conf"),
        "NCCL_SOCKET_IFNAME": Setting("=eth9", "/etc/nccl.conf"),
    }
    undone = {name: setting.undo(name).split() for name, setting in found.items()}
    assert undone["NCCL_DEBUG"] == ["remove", "NCCL_DEBUG", "from", "/home/.nccl.conf"]
    assert undone["NCCL_IB_HCA"] == ["unset", "NCCL_IB_HCA"]
    (tmp_path / "mine").write_text("NCCL_DEBUG=TRACE")
    assert settings_of(tmp_path, {"HOME": "/home", "NCCL_CONF_FILE": "/mine"})["NCCL_DEBUG"].value == "TRACE"


def test_numbers_are_read_as_nccl_reads_them() -> None:
    texts = ("1", " 3x", "0x10", "-1", "", "yes", "0")
    assert [Setting(text).number for text in texts] == [1, 3, 16, -1, 0, 0, 0]


@settings(deadline=None)
@given(st.text())
def test_a_garbled_record_of_our_own_is_no_record(text: str) -> None:
    environment = {OWN_VARIABLES: text, "NCCL_DEBUG": "INFO"}
    apply_plan(plan(NCCL_IB_DISABLE="1"), environment)
    assert environment["NCCL_DEBUG"] == "INFO"
    assert environment["NCCL_IB_DISABLE"] == "1"


def test_records_of_another_shape() -> None:
    for text in ("[1]", '{"NCCL_DEBUG": 3}', "null"):
        environment = {OWN_VARIABLES: text, "NCCL_DEBUG": "3"}
        apply_plan(plan(), environment)
        assert environment == {"NCCL_DEBUG": "3", OWN_VARIABLES: "{}"}
