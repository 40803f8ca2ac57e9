import socket
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastictrain.net.interfaces import (
    Kind,
    NetworkInterface,
    Route,
    find_route,
    read_interfaces,
)
from elastictrain.surroundings import Surroundings, ask_kernel, system_addresses
from tests.unit.preflight.transport.made import MadeHost, ethernet


def read(host: MadeHost) -> dict[str, NetworkInterface]:
    found = read_interfaces(host.surroundings())
    return {one.name: one for one in found}


def test_a_card(tmp_path: Path) -> None:
    host = MadeHost(tmp_path)
    host.card("ens1f0np0", ("10.0.0.1", "fd00::1"), speed="100000")
    assert read(host)["ens1f0np0"] == NetworkInterface(
        name="ens1f0np0",
        kind=Kind.CARD,
        running=True,
        mtu_bytes=1500,
        speed_gbps=100.0,
        vendor="0x15b3",
        addresses=("10.0.0.1", "fd00::1"),
    )
    assert read(host)["lo"].kind is Kind.LOOPBACK
    assert read(host)["lo"].running is True


def test_kinds(tmp_path: Path) -> None:
    host = MadeHost(tmp_path)
    host.docker()
    host.interface("br-0123456789ab", devtype="bridge")
    host.interface("veth3f2a91c", speed="10000")
    host.interface("cali4b9", speed="10000")
    host.interface("virbr0", devtype="bridge")
    host.interface("br0", devtype="bridge")
    host.interface("bond0", devtype="bond", bonding__mode="802.3ad 4", speed="50000")
    host.interface("eth0.100", devtype="vlan", speed="25000")
    host.interface("tailscale0", type="65534", tun_flags="0x1001", operstate="unknown", speed="10", flags="0x11d1")
    host.interface("wg0", type="65534", devtype="wireguard", operstate="unknown")
    host.interface("flannel.1", devtype="vxlan")
    host.interface("ib0", type="32", device__vendor="0x15b3", speed="400000")
    host.interface("eth0", speed="10000")
    host.interface("docker_card", device__vendor="0x15b3")
    host.write("/sys/class/net/bonding_masters", "bond0\n")
    kinds = {name: one.kind for name, one in read(host).items()}
    assert kinds == {
        "lo": Kind.LOOPBACK,
        "docker0": Kind.CONTAINER,
        "br-0123456789ab": Kind.CONTAINER,
        "veth3f2a91c": Kind.CONTAINER,
        "cali4b9": Kind.CONTAINER,
        "virbr0": Kind.CONTAINER,
        "br0": Kind.OTHER,
        "bond0": Kind.CARD,
        "eth0.100": Kind.CARD,
        "tailscale0": Kind.OTHER,
        "wg0": Kind.OTHER,
        "flannel.1": Kind.OTHER,
        "ib0": Kind.CARD,
        "eth0": Kind.OTHER,
        "docker_card": Kind.CARD,
    }


def test_speeds_that_mean_nothing_are_unknown(tmp_path: Path) -> None:
    host = MadeHost(tmp_path)
    for number, speed in enumerate(("-1", "65535", "4294967295", "0", "fast", "")):
        host.card(f"eth{number}", speed=speed)
    host.interface("inside", speed="10000")
    host.interface("tun0", type="65534", tun_flags="0x1", speed="10")
    host.interface("bond0", devtype="bond", speed="50000")
    speeds = {name: one.speed_gbps for name, one in read(host).items()}
    assert speeds.pop("bond0") == 50.0
    assert set(speeds.values()) == {None}


@pytest.mark.parametrize(
    ("flags", "operstate", "running"),
    [
        ("0x1003", "up", True),
        ("0x1003", "unknown", True),
        ("0x1002", "up", False),
        ("0x1003", "down", False),
        ("0x1003", "lowerlayerdown", False),
        ("??", "up", True),
        ("??", "unknown", None),
        ("0x1003", "sideways", None),
        ("", "", None),
    ],
)
def test_running(tmp_path: Path, flags: str, operstate: str, running: bool | None) -> None:
    host = MadeHost(tmp_path)
    host.interface("eth0", flags=flags, operstate=operstate)
    assert read(host)["eth0"].running is running


