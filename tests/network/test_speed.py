"""The speed test between two hosts, one of which can only send slowly."""

import re
import sys
import time
from pathlib import Path

from torchruns import REPOSITORY

from elastictrain.chaos.network.hosts import VirtualNetwork
from elastictrain.chaos.network.links import limit_rate

ENVIRONMENT = {"GLOO_SOCKET_IFNAME": "", "PYTHONPATH": str(REPOSITORY)}


def test_the_slow_direction_shows(network: VirtualNetwork, tmp_path: Path) -> None:
    listener, other = network.add("a"), network.add("b")
    limit_rate(other, received=False, rate="200mbit")
    port = listener.port()
    speed = [sys.executable, "-m", "elastictrain.preflight", "speed", "--port", str(port), "--token", "x", "--size", "16M"]
    first = listener.popen([*speed, "--listen", listener.address], log=tmp_path / "a.txt", extra_environment=ENVIRONMENT)
    until = time.monotonic() + 60
    while not (tmp_path / "a.txt").exists() or "--to" not in first.output():
        assert time.monotonic() < until, first.output()
        time.sleep(0.05)
    second = other.popen([*speed, "--to", listener.address], log=tmp_path / "b.txt", extra_environment=ENVIRONMENT)
    assert (second.wait(60), first.wait(60)) == (0, 0), first.output() + second.output()
    sent, received, _ = (float(rate) for rate in re.findall(r"([\d.]+) Gbit/s", second.output()))
    assert 0.05 < sent < 0.25
    assert received > 2 * sent
