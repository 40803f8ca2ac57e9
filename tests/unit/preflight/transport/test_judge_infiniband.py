from pathlib import Path

import pytest

from elastictrain.preflight.transport.infiniband import Rdma
from elastictrain.preflight.transport.judge import judge_alike, judge_infiniband
from elastictrain.preflight.verdict import Status, Verdict
from tests.unit.preflight.transport.made import GOOGLE, MadeHost, mapped


@pytest.fixture
def host(tmp_path: Path) -> MadeHost:
    return MadeHost(tmp_path)


def only(host: MadeHost, **environment: str) -> Verdict:
    host.environment |= environment
    (verdict,) = judge_infiniband(host.facts())
    return verdict


def test_right(host: MadeHost) -> None:
    host.device("mlx5_0")
    host.device("mlx5_1", state="1: DOWN", physical="2: Polling")
    assert (only(host).status, only(host).measured) == (Status.PASS, "mlx5_0:1")
    verdict = only(host, NCCL_IB_HCA="=mlx5_0:1", NCCL_IB_DISABLE="0", NCCL_NET="IB", NCCL_IB_GID_INDEX="0")
    assert verdict.status is Status.PASS


def test_roce_is_right(host: MadeHost) -> None:
    host.roce("mlx5_bond_0", "10.0.0.1")
    assert only(host).status is Status.PASS
    assert only(host, NCCL_IB_GID_INDEX="3").status is Status.PASS
    assert only(host, NCCL_IB_GID_INDEX="-1").status is Status.PASS


def test_nothing_and_no_cable_and_efa_are_skipped(host: MadeHost) -> None:
    nothing = only(host)
    host.device("mlx5_0", state="1: DOWN", physical="3: Disabled")
    no_cable = only(host)
    assert {one.status for one in (nothing, no_cable)} == {Status.SKIP}
    # Each has a remedy of its own.
    assert [one.remedy.partition(" ")[0] for one in (nothing, no_cable)] == ["ls", "ibstat"]


@pytest.mark.parametrize("layer", ["Unknown", "Ethernet"])
def test_efa_needs_its_plugin(host: MadeHost, layer: str) -> None:
    host.device("rdmap0s6", link_layer=layer, driver="efa")
    lacking = only(host)
    assert (lacking.status, "libnccl-net" in str(lacking.expected), "aws-ofi-nccl" in lacking.remedy) == (
        Status.WARN,
        True,
        True,
    )
    assert only(host, NCCL_NET_PLUGIN="aws-ofi").status is Status.PASS
    del host.environment["NCCL_NET_PLUGIN"]
    host.write("/plugins/libnccl-net-ofi.so", "")
    assert only(host).status is Status.WARN
    assert only(host, LD_LIBRARY_PATH="/usr/lib64:/plugins").status is Status.PASS
    host.environment.clear()
    host.write("/opt/amazon/ofi-nccl/lib64/libnccl-net.so", "")
    assert (only(host).status, only(host).measured) == (Status.PASS, "EFA through libnccl-net.so")


def test_cards_for_gpus_need_googles_plugin(host: MadeHost) -> None:
    for number in range(4):
        host.card(f"eth{number}", (f"10.0.{number}.1",), vendor=GOOGLE)
    assert only(host).status is Status.SKIP
    host.card("eth4", ("10.0.4.1",), vendor=GOOGLE)
    assert (only(host).status, "TCPXO" in only(host).remedy) == (Status.WARN, True)
    host.write("/usr/local/nvidia/lib64/libnccl-net.so", "")
    assert only(host).status is Status.SKIP


def test_a_topology_file_that_is_missing(host: MadeHost) -> None:
    for number in range(4):
        host.device(f"mlx5_{number}")
    assert only(host).status is Status.PASS
    host.write("/sys/class/dmi/id/sys_vendor", "Microsoft Corporation\n")
    assert (only(host).status, "export NCCL_TOPO_FILE=" in only(host).remedy) == (Status.WARN, True)
    assert only(host, NCCL_TOPO_FILE="/opt/topo.xml").remedy == "unset NCCL_TOPO_FILE"
    host.write("/opt/topo.xml", "<system/>")
    assert only(host).status is Status.PASS


