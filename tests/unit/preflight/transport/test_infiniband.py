from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastictrain.preflight.transport.infiniband import (
    Device,
    Port,
    Rdma,
    RdmaPlan,
    common,
    decide_rdma,
    kinds_here,
    read_devices,
)
from elastictrain.preflight.transport.judge import judge_infiniband
from elastictrain.preflight.transport.plan import decide_transport
from elastictrain.preflight.transport.settings import Setting
from elastictrain.surroundings import Surroundings
from tests.unit.examples import examples
from tests.unit.preflight.transport.made import MadeHost, mapped, set_by_hand


def read(host: MadeHost) -> dict[str, Device]:
    return {device.name: device for device in read_devices(host.surroundings())}


def read_ports(host: MadeHost, *names: str) -> list[Port]:
    """Of all devices, or of those."""
    found = read_devices(host.surroundings())
    return [port for device, ports in found.items() for port in ports if not names or device.name in names]


def test_an_infiniband_port(tmp_path: Path) -> None:
    host = MadeHost(tmp_path)
    host.device("mlx5_0", gids=[("fe80:0000:0000:0000:b859:9f03:00d4:2b1a", "")])
    device = read(host)["mlx5_0"]
    assert (device.node_type, device.driver, device.is_software, device.can_be_opened) == ("CA", "mlx5_core", False, True)
    (port,) = read_ports(host)
    assert (port.name, port.number, port.state, port.physical_state, port.rate_gbps) == (
        "mlx5_0:1",
        1,
        "ACTIVE",
        "LinkUp",
        400.0,
    )
    assert port.link_layer == "InfiniBand"
    assert [(gid.index, gid.roce_version, gid.ipv4) for gid in port.gids] == [(0, None, None)]


def test_a_roce_port_with_several_gids(tmp_path: Path) -> None:
    host = MadeHost(tmp_path)
    host.roce("mlx5_bond_0", "10.0.0.1", netdev="bond0")
    device = read(host)["mlx5_bond_0"]
    (port,) = read_ports(host)
    assert port.link_layer == "Ethernet"
    assert [(gid.index, gid.roce_version, str(gid.ipv4)) for gid in port.gids] == [
        (0, 1, "None"),
        (1, 2, "None"),
        (2, 1, "10.0.0.1"),
        (3, 2, "10.0.0.1"),
    ]
    assert {gid.netdev for gid in port.gids} == {"bond0"}
    assert device.netdevs == ("bond0",)
    assert port.gids_are_known


def test_states_rates_and_layers(tmp_path: Path) -> None:
    host = MadeHost(tmp_path)
    host.device("a", state="1: DOWN", physical="3: Disabled", rate="2.5 Gb/sec (1X SDR)")
    host.device("b", state="2: INIT", physical="4: PortConfigurationTraining", rate="100 Gb/sec (4X EDR)")
    host.device(
        "c", state="3: ARMED", physical="7: Phy Test", rate="-1", link_layer="Unknown", driver="efa", node_type="7: RNIC?"
    )
    host.device("d", state="5: ACTIVE_DEFER", physical="0: <unknown>", link_layer="Unspecified")
    ports = {port.device.name: port for port in read_ports(host)}
    assert [(one.state, one.physical_state, one.rate_gbps) for one in ports.values()] == [
        ("DOWN", "Disabled", 2.5),
        ("INIT", "PortConfigurationTraining", 100.0),
        ("ARMED", "Phy Test", None),
        ("ACTIVE_DEFER", None, 400.0),
    ]
    host.device("a", rate="9" * 400 + " Gb/sec")
    assert read_ports(host, "a")[0].rate_gbps is None
    assert (ports["c"].link_layer, ports["d"].link_layer) == ("Unknown", "Unspecified")
    assert read(host)["c"].node_type is None


def test_two_ports_and_a_virtual_function_and_software(tmp_path: Path) -> None:
    host = MadeHost(tmp_path)
    host.device("mlx4_0", port=2)
    host.device("mlx4_0", port=10)
    host.device("mlx5_2")
    host.virtual_function("mlx5_2", "mlx4_0")
    host.write("/sys/class/infiniband/rxe0/ports/1/state", "4: ACTIVE\n")
    found = read(host)
    assert [port.number for port in read_ports(host, "mlx4_0")] == [2, 10]
    assert (found["mlx5_2"].physical_function, found["mlx4_0"].physical_function) == ("mlx4_0", None)
    assert [name for name, device in found.items() if device.is_software] == ["rxe0"]


