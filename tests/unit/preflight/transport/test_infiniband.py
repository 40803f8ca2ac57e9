from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastictrain.preflight.surroundings import Surroundings
from elastictrain.preflight.transport.infiniband import Device, LinkLayer, read_devices
from elastictrain.preflight.transport.judge_infiniband import judge_infiniband
from elastictrain.preflight.transport.plan import Wishes, decide
from tests.unit.examples import examples
from tests.unit.preflight.transport.made import MadeHost, mapped


def read(host: MadeHost) -> dict[str, Device]:
    return {device.name: device for device in read_devices(host.surroundings())}


def test_an_infiniband_port(tmp_path: Path) -> None:
    host = MadeHost(tmp_path)
    host.device("mlx5_0", gids=[("fe80:0000:0000:0000:b859:9f03:00d4:2b1a", "")])
    device = read(host)["mlx5_0"]
    assert (device.node_type, device.driver, device.is_software, device.can_be_opened) == ("CA", "mlx5_core", False, True)
    (port,) = device.ports
    assert (port.number, port.state, port.physical_state, port.rate_gbps) == (1, "ACTIVE", "LinkUp", 400.0)
    assert port.link_layer is LinkLayer.INFINIBAND
    assert [(gid.index, gid.roce_version, gid.ipv4) for gid in port.gids] == [(0, None, None)]


def test_a_roce_port_with_several_gids(tmp_path: Path) -> None:
    host = MadeHost(tmp_path)
    host.roce("mlx5_bond_0", "10.0.0.1", netdev="bond0")
    device = read(host)["mlx5_bond_0"]
    (port,) = device.ports
    assert port.link_layer is LinkLayer.ETHERNET
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
    ports = {name: device.ports[0] for name, device in read(host).items()}
    assert [(one.state, one.physical_state, one.rate_gbps) for one in ports.values()] == [
        ("DOWN", "Disabled", 2.5),
        ("INIT", "PortConfigurationTraining", 100.0),
        ("ARMED", "Phy Test", None),
        ("ACTIVE_DEFER", None, 400.0),
    ]
    host.device("a", rate="9" * 400 + " Gb/sec")
    assert read(host)["a"].ports[0].rate_gbps is None
    assert ports["c"].link_layer is ports["d"].link_layer is LinkLayer.OTHER
    assert read(host)["c"].node_type is None


def test_two_ports_and_a_virtual_function_and_software(tmp_path: Path) -> None:
    host = MadeHost(tmp_path)
    host.device("mlx4_0", port=2)
    host.device("mlx4_0", port=10)
    host.device("mlx5_2")
    host.virtual_function("mlx5_2", "mlx4_0")
    host.write("/sys/class/infiniband/rxe0/ports/1/state", "4: ACTIVE\n")
    found = read(host)
    assert [port.number for port in found["mlx4_0"].ports] == [2, 10]
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
    (port,) = read(host)["mlx5_0"].ports
    assert [(gid.index, gid.roce_version) for gid in port.gids][-1] == (3, None)


def test_nothing_there(tmp_path: Path) -> None:
    assert read_devices(Surroundings(root=tmp_path)) == ()
    (tmp_path / "sys/class/infiniband/mlx5_0").mkdir(parents=True)
    (device,) = read_devices(Surroundings(root=tmp_path))
    assert (device.ports, device.node_type, device.can_be_opened) == ((), None, None)


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
    assert decide(facts, Wishes()).interface == "eth0"
    assert judge_infiniband(facts)


def test_an_address_is_written_as_the_kernel_does() -> None:
    assert mapped("10.0.0.1") == "0000:0000:0000:0000:0000:ffff:0a00:0001"
