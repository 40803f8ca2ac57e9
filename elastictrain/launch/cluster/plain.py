"""Hosts that nobody schedules: one alone, or a list that a person wrote."""

from collections.abc import Mapping, Sequence

from elastictrain.launch.cluster.gpus import count
from elastictrain.launch.cluster.pets import read_pets
from elastictrain.launch.cluster.place import Place, Probes
from elastictrain.launch.cluster.variables import Variables

HOSTS_KEY = "launch.hosts"


def read_plain(environment: Mapping[str, str], *, probes: Probes, hosts: Sequence[str] = ()) -> Place:
    """The place of a host without a cluster.

    Raises: ConfigError if this host is not in the list, or the list names one twice; and for variables that are wrong.
    """
    variables = Variables(environment)
    if hosts:
        place = _listed(variables, hosts=tuple(hosts), names=probes.names)
    else:
        pets = read_pets(variables)
        conclusions = pets.conclusions or (
            f"no cluster and no list of hosts (`{HOSTS_KEY}`): others are taken in as they come",
        )
        place = Place(
            "plain",
            order=pets.order,
            num_hosts=pets.num_hosts,
            processes=pets.processes,
            peers=(pets.master,) if pets.master else (),
            conclusions=conclusions,
            warnings=pets.warnings,
        )
    variables.check()
    return place


def _listed(variables: Variables, *, hosts: tuple[str, ...], names: tuple[str, ...]) -> Place:
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
    return Place(
        "plain",
        order=order,
        num_hosts=len(hosts),
        peers=tuple(host for number, host in enumerate(hosts) if number not in own),
        conclusions=tuple(conclusions),
    )
