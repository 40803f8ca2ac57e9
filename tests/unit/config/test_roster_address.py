"""`launch.roster`: what it may be, and what is said of anything else."""

import pytest

from elastictrain.config.combinations import check_launch
from elastictrain.config.launch import LaunchGroup
from elastictrain.config.load import load
from elastictrain.config.roster_address import RosterAddress, read_roster_address
from elastictrain.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("tcp://10.0.0.7:29400", "10.0.0.7", 29_400),
        ("tcp://head:1", "head", 1),
        ("tcp://run_0-worker.jobs.svc.cluster.local:65535", "run_0-worker.jobs.svc.cluster.local", 65_535),
        ("tcp://[::1]:29400", "::1", 29_400),
        ("tcp://[fd00:0::7]:29400", "fd00:0::7", 29_400),
    ],
)
def test_addresses(text: str, host: str, port: int) -> None:
    address = read_roster_address(text)
    assert address == RosterAddress(host, port)
    assert str(address) == text
    assert check_launch(LaunchGroup(roster=text)) == []


def test_storage_is_no_address() -> None:
    assert read_roster_address(LaunchGroup().roster) is None
    assert check_launch(LaunchGroup()) == []


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "it is neither"),
        ("Storage", "it is neither"),
        ("head:29400", "it is neither"),
        ("udp://head:29400", "it is neither"),
        ("tcp://head", "it is neither"),
        ("tcp://head:", "it is neither"),
        ("tcp://head:29400/run", "it is neither"),
        ("tcp://head:29400 ", "it is neither"),
        ("tcp://me@head:29400", "it is neither"),
        ("tcp://::1:29400", "it is neither"),
        ("tcp://head:0", "0 is no port"),
        ("tcp://head:65536", "65536 is no port"),
        ("tcp://10.0.0.300:29400", "10.0.0.300 is no address"),
        ("tcp://10.0.7:29400", "10.0.7 is no address"),
        ("tcp://[head]:29400", "head is no address"),
        ("tcp://[]:29400", "it is neither"),
        ("tcp://[10.0.0.7]:29400", "10.0.0.7 is no address"),
        ("tcp://[fe80::1%eth0]:29400", "an address on one link"),
        ("tcp://0.0.0.0:29400", "0.0.0.0 is not the address of one host"),
        ("tcp://[::]:29400", ":: is not the address of one host"),
        ("tcp://[ff02::1]:29400", "ff02::1 is not the address of one host"),
    ],
)
def test_anything_else_is_refused(text: str, reason: str) -> None:
    (problem,) = check_launch(LaunchGroup(roster=text))
    assert problem.key == "launch.roster"
    assert 'must be "storage", or "tcp://HOST:PORT" as in tcp://10.0.0.7:29400, but is ' in problem.message
    assert reason in problem.message.partition(", but is ")[2]


@pytest.mark.parametrize("text", ["tcp://127.0.0.1:29400", "tcp://[::1]:29400"])
def test_a_loopback_address_is_for_one_host(text: str) -> None:
    assert check_launch(LaunchGroup(roster=text)) == []
    (problem,) = check_launch(LaunchGroup(roster=text, min_hosts=2))
    assert problem.key == "launch.roster"
    assert "at which the other hosts reach" in problem.message


def test_on_the_command_line() -> None:
    arguments = ["run.dir=/tmp/unused", "recipe=llama_tiny"]
    config = load([*arguments, 'launch.roster="tcp://[::1]:29400"'], with_task=False)
    assert config.launch.roster == "tcp://[::1]:29400"
    assert load([*arguments, "launch.roster=tcp://head:29400"], with_task=False).launch.roster == "tcp://head:29400"
    with pytest.raises(ConfigError, match=r"`launch\.roster` must be"):
        load([*arguments, "launch.roster=tcp://head"], with_task=False)
