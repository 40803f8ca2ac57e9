"""Hosts that nobody schedules: one alone, or a list that a person wrote."""

from collections.abc import Mapping, Sequence

from elastictrain.launch.cluster.gpus import count
from elastictrain.launch.cluster.place import ClusterPlace, Probes
from elastictrain.launch.cluster.torchrun_env import read_torchrun_environment
from elastictrain.launch.cluster.variables import Variables

HOSTS_KEY = "launch.hosts"


def read_plain(environment: Mapping[str, str], *, probes: Probes, hosts: Sequence[str] = ()) -> ClusterPlace:
    """The place of a host without a cluster.

    Raises: ConfigError if this host is not in the list, or the list names one twice; and for variables that are wrong.
    """
    variables = Variables(environment)
    if hosts:
        place = _listed(variables, hosts=tuple(hosts), names=probes.names)
    else:
        torchrun_env = read_torchrun_environment(variables)
        conclusions = torchrun_env.conclusions or (
            f"no cluster and no list of hosts (`{HOSTS_KEY}`): others are taken in as they come",
        )
        place = ClusterPlace(
            "plain",
            order=torchrun_env.order,
            num_hosts=torchrun_env.num_hosts,
            processes=torchrun_env.processes,
            peers=(torchrun_env.master,) if torchrun_env.master else (),
            conclusions=conclusions,
            warnings=torchrun_env.warnings,
        )
    variables.check()
    return place


def _listed(variables: Variables, *, hosts: tuple[str, ...], names: tuple[str, ...]) -> ClusterPlace:
    twice = sorted({host for host in hosts if hosts.count(host) > 1})
    if twice or "" in hosts:
        variables.refuse(HOSTS_KEY, f"must name each host once, but is {list(hosts)!r}")
    own = [number for number, host in enumerate(hosts) if host in names]
    if names and not own:
        message = f"must name this host (one of {', '.join(names)}), but is {list(hosts)!r}"
        variables.refuse(HOSTS_KEY, message)
    order = own[0] if own else -1
    conclusions = [f"{count(len(hosts), 'host')} (`{HOSTS_KEY}`)"]
    if own:
        conclusions.append(f"this is host {order} ({hosts[order]}), counted from 0")
    return ClusterPlace(
        "plain",
        order=order,
        num_hosts=len(hosts),
        peers=tuple(host for number, host in enumerate(hosts) if number not in own),
        conclusions=tuple(conclusions),
    )
