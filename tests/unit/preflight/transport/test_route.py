import socket

import pytest

from elastictrain.preflight.transport.interfaces import Kind, NetworkInterface
from elastictrain.preflight.transport.route import Route, ask_kernel, find_route
from tests.unit.preflight.transport.made import ethernet

INTERFACES = (
    NetworkInterface(name="lo", kind=Kind.LOOPBACK, addresses=("127.0.0.1", "::1")),
    ethernet("eth0", "10.0.0.1", "fd00::1", "fe80::1"),
    ethernet("eth1", "10.1.0.1", "fe80::1"),
)

REFUSALS = ("Permission denied", "Network is unreachable")


def way(target: str, remote: str, local: str) -> Route:
    return find_route(target, interfaces=INTERFACES, probe=lambda _: (remote, local))


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

    found = find_route("h2", interfaces=INTERFACES, probe=refuse)
    assert (found.local, found.interface, found.error) == (None, None, error.strerror or "odd")


def test_the_kernel_of_this_host() -> None:
    assert ask_kernel("127.0.0.1") == ("127.0.0.1", "127.0.0.1")
    assert ask_kernel("127.0.1.1")[0] == "127.0.1.1"
    assert find_route("255.255.255.255", interfaces=INTERFACES, probe=ask_kernel).error in REFUSALS
    assert find_route("a" * 64 + ".invalid", interfaces=INTERFACES, probe=ask_kernel).error
