"""What a host can be asked without any other: its own checks, and the ones of its devices and interfaces."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from elastictrain.distributed.bounded import within
from elastictrain.preflight.check import Check, Once, run_checks
from elastictrain.preflight.devices.checks import LocalDevices, device_checks
from elastictrain.preflight.host.checks import HostOptions, host_checks
from elastictrain.preflight.policy import Level, apply_modes, wanted_checks
from elastictrain.preflight.surroundings import Surroundings
from elastictrain.preflight.transport.facts import read_facts
from elastictrain.preflight.transport.infiniband import Rdma, kinds_here, read_devices
from elastictrain.preflight.transport.judge_infiniband import judge_infiniband
from elastictrain.preflight.transport.judge_interface import judge_interface
from elastictrain.preflight.transport.settings import read_settings
from elastictrain.preflight.verdict import Verdict

_TRANSPORT_LIMIT_S = 5.0
_RDMA_LIMIT_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnChecks:
    """What is asked of this host."""

    level: Level
    modes: Mapping[str, str] = field(default_factory=dict)
    """By check: fail, warn or off."""

    options: HostOptions = field(default_factory=HostOptions)
    local_world_size: int = 1


def check_host(surroundings: Surroundings, asked: OwnChecks, *, more: Sequence[Check] = ()) -> list[Verdict]:
    """All checks of this host by itself, and `more`, side by side; never raises."""
    devices = LocalDevices(surroundings)
    # A person's settings may lie in a home folder whose server is dead.
    uses_rdma = within(_RDMA_LIMIT_S, lambda: _uses_rdma(surroundings)) or False
    checks = [
        *host_checks(surroundings, replace(asked.options, rdma=uses_rdma)),
        *device_checks(
            devices,
            local_world_size=asked.local_world_size,
            last_counters=counters_path(surroundings),
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
    """Where this host keeps the counters of its ports between preflights. Never raises."""
    # Home folders may be shared by hosts and the one for temporary files by users, so the name bears both.
    environment = surroundings.environment
    name = f"counters-{surroundings.host}-{os.getuid()}.json"
    if environment.get("XDG_STATE_HOME"):
        return Path(environment["XDG_STATE_HOME"]) / "elastictrain" / name
    try:
        home = Path(environment.get("HOME") or Path.home())
    except RuntimeError:
        # Containers may run as a user whom nobody has entered anywhere.
        return Path(environment.get("TMPDIR") or "/tmp") / f"elastictrain-{name}"  # noqa: S108
    return home / ".local" / "state" / "elastictrain" / name


def _uses_rdma(surroundings: Surroundings) -> bool:
    kinds = kinds_here(read_devices(surroundings), settings=read_settings(surroundings))
    return bool(kinds - {Rdma.NONE, Rdma.UNKNOWN})
