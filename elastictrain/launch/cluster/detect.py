"""Decides which cluster a launcher runs on, where several have left variables; and reads lists of hosts without a cluster.

Source, for an instance of Vast.ai, which is a container, alone or on an overlay network with others: docs.vast.ai, "Docker
Environment" and "Multi-Node training using Torch + NCCL".
"""

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from elastictrain.errors import ConfigError, Problem
from elastictrain.launch.cluster.place import ClusterPlace, EnvironmentReader, as_ip, count
from elastictrain.launch.cluster.pods import is_kubernetes, is_runai, read_kubernetes, read_runai, read_torchrun_environment
from elastictrain.launch.cluster.slurm import is_slurm, read_slurm

_HOSTS_KEY = "launch.hosts"
_PODS = ("PET_NNODES", "PET_NODE_RANK", "PET_NPROC_PER_NODE")
_RANKS: tuple[str, ...] = ("RANK", "WORLD_SIZE")
_DOCKER = ipaddress.ip_network("172.16.0.0/12")  # Docker's range for bridges to the public network


def detect(
    environment: Mapping[str, str],
    *,
    hosts: Sequence[str] = (),
    names: Sequence[str] = (),
    interfaces: Mapping[str, Sequence[str]] = MappingProxyType({}),
    default_interface: str = "",
) -> ClusterPlace:
    """Return where this launcher runs. `hosts` is a person's list; it overrides every environment.

    The other arguments are not in any environment, and are unknown if left out: the host's own names and addresses, the
    addresses of each interface, and the interface of the default route, through which the kernel reaches the public network.

    Slurm comes before Kubernetes, because it can run inside of it and numbers its own hosts; RunAI before Kubernetes, on which
    it is built; Kubernetes before Vast.

    Raises: ConfigError with every variable that is wrong or contradicts another; also if torchrun started this process.
    """
    _refuse_torchrun(environment)
    clusters = {
        "Slurm": is_slurm(environment),
        "RunAI": is_runai(environment),
        "Kubernetes": is_kubernetes(environment) and not is_runai(environment),
        "Vast": "VAST_CONTAINERLABEL" in environment or any(name.startswith("VAST_TCP_PORT_") for name in environment),
    }
    found = [name for name, is_there in clusters.items() if is_there]
    reader = EnvironmentReader(environment)
    not_read, why = _RANKS, "outside of Kubernetes they do not number hosts"
    if hosts:
        place, not_read = _read_list(reader, hosts=tuple(hosts), names=names), ()
        reader.warnings += [f"`{_HOSTS_KEY}` is given, so that {name} is not asked" for name in found]
    elif "Slurm" in found:
        place = read_slurm(reader)
        not_read, why = (*_PODS, *_RANKS), "Slurm says where this host is"
    elif "RunAI" in found:
        place, not_read = read_runai(reader), ()
    elif "Kubernetes" in found:
        place, not_read = read_kubernetes(reader), ()
    elif "Vast" in found:
        place = _read_vast(reader, _choose_overlay(interfaces, default_interface, asked=reader.text("NCCL_SOCKET_IFNAME")))
    else:
        place = read_torchrun_environment(reader)
        if not reader.conclusions:
            reader.conclusions.append(f"no cluster and no list of hosts (`{_HOSTS_KEY}`): others are taken in as they come")
    if aside := [name for name in not_read if name in environment]:
        reader.warnings.append(f"{', '.join(aside)} of the environment are left aside: {why}")
    return reader.check(place)


def _refuse_torchrun(environment: Mapping[str, str]) -> None:
    """Otherwise each worker would start a launcher.
    RunAI sets LOCAL_RANK=0 in each pod beside a RANK that numbers pods: such a process is a host, not a worker."""
    in_pod = is_kubernetes(environment) or is_runai(environment)
    by_torchrun = "TORCHELASTIC_RUN_ID" in environment
    by_another = all(name in environment for name in ("LOCAL_RANK", *_RANKS))
    if by_torchrun or (by_another and not (in_pod and environment["LOCAL_RANK"] == "0")):
        name = "TORCHELASTIC_RUN_ID" if by_torchrun else "LOCAL_RANK"
        message = (
            f"must not be set where the launcher starts, but is {environment[name]!r}: it starts workers itself; use"
            " `python -m elastictrain.launch ...` once per host, or `torchrun ... -m elastictrain.run ...`"
        )
        raise ConfigError([Problem(name, message)])