def test_a_container_without_the_device_node(tmp_path: Path) -> None:
    host = MadeHost(tmp_path)
    host.device("mlx5_0", opened=False)
    assert read(host)["mlx5_0"].can_be_opened is False


def test_gids_of_another_namespace_are_left_out(tmp_path: Path) -> None:
    host = MadeHost(tmp_path)
    host.roce("mlx5_0", "10.0.0.1")
    # The kernel answers EINVAL there, as a folder answers EISDIR here.
    types = tmp_path / "sys/class/infiniband/mlx5_0/ports/1/gid_attrs/types"
    (types / "3").unlink()
    (types / "3").mkdir()
    (port,) = read_ports(host)
    assert [(gid.index, gid.roce_version) for gid in port.gids][-1] == (3, None)


def test_nothing_there(tmp_path: Path) -> None:
    assert read_devices(Surroundings(root=tmp_path)) == {}
    (tmp_path / "sys/class/infiniband/mlx5_0").mkdir(parents=True)
    ((device, ports),) = read_devices(Surroundings(root=tmp_path)).items()
    assert (ports, device.node_type, device.can_be_opened) == ((), None, None)


FILES = ["state", "phys_state", "link_layer", "rate", "gids/0", "gids/3", "gid_attrs/types/3", "gid_attrs/ndevs/3"]
WORDS = st.sampled_from([b"", b"4: ACTIVE", b"4:", b"9" * 400 + b" Gb/sec", b"\xff\xfe\x00", b"RoCE v3", b"::", b"4: \xd9\xa3"])


@settings(max_examples=examples(50))
@given(st.dictionaries(st.sampled_from([*FILES, "../../node_type", "../../device/uevent"]), st.binary() | WORDS))
def test_garbled_files_are_unknown_and_never_stop_anything(
    tmp_path_factory: pytest.TempPathFactory, garbled: dict[str, bytes]
) -> None:
    host = MadeHost(tmp_path_factory.mktemp("host"))
    host.card("eth0", ("10.0.0.1",))
    host.way("h2", "10.0.0.1", remote="10.0.0.2")
    host.roce("mlx5_0", "10.0.0.1")
    for file, content in garbled.items():
        host.write(f"/sys/class/infiniband/mlx5_0/ports/1/{file}", content)
    facts = host.facts(peers={"h2": "h2"})
    assert [device.name for device in facts.devices] == ["mlx5_0"]
    assert decide_transport(facts, agreed=Rdma.UNKNOWN).interface == "eth0"
    assert judge_infiniband(facts)


def test_an_address_is_written_as_the_kernel_does() -> None:
    assert mapped("10.0.0.1") == "0000:0000:0000:0000:0000:ffff:0a00:0001"


LOCAL = "fe80:0000:0000:0000:0e42:a1ff:fe00:0001"


def plan(
    host: MadeHost, settings: dict[str, Setting] | None = None, *, agreed: Rdma | None = None, interface: str | None = None
) -> RdmaPlan:
    ports, agreed = read_ports(host), agreed or common({"h1": kinds(host, settings)})
    return decide_rdma(ports, settings=settings or {}, agreed=agreed, interface=interface)


def kinds(host: MadeHost, settings: dict[str, Setting] | None = None) -> frozenset[Rdma]:
    return kinds_here(read_ports(host), settings=settings or {})


def names(found: RdmaPlan) -> list[str]:
    return [port.name for port in found.ports]


def test_infiniband_before_roce(tmp_path: Path) -> None:
    host = MadeHost(tmp_path)
    host.roce("mlx5_0", "10.0.0.1")
    host.device("mlx5_1")
    assert (plan(host).kind, names(plan(host))) == (Rdma.INFINIBAND, ["mlx5_1:1"])
    assert names(plan(host, agreed=Rdma.ROCE)) == ["mlx5_0:1"]


def test_what_others_have_not_is_not_used(tmp_path: Path) -> None:
    host = MadeHost(tmp_path)
    host.device("mlx5_1")
    found = plan(host, agreed=Rdma.NONE)
    assert found.kind is Rdma.NONE
    assert Rdma.INFINIBAND in found.reason