def test_azures_virtual_function_gets_no_address(host: MadeHost) -> None:
    gids = [("fe80:0000:0000:0000:0e42:a1ff:fe00:0001", "RoCE v2")]
    host.device("mlx5_0", link_layer="Ethernet", gids=gids, netdev="enP1s1")
    assert (only(host).status, "ip address add" in only(host).remedy) == (Status.WARN, True)
    host.write("/sys/class/net/enP1s1/master/ifindex", "2\n")
    assert only(host).status is Status.SKIP


def test_roce_over_ipv6_is_right(host: MadeHost) -> None:
    host.device("mlx5_0", link_layer="Ethernet", gids=[("fd00:0000:0000:0000:0000:0000:0000:0001", "RoCE v2")])
    assert (only(host).status, only(host).measured) == (Status.PASS, "mlx5_0:1")
    assert only(host, NCCL_IB_GID_INDEX="1").status is Status.FAIL


@pytest.mark.parametrize(
    ("state", "physical", "layer", "remedy"),
    [
        ("2: INIT", "5: LinkUp", "InfiniBand", "ibstat mlx5_0 1; sminfo"),
        ("3: ARMED", "5: LinkUp", "InfiniBand", "ibstat"),
        ("1: DOWN", "6: LinkErrorRecovery", "InfiniBand", "ibstat"),
        ("1: DOWN", "5: LinkUp", "Ethernet", "ip link set ens1 up; ethtool ens1"),
    ],
)
def test_a_link_without_an_active_port(host: MadeHost, state: str, physical: str, layer: str, remedy: str) -> None:
    host.device("mlx5_0", state=state, physical=physical, link_layer=layer, netdev="ens1")
    verdict = only(host)
    assert (verdict.status, verdict.expected) == (Status.WARN, "ACTIVE")
    assert all(word in str(verdict.measured) for word in ("mlx5_0:1", state[3:], physical[3:]))
    assert verdict.remedy.startswith(remedy)


def test_roce_without_the_right_gid(host: MadeHost) -> None:
    host.device("mlx5_0", link_layer="Ethernet", gids=[("fe80::1", "RoCE v2")], netdev="ens1")
    assert only(host).remedy.startswith("ip address add ADDRESS/PREFIX dev ens1")
    host.device("mlx5_0", link_layer="Ethernet", gids=[(mapped("10.0.0.1"), "IB/RoCE v1")])
    assert only(host).remedy.startswith("cma_roce_mode -d mlx5_0 -p 1 -m 2")
    assert only(host).status is Status.WARN


@pytest.mark.parametrize("file", ["state", "link_layer", "gids"])
def test_what_cannot_be_read(host: MadeHost, file: str) -> None:
    host.roce("mlx5_0", "10.0.0.1")
    path = host.root / "sys/class/infiniband/mlx5_0/ports/1" / file
    if file == "gids":
        path.rename(path.with_name("gone"))
    else:
        path.write_bytes(b"\xff\x00")
    verdict = only(host)
    assert (verdict.status, "mlx5_0:1" in str(verdict.measured)) == (Status.WARN, True)
    # The remedy shows the file.
    assert verdict.remedy.endswith(f"/mlx5_0/ports/1/{file}")


def test_a_device_without_ports(host: MadeHost) -> None:
    host.write("/sys/class/infiniband/mlx5_0/device/uevent", "DRIVER=mlx5_core\n")
    assert only(host).status is Status.WARN


def test_a_container_without_the_device_node(host: MadeHost) -> None:
    host.device("mlx5_0", opened=False)
    assert only(host).status is Status.WARN
    assert only(host).remedy.startswith("docker run --device=/dev/infiniband")


def test_software_is_none_of_ours(host: MadeHost) -> None:
    host.write("/sys/class/infiniband/rxe0/ports/1/state", "??\n")
    assert only(host).status is Status.SKIP


