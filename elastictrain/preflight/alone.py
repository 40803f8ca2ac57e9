"""What a host can be asked without any other: its own checks, and the ones of its devices and interfaces."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from elastictrain.preflight.check import Check, run_checks
from elastictrain.preflight.devices.checks import Devices, device_checks
from elastictrain.preflight.devices.once import Once
from elastictrain.preflight.host.checks import HostOptions, host_checks
from elastictrain.preflight.policy import Level, apply_modes, wanted_checks
from elastictrain.preflight.surroundings import Surroundings
from elastictrain.preflight.transport.facts import read_facts
from elastictrain.preflight.transport.judge_infiniband import judge_infiniband
from elastictrain.preflight.transport.judge_interface import judge_interface
from elastictrain.preflight.verdict import Verdict

_TRANSPORT_LIMIT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnChecks:
    """What is asked of this host."""

    level: Level
    modes: Mapping[str, str] = field(default_factory=dict)
    """By check: fail, warn or off."""

    options: HostOptions = field(default_factory=HostOptions)
    local_world_size: int = 1


def check_host(
    surroundings: Surroundings, asked: OwnChecks, *, interfaces: Sequence[str] = (), more: Sequence[Check] = ()
) -> list[Verdict]:
    """All checks of this host by itself, and `more`, side by side; never raises. `interfaces` are those that are to be used."""
    devices = Devices(surroundings)
    checks = [
        *host_checks(surroundings, asked.options),
        *device_checks(
            devices,
            local_world_size=asked.local_world_size,
            last_counters=counters_path(surroundings),
            interfaces=tuple(interfaces),
        ),
        *more,
    ]
    names = wanted_checks((check.name for check in checks), asked.modes)
    chosen = [check for check in checks if check.name in names and (check.quick or asked.level is Level.FULL)]
    return apply_modes(run_checks(chosen, subject=surroundings.host), asked.modes)


def transport_checks(surroundings: Surroundings) -> list[Check]:
    """Of a host that knows nothing of others: how it would choose its interfaces, and what is wrong with its ports."""
    facts = Once(lambda: read_facts(surroundings, rendezvous=None, peers={}, alone=True))
    return [
        Check("interface", lambda: judge_interface(facts()), _TRANSPORT_LIMIT_S),
        Check("infiniband", lambda: judge_infiniband(facts()), _TRANSPORT_LIMIT_S),
    ]


def counters_path(surroundings: Surroundings) -> Path:
    """Where this host keeps its counters between preflights; home folders may be shared by hosts, so it bears the name."""
    home = surroundings.environment.get("HOME") or str(Path.home())
    state = surroundings.environment.get("XDG_STATE_HOME") or f"{home}/.local/state"
    return Path(state) / "elastictrain" / f"counters-{surroundings.host}-{os.getuid()}.json"