def test_several_gids_the_first_that_is_version_2_over_ipv4_and_routable(tmp_path: Path) -> None:
    host = MadeHost(tmp_path)
    v1, v2 = "IB/RoCE v1", "RoCE v2"
    gids = [(LOCAL, v1), (LOCAL, v2), (mapped("10.0.0.1"), v1), (mapped("169.254.3.1"), v2), (mapped("10.0.0.1"), v2)]
    host.device("mlx5_0", link_layer="Ethernet", gids=[*gids, (mapped("10.2.0.1"), v2)])
    assert plan(host).gid_index == 4
    host.device("mlx5_0", link_layer="Ethernet", gids=gids[:4])
    assert plan(host).gid_index == 3


def test_one_index_for_all_ports_or_none(tmp_path: Path) -> None:
    host = MadeHost(tmp_path)
    host.roce("mlx5_0", "10.0.0.1", at=3)
    host.roce("mlx5_1", "10.0.1.1", at=3)
    assert plan(host).gid_index == 3
    host.roce("mlx5_2", "10.0.2.1", at=5)
    found = plan(host)
    assert (found.kind, found.gid_index, len(found.ports)) == (Rdma.ROCE, None, 3)
    assert all(port in found.notes[0] for port in ("mlx5_0:1: 3", "mlx5_1:1: 3", "mlx5_2:1: 5"))


@pytest.mark.parametrize(
    "gids",
    [[], [(LOCAL, "IB/RoCE v1"), (LOCAL, "RoCE v2")], [(mapped("10.0.0.1"), "IB/RoCE v1")], [(mapped("10.0.0.1"), "RoCE v3")]],
)
def test_roce_without_version_2_over_ipv4(tmp_path: Path, gids: list[tuple[str, str]]) -> None:
    host = MadeHost(tmp_path)
    host.device("mlx5_0", link_layer="Ethernet", gids=gids)
    assert plan(host).kind is Rdma.NONE
    # Who sets the index by hand may know better.
    assert plan(host, set_by_hand(NCCL_IB_GID_INDEX="1")).kind is Rdma.UNKNOWN


def test_what_cannot_be_used_is_not(tmp_path: Path) -> None:
    host = MadeHost(tmp_path)
    host.roce("rnic", "10.0.0.1", node_type="4: RNIC")
    host.device("down", state="2: INIT")
    host.device("closed", opened=False)
    host.write("/sys/class/infiniband/rxe0/ports/1/state", "4: ACTIVE\n")
    host.write("/sys/class/infiniband/rxe0/ports/1/link_layer", "InfiniBand\n")
    found = plan(host)
    assert (found.kind, found.ports, "ACTIVE" in found.reason) == (Rdma.NONE, (), True)


def test_efa_needs_no_variable(tmp_path: Path) -> None:
    host = MadeHost(tmp_path)
    for layer in ("Unknown", "Ethernet", "Unspecified"):
        host.device("rdmap0s6", link_layer=layer, driver="efa", node_type="8: <unknown>")
        assert plan(host) == RdmaPlan(Rdma.EFA)


def test_what_cannot_be_read_is_left_to_nccl(tmp_path: Path) -> None:
    host = MadeHost(tmp_path)
    host.device("mlx5_0", state="?")
    assert plan(host).kind is Rdma.UNKNOWN
    host.device("mlx5_0", link_layer="")
    assert plan(host).kind is Rdma.UNKNOWN
    host.device("mlx5_1")
    assert plan(host).kind is Rdma.INFINIBAND
    assert kinds(host) == {Rdma.INFINIBAND}


def test_slow_ports_and_virtual_functions_are_left_out(tmp_path: Path) -> None:
    host = MadeHost(tmp_path)
    host.device("mlx5_0")
    host.device("mlx5_1", rate="200 Gb/sec (4X HDR)")
    host.device("mlx5_2", rate="100 Gb/sec (4X EDR)")
    host.device("mlx5_3")
    host.virtual_function("mlx5_3", "mlx5_0")
    host.device("mlx5_4", rate="soon")
    found = plan(host)
    assert names(found) == ["mlx5_0:1", "mlx5_1:1", "mlx5_4:1"]
    assert found.rate_gbps is None
    assert len(found.notes) == 2
    assert len(plan(host, set_by_hand(NCCL_IB_HCA="mlx5")).ports) == 5


