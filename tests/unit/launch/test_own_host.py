import socket
from pathlib import Path

import pytest

from elastictrain.launch.own_host import count_gpus, default_interface, own_names
from elastictrain.surroundings import Surroundings
from tests.unit.preflight.transport.made import MadeHost

ROUTES = """Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT
eth1\t0000000A\t00000000\t0001\t0\t0\t100\t000000FF\t0\t0\t0
{default}"""


@pytest.fixture
def made(tmp_path: Path) -> MadeHost:
    return MadeHost(tmp_path / "root")


@pytest.mark.parametrize(
    ("default", "name"),
    [
        ("eth0\t00000000\t010000AC\t0003\t0\t0\t0\t00000000\t0\t0\t0\n", "eth0"),
        ("", ""),
        ("eth0\t00000000\t010000AC\n", ""),
        # Half of all addresses, as some VPNs set it: no default route.
        ("tun0\t00000000\t010000AC\t0003\t0\t0\t0\t00000080\t0\t0\t0\n", ""),
    ],
)
def test_the_interface_of_the_default_route(made: MadeHost, default: str, name: str) -> None:
    made.write("/proc/net/route", ROUTES.format(default=default))
    assert default_interface(made.surroundings()) == name


def test_a_kernel_without_ipv4(tmp_path: Path) -> None:
    assert default_interface(Surroundings(root=tmp_path)) == ""


@pytest.mark.parametrize(
    ("environment", "count"),
    [
        ({}, 3),
        ({"CUDA_VISIBLE_DEVICES": "0,2"}, 2),
        ({"CUDA_VISIBLE_DEVICES": ""}, 0),
        ({"CUDA_VISIBLE_DEVICES": "0,1,2,3,4"}, 3),
    ],
)
def test_gpus_of_nvidia(made: MadeHost, environment: dict[str, str], count: int) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia7", "nvidiactl", "nvidia-uvm", "nvidia-modeset", "null"):
        made.write(f"/dev/{name}", "")
    assert count_gpus(environment, root=str(made.root)) == count


def test_gpus_of_amd(made: MadeHost) -> None:
    nodes = "/sys/class/kfd/kfd/topology/nodes"
    for node, units in ((0, 0), (1, 304), (2, 304)):
        made.write(f"{nodes}/{node}/properties", f"cpu_cores_count 1\nsimd_count {units}\nmem_banks_count 1\n")
    made.write(f"{nodes}/3/properties", "")
    assert count_gpus({}, root=str(made.root)) == 2
    assert count_gpus({"ROCR_VISIBLE_DEVICES": "1"}, root=str(made.root)) == 1


def test_a_host_without_gpus(made: MadeHost) -> None:
    assert count_gpus({}, root=str(made.root)) == 0
    assert count_gpus({}, root=str(made.root / "nowhere")) == 0


@pytest.mark.parametrize(("name", "names"), [("a.example.org", ("a.example.org", "a")), ("a", ("a",))])
def test_names_of_this_host(name: str, names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: name)
    assert own_names() == names
