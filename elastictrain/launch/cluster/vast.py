"""An instance of Vast.ai: a container, alone or on an overlay network with others.

Source: docs.vast.ai, "Docker Environment" and "Multi-Node training using Torch + NCCL".
"""

import ipaddress
from collections.abc import Mapping, Sequence

from elastictrain.launch.cluster.gpus import count, workers_for
from elastictrain.launch.cluster.place import ClusterPlace, Probes
from elastictrain.launch.cluster.torchrun_env import read_torchrun_environment
from elastictrain.launch.cluster.variables import Variables

_DOCKER = ipaddress.ip_network("172.16.0.0/12")
"""Docker's own range for the bridges through which a container reaches the public network."""


def is_vast(environment: Mapping[str, str]) -> bool:
    """Whether this is an instance of Vast."""
    return "VAST_CONTAINERLABEL" in environment or any(name.startswith("VAST_TCP_PORT_") for name in environment)


def read_vast(environment: Mapping[str, str], *, probes: Probes) -> ClusterPlace:
    """The place of an instance. Raises: ConfigError with every variable that is wrong."""
    variables = Variables(environment)
    torchrun_env = read_torchrun_environment(variables)
    gpus = variables.whole("GPU_COUNT") or 0
    overlay = choose_overlay(probes, asked=environment.get("NCCL_SOCKET_IFNAME", ""))
    variables.check()
    label = variables.first("VAST_CONTAINERLABEL", "CONTAINER_ID")
    conclusions = [f"Vast ({variables.show(label) if label else 'VAST_TCP_PORT_*'})", *torchrun_env.conclusions]
    processes = torchrun_env.processes
    if gpus and not processes:
        processes, sentence = workers_for(gpus, source=f"GPU_COUNT={gpus}", environment=environment)
        conclusions.append(sentence)
    if overlay is not None:
        conclusions.append(f"the others reach it at {overlay[1]} on the overlay network ({overlay[0]})")
    else:
        conclusions.append("no overlay network: other instances cannot reach this one")
    warnings = list(torchrun_env.warnings)
    if overlay is None and torchrun_env.num_hosts > 1:
        warnings.append(
            f"{count(torchrun_env.num_hosts, 'host')} are to meet, but this instance is on no overlay network; create all of "
            'them with `--env "-n OVERLAY"` (vastai create overlay)'
        )
    return ClusterPlace(
        "vast",
        order=torchrun_env.order,
        # Without an overlay nobody else can come; but who is numbered is not alone.
        num_hosts=torchrun_env.num_hosts or (0 if overlay or torchrun_env.order >= 0 else 1),
        processes=processes,
        address=overlay[1] if overlay else "",
        peers=(torchrun_env.master,) if torchrun_env.master else (),
        job=variables.text("CONTAINER_ID", "VAST_CONTAINERLABEL"),
        conclusions=tuple(conclusions),
        warnings=tuple(warnings),
    )


def choose_overlay(probes: Probes, *, asked: str) -> tuple[str, str] | None:
    """Name and IPv4 address of the interface of the overlay network; None if there is none. `asked` names one beforehand.

    An instance has a bridge to the public network and, if it joined an overlay, an interface to that: eth0 where it was created
    with it, a later one where it joined afterwards. The default route is never through the overlay.
    """
    found = [(interface.name, address) for interface in probes.interfaces for address in _reachable(interface.addresses)]
    for name, address in found:
        if name == asked.removeprefix("="):
            return name, address
    beside = [one for one in found if one[0] != probes.default_interface]
    outside = [one for one in beside if ipaddress.ip_address(one[1]) not in _DOCKER]
    # Where the default route is known, what is beside it counts even within Docker's range: a person may have chosen that.
    candidates = outside or (beside if probes.default_interface else [])
    return candidates[0] if candidates else None


def _reachable(addresses: Sequence[str]) -> list[str]:
    """The first IPv4 address that others may reach, if there is one."""
    for text in addresses:
        try:
            address = ipaddress.ip_address(text)
        except ValueError:
            continue
        if address.version == 4 and not address.is_loopback and not address.is_link_local:
            return [text]
    return []
