import socket
from pathlib import Path

import pytest

from elastictrain.launch.probing import count_gpus, default_interface, own_address, own_names, usable_interfaces
from elastictrain.preflight.surroundings import Surroundings
from tests.unit.preflight.transport.made import MadeHost

ROUTES = """Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT
eth1\t0000000A\t00000000\t0001\t0\t0\t100\t000000FF\t0\t0\t0
{default}"""


@pytest.fixture
def made(tmp_path: Path) -> MadeHost:
    return MadeHost(tmp_path / "root")


@pytest.fixture(autouse=True)
def kernel(made: MadeHost, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastictrain.launch.probing.ask_kernel", made.probe())
    monkeypatch.setattr("elastictrain.launch.probing.system_addresses", lambda: made.addresses)


def address(made: MadeHost, *peers: str) -> str:
    return own_address(peers, surroundings=made.surroundings())


def test_the_address_is_the_one_from_which_the_kernel_sends_to_the_others(made: MadeHost) -> None:
    made.routes = {"b": ("10.0.0.2", "10.0.0.1"), "192.0.2.1": ("192.0.2.1", "192.168.1.5")}
    assert address(made, "a", "b") == "10.0.0.1"
    assert address(made) == "192.168.1.5"


def test_the_own_name_among_the_peers_does_not_lead_to_loopback(made: MadeHost) -> None:
    """Debian resolves it to 127.0.1.1, where nobody else finds this host."""
    made.routes = {
        "a": ("127.0.1.1", "127.0.0.1"),
        "c": ("::1", "::1"),
        "b": ("10.0.0.2", "10.0.0.1"),
    }
    assert address(made, "a", "c", "b") == "10.0.0.1"


def test_a_network_of_ipv6_alone(made: MadeHost) -> None:
    made.routes = {"2001:db8::1": ("2001:db8::1", "fd00::5")}
    assert address(made) == "fd00::5"


def test_names_that_nobody_knows_or_can_know(made: MadeHost, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(target: str) -> tuple[str, str]:
        if target == "a..b":
            raise UnicodeError("label empty or too long")
        raise OSError("no way")

    monkeypatch.setattr("elastictrain.launch.probing.ask_kernel", ask)
    made.interface("docker0", ("172.17.0.1",), devtype="bridge")
    made.interface("eth0")
    made.interface("eth1", ("10.0.0.7", "fd00::7"))
    assert address(made, "a..b", "nobody") == "10.0.0.7"


def test_a_host_without_a_network_is_alone(made: MadeHost) -> None:
    assert address(made, "b") == "127.0.0.1"


def test_interfaces_that_may_lead_to_other_hosts(made: MadeHost) -> None:
    made.docker()
    made.interface("eth0", ("10.0.0.1",))
    made.interface("tailscale0", ("100.64.0.1",), type="65534", tun_flags="0x1001")
    assert [one.name for one in usable_interfaces(made.surroundings())] == ["eth0", "tailscale0"]


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
