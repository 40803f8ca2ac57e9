"""The link checks find what is wrong with a network of three hosts, say it alike on all of them, and find nothing otherwise."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from faults import BLOCKED_PORT, Checked, check_links

from elastictrain.chaos.network.hosts import VirtualHost, VirtualNetwork
from elastictrain.chaos.network.links import block, delay, drop_sent, jumbo, jumbo_bridge, limit_rate, lose, without_offloads

LIMIT_S = 10.0
"""From a complete roster to verdicts on every host."""

NEEDS_NFT = pytest.mark.skipif(shutil.which("nft") is None, reason="needs nft, to drop frames")
HEALTHY_RUNS = 3
FULL = ["roster", "reachable", "mtu", "loss", "latency", "clock", "bandwidth"]


@pytest.fixture
def hosts(network: VirtualNetwork) -> list[VirtualHost]:
    made = [network.add(name) for name in ("h1", "h2", "h3")]
    for host in made:
        # Without a limit a link is as fast as the processor is idle.
        limit_rate(host, rate="1gbit", burst="1mb")
    return made


def assert_only(found: Checked, *failed: tuple[str, str, str]) -> None:
    """Nothing else failed, in time."""
    assert found.failed() == list(failed), found.verdicts
    assert found.seconds < LIMIT_S


def test_healthy_hosts_pass(hosts: list[VirtualHost], tmp_path: Path) -> None:
    for number in range(HEALTHY_RUNS):
        found = check_links(hosts, tmp_path / f"full{number}")
        assert_only(found)
        assert [row["check"] for row in found.verdicts if row["status"] == "pass"] == FULL, found.verdicts


def test_a_quick_check_is_quick(hosts: list[VirtualHost], tmp_path: Path) -> None:
    seconds = []
    for number in range(HEALTHY_RUNS):
        found = check_links(hosts, tmp_path / f"quick{number}", full=False)
        assert_only(found)
        assert [row["check"] for row in found.verdicts] == FULL[:-1]
        seconds.append(found.seconds)
    assert min(seconds) < 0.5
    assert max(seconds) < 1.5


def test_large_frames_that_vanish_at_the_switch(hosts: list[VirtualHost], tmp_path: Path) -> None:
    for host in hosts:
        jumbo(host, switch_too=False)
    found = check_links(hosts, tmp_path / "words")
    assert_only(found, ("mtu", "group", "all"))
    verdict = found.verdict("mtu", "all")
    assert ("1500" in verdict["measured"], verdict["expected"]) == (True, "9000 bytes")
    command = "ip link set dev eth0 mtu 1500"
    assert f"`{command}` on h1, h2, h3" in verdict["remedy"]
    for host in hosts:
        host.popen(command.split(), log=tmp_path / "remedy.txt").wait(10)
    assert_only(check_links(hosts, tmp_path / "remedied", full=False))


def test_large_frames_that_vanish_at_one_port(hosts: list[VirtualHost], tmp_path: Path) -> None:
    for host in hosts:
        jumbo(host, switch_too=host is not hosts[2])
    jumbo_bridge(hosts[0])
    found = check_links(hosts, tmp_path / "words")
    assert_only(found, ("mtu", "host", "h3"))
    assert "h3" in found.verdict("mtu", "h3")["remedy"]
    assert "h1" not in found.verdict("mtu", "h3")["remedy"]


@NEEDS_NFT
def test_the_mtu_is_found_where_udp_is_blocked(hosts: list[VirtualHost], tmp_path: Path) -> None:
    for host in hosts:
        jumbo(host, switch_too=host is not hosts[2])
        drop_sent(host, "meta l4proto udp")
    jumbo_bridge(hosts[0])
    found = check_links(hosts, tmp_path / "words", full=False)
    assert_only(found, ("mtu", "host", "h3"))
    assert not found.of("warn")


@NEEDS_NFT
def test_a_peer_that_drops_connections_makes_no_host_silent(hosts: list[VirtualHost], tmp_path: Path) -> None:
    """From some packet on: contacts still succeed."""
    for host in hosts:
        without_offloads(host)
    pair = f"ip saddr {hosts[1].address} ip daddr {hosts[0].address}"
    drop_sent(hosts[1], f"{pair} meta l4proto tcp numgen inc mod 4000000000 > 30000")
    found = check_links(hosts, tmp_path / "words")
    # Flows of one direction may be over by then.
    assert found.failed()
    assert {(scope, subject) for _, scope, subject in found.failed()} <= {("link", "h1 -> h2"), ("link", "h2 -> h1")}


def test_hosts_with_unequal_interfaces_are_well(hosts: list[VirtualHost], tmp_path: Path) -> None:
    """TCP agrees on the smaller one."""
    jumbo(hosts[2], switch_too=False)
    assert_only(check_links(hosts, tmp_path / "words", full=False))


@pytest.mark.parametrize(
    ("sent", "received", "unit", "look"),
    [
        (True, True, "Gbit/s", "ethtool"),
        (True, False, "Gbit/s sent", "tc"),
        (False, True, "Gbit/s received", "ethtool"),
    ],
    ids=["both", "sent", "received"],
)
def test_a_host_at_100_mbit_per_s(
    hosts: list[VirtualHost], tmp_path: Path, sent: bool, received: bool, unit: str, look: str
) -> None:
    limit_rate(hosts[2], sent=sent, received=received)
    found = check_links(hosts, tmp_path / "words")
    assert_only(found, ("bandwidth", "host", "h3"))
    verdict = found.verdict("bandwidth", "h3")
    assert verdict["unit"] == unit
    assert 0.03 < verdict["measured"] < 0.2
    assert verdict["remedy"].partition("`")[2].startswith(look)


def lossy_sender(hosts: list[VirtualHost], percent: float) -> None:
    lose(hosts[2], percent, received=False)


def lossy_host(hosts: list[VirtualHost], percent: float) -> None:
    lose(hosts[2], percent)


def lossy_link(hosts: list[VirtualHost], percent: float) -> None:
    lose(hosts[1], percent, received=False, other=hosts[0])


def lossy_pair(hosts: list[VirtualHost], percent: float) -> None:
    lose(hosts[1], percent)
    lose(hosts[3], percent)


# All of them at all percentages, with drawn losses: tests/unit/preflight/links/test_judge_loss.py.
@NEEDS_NFT
@pytest.mark.parametrize(
    ("fault", "num_hosts", "subjects", "full", "percent"),
    [
        *((lossy_sender, 3, {"h3"}, False, percent) for percent in (1, 5, 20)),
        *((lossy_host, 3, {"h3"}, True, percent) for percent in (1, 20)),
        *((lossy_link, 3, {"h2 -> h1"}, False, percent) for percent in (1, 20)),
        (lossy_pair, 5, {"h2", "h4"}, False, 5),
    ],
)
def test_packets_that_get_lost(
    fault: Callable[[list[VirtualHost], float], None],
    num_hosts: int,
    subjects: set[str],
    full: bool,
    percent: float,
    network: VirtualNetwork,
    tmp_path: Path,
) -> None:
    hosts = [network.add(f"h{number + 1}") for number in range(num_hosts)]
    for host in hosts:
        without_offloads(host)
    fault(hosts, percent)
    found = check_links(hosts, tmp_path / "words", full=full)
    assert {subject for check, _, subject in found.of("warn", "fail") if check == "loss"} == subjects, found.verdicts
    assert {subject for _, _, subject in found.failed()} == (subjects if percent > 1 else set()), found.verdicts
    units = {row["unit"] for row in found.verdicts if row["check"] == "loss"}
    assert units == {"% loss sent" if fault is lossy_sender else "% loss"}


@pytest.mark.parametrize("full", [False, True], ids=["quick", "full"])
def test_a_host_20_ms_away(hosts: list[VirtualHost], tmp_path: Path, full: bool) -> None:
    delay(hosts[2], hosts[:2], seconds=0.02, log=tmp_path / "relay.txt")
    found = check_links(hosts, tmp_path / "words", full=full)
    # The relay is no fast one, either.
    assert [row for row in found.failed() if row[0] != "bandwidth"] == [("latency", "host", "h3")]
    assert {subject for _, _, subject in found.failed()} == {"h3"}
    assert found.seconds < LIMIT_S
    verdict = found.verdict("latency", "h3")
    assert 35 < verdict["measured"] < 120
    assert verdict["unit"] == "ms"


def test_a_port_that_is_blocked_one_way(hosts: list[VirtualHost], tmp_path: Path) -> None:
    block(hosts[2], hosts[0], port=BLOCKED_PORT)
    found = check_links(hosts, tmp_path / "words", full=False)
    assert_only(found, ("reachable", "link", "h3 -> h1"))
    verdict = found.verdict("reachable", "h3 -> h1")
    assert str(BLOCKED_PORT) in verdict["measured"]
    assert f"-s {hosts[2].address}" in verdict["remedy"]


def test_an_absent_host(hosts: list[VirtualHost], tmp_path: Path) -> None:
    found = check_links(hosts, tmp_path / "words", absent=("h3",), roster_s=2.0)
    assert_only(found, ("roster", "host", "h3"))
    assert found.verdict("roster", "h3")["status"] == "fail"
    # One round for the two that are there, and two more where a busy processor makes a link look slow.
    assert 1 <= found.num_rounds <= 3


# On a busy machine contacts may be ordered a second time before anything is measured.
@pytest.mark.parametrize(("stop_at", "doing"), [("order/0", "contacts"), ('"measure":true', "bandwidth")])
def test_a_host_that_falls_silent_midway(hosts: list[VirtualHost], tmp_path: Path, stop_at: str, doing: str) -> None:
    found = check_links(hosts, tmp_path / "words", changed={"h3": {"stop_at": stop_at}})
    assert_only(found, ("roster", "host", "h3"))
    assert doing in found.verdict("roster", "h3")["measured"]


def test_a_clock_that_is_off(hosts: list[VirtualHost], tmp_path: Path) -> None:
    found = check_links(hosts, tmp_path / "words", changed={"h1": {"skew_s": 20.0}}, full=False)
    assert_only(found, ("clock", "host", "h1"))


def slow_link(hosts: list[VirtualHost]) -> None:
    limit_rate(hosts[1], received=False)


@pytest.mark.parametrize(
    ("ill", "failed"),
    [
        (lambda hosts: None, []),
        (slow_link, [("bandwidth", "link", "h2 -> h1")]),
    ],
    ids=["healthy", "one way"],
)
def test_two_hosts(
    network: VirtualNetwork, tmp_path: Path, ill: Callable[[list[VirtualHost]], None], failed: list[tuple[str, str, str]]
) -> None:
    pair = [network.add(name) for name in ("h1", "h2")]
    ill(pair)
    found = check_links(pair, tmp_path / "words")
    assert [row for row in found.failed() if row[1] == "link"] == failed, found.verdicts
    assert found.seconds < LIMIT_S