@pytest.mark.parametrize(
    ("num_rails", "rate", "left_out"),
    [
        # The port for everything else is as fast as the rails (RunAI), or half as fast (Oracle).
        (8, "400 Gb/sec (4X NDR)", True),
        (16, "200 Gb/sec (4X HDR)", True),
        (1, "200 Gb/sec (4X HDR)", True),
        # The hosts meet on one of the rails.
        (7, "400 Gb/sec (4X NDR)", False),
        (1, "400 Gb/sec (4X NDR)", False),
        (0, "400 Gb/sec (4X NDR)", False),
    ],
)
def test_the_port_by_which_the_hosts_meet(num_rails: int, rate: str, left_out: bool, tmp_path: Path) -> None:
    host = MadeHost(tmp_path)
    host.roce("mlx5_0", "10.0.0.1", netdev="eth0", rate=rate)
    for number in range(num_rails):
        host.roce(f"mlx5_{number + 1}", f"10.1.{number}.1", netdev=f"rdma{number}", rate="400 Gb/sec (4X NDR)")
    found = plan(host, interface="eth0")
    assert (len(found.ports), "mlx5_0:1" in names(found), len(found.notes)) == (
        num_rails + 1 - left_out,
        not left_out,
        left_out,
    )
    assert len(plan(host, set_by_hand(NCCL_IB_HCA="mlx5"), interface="eth0").ports) == num_rails + 1
    assert len(plan(host, interface="eth7").ports) == num_rails + 1


def test_ip_over_infiniband_is_on_a_rail(tmp_path: Path) -> None:
    host = MadeHost(tmp_path)
    for number in range(3):
        host.device(f"mlx5_{number}", netdev=f"ib{number}")
    assert len(plan(host, interface="ib0").ports) == 3


def test_roce_over_ipv6(tmp_path: Path) -> None:
    v6 = ("fd00:0000:0000:0000:0000:0000:0000:0001", "RoCE v2")
    host = MadeHost(tmp_path)
    host.device("mlx5_0", link_layer="Ethernet", gids=[(LOCAL, "RoCE v2"), (mapped("10.0.0.1"), "IB/RoCE v1"), v6])
    found = plan(host)
    assert (found.kind, found.gid_index, names(found)) == (Rdma.ROCE_IPV6, 2, ["mlx5_0:1"])
    host.device("mlx5_0", link_layer="Ethernet", gids=[v6, (mapped("10.0.0.1"), "RoCE v2")])
    assert (plan(host).kind, plan(host).gid_index) == (Rdma.ROCE, 1)
    assert common({"h1": frozenset({Rdma.ROCE}), "h2": frozenset({Rdma.ROCE_IPV6})}) is Rdma.NONE


def test_in_a_container_with_a_virtual_function_that_one_is_used(tmp_path: Path) -> None:
    host = MadeHost(tmp_path)
    host.device("mlx5_0", opened=False)
    host.device("mlx5_3")
    host.virtual_function("mlx5_3", "mlx5_0")
    assert names(plan(host)) == ["mlx5_3:1"]


def test_a_person_chooses_or_switches_off(tmp_path: Path) -> None:
    host = MadeHost(tmp_path)
    host.roce("mlx5_0", "10.0.0.1")
    host.device("mlx5_1")
    host.device("mlx5_10")
    assert names(plan(host, set_by_hand(NCCL_IB_HCA="=mlx5_0"))) == ["mlx5_0:1"]
    assert names(plan(host, set_by_hand(NCCL_IB_HCA="mlx5_1"))) == ["mlx5_1:1", "mlx5_10:1"]
    for off in ({"NCCL_IB_DISABLE": "1"}, {"NCCL_NET": "Socket"}):
        settings = set_by_hand(**off)
        assert plan(host, settings).kind is Rdma.NONE
        assert kinds(host, settings) == frozenset()
    assert plan(host, set_by_hand(NCCL_IB_DISABLE="0", NCCL_NET="IB")).kind is Rdma.INFINIBAND


def test_what_all_can_do() -> None:
    both, ib, none = frozenset({Rdma.INFINIBAND, Rdma.ROCE}), frozenset({Rdma.INFINIBAND}), frozenset[Rdma]()
    assert common({"h1": both, "h2": ib}) is Rdma.INFINIBAND
    assert common({"h1": both, "h2": frozenset({Rdma.ROCE})}) is Rdma.ROCE
    assert common({"h1": both, "h2": none}) is Rdma.NONE
    assert common({"h1": both, "h2": frozenset({Rdma.UNKNOWN})}) is Rdma.UNKNOWN
    assert common({}) is Rdma.NONE
