"""Every check can be configured, and every key is a check."""

from dataclasses import fields
from pathlib import Path

from elastictrain.config.preflight import PreflightChecks
from elastictrain.preflight.devices.checks import LocalDevices, device_checks
from elastictrain.preflight.group.checks import CHECKS
from elastictrain.preflight.host.checks import HostOptions, host_checks
from elastictrain.preflight.surroundings import Surroundings

BETWEEN_HOSTS = {"alike", "interface", "infiniband", "roster", "clock", "reachable", "mtu", "latency", "bandwidth"}


def test_the_keys_are_the_checks(tmp_path: Path) -> None:
    surroundings = Surroundings(root=tmp_path, environment={})
    own = [
        *host_checks(surroundings, HostOptions()),
        *device_checks(LocalDevices(surroundings), local_world_size=1, last_counters=tmp_path / "counters.json"),
    ]
    assert {field.name for field in fields(PreflightChecks)} == {check.name for check in own} | BETWEEN_HOSTS | set(CHECKS)