def _read_list(reader: EnvironmentReader, *, hosts: tuple[str, ...], names: Sequence[str]) -> ClusterPlace:
    """Hosts that a person listed. A list without this host or with a repeated host is a problem."""
    if len(set(hosts)) < len(hosts) or "" in hosts:
        reader.refuse(_HOSTS_KEY, f"must name each host once, but is {list(hosts)!r}")
    own = [number for number, host in enumerate(hosts) if host in names]
    if names and not own:
        reader.refuse(_HOSTS_KEY, f"must name this host (one of {', '.join(names)}), but is {list(hosts)!r}")
    reader.conclusions.append(f"{count(len(hosts), 'host')} (`{_HOSTS_KEY}`)")
    if own:
        reader.conclusions.append(f"this is host {own[0]} ({hosts[own[0]]}), counted from 0")
    peers = tuple(host for number, host in enumerate(hosts) if number not in own)
    return ClusterPlace("plain", order=own[0] if own else -1, num_hosts=len(hosts), peers=peers)


def _read_vast(reader: EnvironmentReader, overlay: tuple[str, str] | None) -> ClusterPlace:
    """`overlay`: the instance's interface to other instances, and its address there."""
    label = reader.show("VAST_CONTAINERLABEL", "CONTAINER_ID")
    reader.conclusions.append(f"Vast ({label or 'VAST_TCP_PORT_*'})")
    torchrun_env = read_torchrun_environment(reader)
    gpus = reader.whole("GPU_COUNT") or 0
    processes = torchrun_env.processes
    if gpus and not processes:
        processes = reader.workers_for(gpus, source=f"GPU_COUNT={gpus}")
    if overlay is not None:
        reader.conclusions.append(f"the others reach it at {overlay[1]} on the overlay network ({overlay[0]})")
    else:
        reader.conclusions.append("no overlay network: other instances cannot reach this one")
    if overlay is None and torchrun_env.num_hosts > 1:
        reader.warnings.append(
            f"{count(torchrun_env.num_hosts, 'host')} are to meet, but this instance is on no overlay network; create all of "
            'them with `--env "-n OVERLAY"` (docs/clusters.md)'
        )
    return replace(
        torchrun_env,
        kind="vast",
        # Without an overlay no other host can join; but a numbered instance is not alone.
        num_hosts=torchrun_env.num_hosts or (0 if overlay or torchrun_env.order >= 0 else 1),
        processes=processes,
        address=overlay[1] if overlay else "",
        job=reader.text("CONTAINER_ID", "VAST_CONTAINERLABEL"),
    )


def _choose_overlay(interfaces: Mapping[str, Sequence[str]], default_interface: str, *, asked: str) -> tuple[str, str] | None:
    """Name and IPv4 address of the overlay network's interface; None if there is none. A given name (`asked`) is preferred.

    An instance has a bridge to the public network and, on an overlay, an interface to that: eth0 if it was created with it,
    a later one if it joined afterwards. The default route never goes through the overlay.
    """
    reachable = {name: next(filter(_is_reachable, addresses), "") for name, addresses in interfaces.items()}
    found = [(name, address) for name, address in reachable.items() if address]
    for name, address in found:
        if name == asked.removeprefix("="):
            return name, address
    beside = [one for one in found if one[0] != default_interface]
    outside = [one for one in beside if ipaddress.ip_address(one[1]) not in _DOCKER]
    # If the default route is known, another interface counts even within Docker's range: a person may have chosen that.
    candidates = outside or (beside if default_interface else [])
    return candidates[0] if candidates else None


def _is_reachable(text: str) -> bool:
    address = as_ip(text)
    return address is not None and address.version == 4 and not (address.is_loopback or address.is_link_local)