@pytest.mark.parametrize(("pin", "culprit"), [("mlx4", "no mlx4"), ("=mlx5_0,mlx5_7", "no mlx5_7"), ("mlx5_1", "ACTIVE")])
def test_pinned_devices(host: MadeHost, pin: str, culprit: str) -> None:
    host.device("mlx5_0")
    host.device("mlx5_1", state="1: DOWN", physical="2: Polling")
    verdict = only(host, NCCL_IB_HCA=pin)
    assert verdict.status is Status.FAIL
    assert culprit in str(verdict.measured)
    assert verdict.remedy.startswith("unset NCCL_IB_HCA")
    assert verdict.remedy.endswith("NCCL_IB_HCA==mlx5_0:1")


@pytest.mark.parametrize(
    ("index", "status", "found"),
    [
        ("2", Status.WARN, "10.0.0.1"),
        ("1", Status.WARN, "fe80::e42:a1ff:fe00:1"),
        ("5", Status.FAIL, "empty"),
        ("99", Status.FAIL, "empty"),
    ],
)
def test_pinned_index(host: MadeHost, index: str, status: Status, found: str) -> None:
    host.roce("mlx5_0", "10.0.0.1")
    verdict = only(host, NCCL_IB_GID_INDEX=index)
    assert (verdict.status, str(verdict.expected).partition(" ")[0]) == (status, "3")
    assert found in str(verdict.measured)
    assert verdict.remedy.endswith("NCCL_IB_GID_INDEX=3")


@pytest.mark.parametrize(("name", "value"), [("NCCL_IB_DISABLE", "1"), ("NCCL_NET", "Socket")])
def test_switched_off_beside_active_ports(host: MadeHost, name: str, value: str) -> None:
    host.environment[name] = value
    assert only(host).status is Status.SKIP
    host.device("mlx5_0")
    assert (only(host).status, only(host).remedy) == (Status.WARN, f"unset {name}")


def test_demanded_without_ports(host: MadeHost) -> None:
    assert (only(host, NCCL_NET="IB").status, only(host).remedy) == (Status.FAIL, "unset NCCL_NET")


def ports(count: int) -> list[str]:
    return [f"mlx5_{number}:1" for number in range(count)]


def test_all_hosts_alike() -> None:
    ib = frozenset({Rdma.INFINIBAND})
    kinds = {"h1": ib, "h2": ib}
    assert judge_alike({"h1": ports(8), "h2": ports(8)}, kinds) == []
    (verdict,) = judge_alike({"h1": ports(8), "h2": ports(7)}, kinds)
    assert (verdict.subject, verdict.status, verdict.measured, verdict.expected) == ("h2", Status.WARN, 7, 8)


def test_one_host_without() -> None:
    kinds = {"h1": frozenset({Rdma.INFINIBAND}), "h2": frozenset[Rdma](), "h3": frozenset({Rdma.INFINIBAND})}
    hcas = {name: ports(0) for name in kinds}
    (verdict,) = judge_alike(hcas, kinds)
    assert (verdict.subject, verdict.status) == ("h2", Status.FAIL)
    assert ("infiniband" in str(verdict.measured), "sockets" in verdict.remedy) == (True, True)
    assert judge_alike(hcas, {name: frozenset() for name in hcas}) == []


@pytest.mark.parametrize(
    ("without", "agreed", "status"),
    [(1, Rdma.NONE, Status.FAIL), (2, Rdma.NONE, Status.FAIL), (3, Rdma.NONE, Status.WARN), (1, Rdma.ROCE, Status.WARN)],
)
def test_the_exception_fails_and_not_the_rule(without: int, agreed: Rdma, status: Status) -> None:
    kinds = {f"h{number}": frozenset({agreed, *([Rdma.INFINIBAND] if number >= without else [])}) for number in range(4)}
    found = judge_alike(dict.fromkeys(kinds, ()), kinds)
    assert [(one.subject, one.status) for one in found] == [(f"h{number}", status) for number in range(without)]
