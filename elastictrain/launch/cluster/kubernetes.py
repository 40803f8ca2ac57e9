"""A pod of Kubernetes: a PyTorchJob, a TrainJob, a JobSet or an Indexed Job.

Source: the variables that Kubeflow's training operator 1.5 to 1.9 and trainer 2 set; the Kubernetes page about Indexed Jobs.
"""

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass

from elastictrain.launch.cluster.gpus import count
from elastictrain.launch.cluster.pets import Pets, other_host, read_pets
from elastictrain.launch.cluster.place import Kind, Place
from elastictrain.launch.cluster.variables import Variables

EVIDENCE = "KUBERNETES_SERVICE_HOST"
"""Kubernetes sets it in every container."""


@dataclass(frozen=True, slots=True)
class _Order:
    number: int
    """-1 if nothing tells."""

    source: str
    """The variable that told."""


def is_kubernetes(environment: Mapping[str, str]) -> bool:
    """Whether this is a container of a pod."""
    return EVIDENCE in environment


def read_kubernetes(environment: Mapping[str, str]) -> Place:
    """The place of a pod. Raises: ConfigError with every variable that is wrong."""
    variables = Variables(environment)
    place = pod_place(variables, kind="kubernetes", name="Kubernetes")
    variables.check()
    return place


def pod_place(variables: Variables, *, kind: Kind, name: str) -> Place:
    """The place of a pod; problems are left in `variables`."""
    pets = read_pets(variables)
    num_hosts, source = _num_hosts(variables, pets)
    order = _order(variables, pets)
    if 0 < num_hosts <= order.number and order.source != "PET_NODE_RANK":
        message = f"must be < {num_hosts}, the hosts of {source}, in the environment, but is {order.number}"
        variables.refuse(order.source, message)
    conclusions = [f"{name} ({EVIDENCE})", *pets.conclusions]
    if num_hosts and not pets.num_hosts:
        conclusions.append(f"{count(num_hosts, 'host')} ({source}={num_hosts}, which counts pods)")
    if order.number >= 0 and order.source != "PET_NODE_RANK":
        conclusions.append(f"this is host {order.number} ({variables.show(order.source)}), counted from 0")
    address = _address(variables)
    if address:
        conclusions.append(f"the others reach it at {address} (POD_IP)")
    return Place(
        kind,
        order=order.number,
        num_hosts=num_hosts,
        processes=pets.processes,
        address=address,
        peers=_peers(variables, pets, order),
        conclusions=tuple(conclusions),
        warnings=pets.warnings,
    )


def _num_hosts(variables: Variables, pets: Pets) -> tuple[int, str]:
    """Hosts that are promised, and the variable that said so."""
    # The operator up to 1.6 counts pods in WORLD_SIZE; later ones multiply them by PET_NPROC_PER_NODE, and set PET_NNODES.
    world_size = variables.whole("WORLD_SIZE", least=1)
    if not pets.num_hosts:
        return (world_size or 0), "WORLD_SIZE"
    fixed = pets.least_hosts == pets.num_hosts
    allowed = {pets.num_hosts, pets.num_hosts * max(1, pets.processes)}
    if fixed and world_size is not None and world_size not in allowed:
        message = f"must be {' or '.join(map(str, sorted(allowed)))}, which {_sources(variables)} ask for, but is {world_size}"
        variables.refuse("WORLD_SIZE", message)
    return pets.num_hosts, "PET_NNODES"


def _sources(variables: Variables) -> str:
    names = ("PET_NNODES", "PET_NPROC_PER_NODE")
    return " and ".join(variables.show(name) for name in names if variables.first(name))


def _order(variables: Variables, pets: Pets) -> _Order:
    # RANK numbers the pods: the operator knows nothing of the processes in them.
    rank = variables.whole("RANK")
    if pets.order >= 0:
        if rank is not None and rank != pets.order:
            message = f"must be {pets.order}, the pod's number in PET_NODE_RANK, in the environment, but is {rank}"
            variables.refuse("RANK", message)
        return _Order(pets.order, "PET_NODE_RANK")
    if variables.first("PET_NODE_RANK"):
        return _Order(-1, "")
    if variables.first("RANK"):
        return _Order(-1 if rank is None else rank, "RANK")
    index = variables.whole("JOB_COMPLETION_INDEX")
    return _Order(-1, "") if index is None else _Order(index, "JOB_COMPLETION_INDEX")


def _address(variables: Variables) -> str:
    text = variables.text("POD_IP")
    if variables.first("POD_IP"):
        try:
            ipaddress.ip_address(text)
        except ValueError:
            variables.refuse("POD_IP", f"must be the pod's IP address in the environment, but is {text!r}")
    return text


def _peers(variables: Variables, pets: Pets, order: _Order) -> tuple[str, ...]:
    master = pets.master or other_host(variables.text("MASTER_ADDR"))
    return (master,) if master and order.number != 0 else ()