def test_without_sysfs_names_and_addresses_are_what_is_known(tmp_path: Path) -> None:
    addresses = {"lo": ("127.0.0.1", "10.5.0.1"), "eth0": ("10.0.0.1",), "docker0": ("172.17.0.1",)}
    found = read_interfaces(Surroundings(root=tmp_path, addresses=lambda: addresses))
    kinds = {one.name: one.kind for one in found}
    assert kinds == {"lo": Kind.LOOPBACK, "eth0": Kind.OTHER, "docker0": Kind.CONTAINER}
    assert all(one.running is None for one in found)


def test_order_is_the_kernels(tmp_path: Path) -> None:
    host = MadeHost(tmp_path)
    host.card("b")
    host.card("a")
    assert list(read(host)) == ["lo", "b", "a"]


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from(["type", "operstate", "flags", "speed", "mtu", "ifindex", "uevent"]), st.binary()))
def test_garbled_files_are_unknown(tmp_path_factory: pytest.TempPathFactory, garbled: dict[str, bytes]) -> None:
    host = MadeHost(tmp_path_factory.mktemp("host"))
    host.card("eth0", ("10.0.0.1",))
    for file, content in garbled.items():
        host.write(f"/sys/class/net/eth0/{file}", content)
    assert read(host)["eth0"].addresses == ("10.0.0.1",)


def test_addresses_of_this_host() -> None:
    assert "127.0.0.1" in {address for addresses in system_addresses().values() for address in addresses}
    assert not any("%" in address for addresses in system_addresses().values() for address in addresses)


INTERFACES = (
    NetworkInterface(name="lo", kind=Kind.LOOPBACK, addresses=("127.0.0.1", "::1")),
    ethernet("eth0", "10.0.0.1", "fd00::1", "fe80::1"),
    ethernet("eth1", "10.1.0.1", "fe80::1"),
)

REFUSALS = ("Permission denied", "Network is unreachable")


def way(target: str, remote: str, local: str) -> Route:
    return find_route(target, interfaces=INTERFACES, surroundings=Surroundings(probe=lambda _: (remote, local)))


def test_the_interface_is_the_owner_of_our_address() -> None:
    assert way("h2", "10.0.0.2", "10.0.0.1") == Route("h2", "10.0.0.2", "10.0.0.1", "eth0")
    assert way("h2", "10.9.0.2", "10.1.0.1").interface == "eth1"
    found = way("h2", "fd00::2", "fd00:0::1")
    assert (found.interface, found.is_ipv6) == ("eth0", True)


def test_link_local_addresses_are_told_apart_by_their_scope() -> None:
    assert way("fe80::2%eth1", "fe80::2%eth1", "fe80::1%eth1").interface == "eth1"
    assert way("fe80::2%eth0", "fe80::2%eth0", "fe80::1%eth0").interface == "eth0"


def test_mapped_addresses_are_ipv4() -> None:
    found = way("h2", "::ffff:10.0.0.2", "::ffff:10.0.0.1")
    assert found == Route("h2", "10.0.0.2", "10.0.0.1", "eth0")


def test_all_of_loopback_is_loopback() -> None:
    assert way("h2", "127.0.1.1", "127.0.1.1").interface == "lo"


def test_an_address_of_nobody_is_an_unknown_interface() -> None:
    assert way("h2", "10.0.0.2", "192.168.1.1") == Route("h2", "10.0.0.2", "192.168.1.1", None)


@pytest.mark.parametrize(
    "error", [OSError(101, "Network is unreachable"), socket.gaierror(-2, "Name or service not known"), OSError("odd")]
)
def test_no_way_is_a_fact(error: OSError) -> None:
    def refuse(_: str) -> tuple[str, str]:
        raise error

    found = find_route("h2", interfaces=INTERFACES, surroundings=Surroundings(probe=refuse))
    assert (found.local, found.interface, found.error) == (None, None, error.strerror or "odd")


def test_the_kernel_of_this_host() -> None:
    assert ask_kernel("127.0.0.1") == ("127.0.0.1", "127.0.0.1")
    assert ask_kernel("127.0.1.1")[0] == "127.0.1.1"
    assert find_route("255.255.255.255", interfaces=INTERFACES, surroundings=Surroundings()).error in REFUSALS
    assert find_route("a" * 64 + ".invalid", interfaces=INTERFACES, surroundings=Surroundings()).error
