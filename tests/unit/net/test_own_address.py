from dataclasses import replace
from pathlib import Path

import pytest

from elastictrain.net.interfaces import own_address, usable_interfaces
from tests.unit.preflight.transport.made import MadeHost


@pytest.fixture
def made(tmp_path: Path) -> MadeHost:
    return MadeHost(tmp_path / "root")


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


def test_names_that_nobody_knows_or_can_know(made: MadeHost) -> None:
    def ask(target: str) -> tuple[str, str]:
        if target == "a..b":
            raise UnicodeError("label empty or too long")
        raise OSError("no way")

    surroundings = replace(made.surroundings(), probe=ask)
    made.interface("docker0", ("172.17.0.1",), devtype="bridge")
    made.interface("eth0")
    made.interface("eth1", ("10.0.0.7", "fd00::7"))
    assert own_address(["a..b", "nobody"], surroundings=surroundings) == "10.0.0.7"


def test_a_host_without_a_network_is_alone(made: MadeHost) -> None:
    assert address(made, "b") == "127.0.0.1"


def test_interfaces_that_may_lead_to_other_hosts(made: MadeHost) -> None:
    made.docker()
    made.interface("eth0", ("10.0.0.1",))
    made.interface("tailscale0", ("100.64.0.1",), type="65534", tun_flags="0x1001")
    assert [one.name for one in usable_interfaces(made.surroundings())] == ["eth0", "tailscale0"]
