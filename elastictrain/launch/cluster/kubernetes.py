"""A pod of Kubernetes: a PyTorchJob, a TrainJob, a JobSet or an Indexed Job.

Source: the variables that Kubeflow's training operator 1.5 to 1.9 and trainer 2 set; the Kubernetes page about Indexed Jobs.
"""

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from elastictrain.launch.cluster.gpus import count
from elastictrain.launch.cluster.place import ClusterPlace, Kind
from elastictrain.launch.cluster.torchrun_env import TorchrunEnvironment, other_host, read_torchrun_environment
from elastictrain.launch.cluster.variables import Variables

EVIDENCE = "KUBERNETES_SERVICE_HOST"
"""Kubernetes sets it in every container."""


@dataclass(frozen=True, slots=True)
class _Counted:
    """The hosts of the job, and the workers of each; 0 if nothing tells."""

    hosts: int
    source: str
    """The variable that told the hosts."""

    processes: int
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _PodOrder:
    number: int
    """-1 if nothing tells."""

    source: str
    """The variable that told."""


def is_kubernetes(environment: Mapping[str, str]) -> bool:
    """Whether this is a container of a pod."""
    return EVIDENCE in environment


def read_kubernetes(environment: Mapping[str, str]) -> ClusterPlace:
    """The place of a pod. Raises: ConfigError with every variable that is wrong."""
    variables = Variables(environment)
    place = pod_place(variables, kind="kubernetes", name="Kubernetes")
    variables.check()
    return place


def pod_place(variables: Variables, *, kind: Kind, name: str, gpus: int = 0, gpus_from: str = "") -> ClusterPlace:
    """The place of a pod; problems are left in `variables`. `gpus` of each pod, from the variable `gpus_from`; 0 if unknown."""
    torchrun_env = read_torchrun_environment(variables)
    counted = _count_hosts(variables, torchrun_env, gpus=gpus, gpus_from=gpus_from)
    num_hosts, source = counted.hosts, counted.source
    order = _order(variables, torchrun_env)
    if 0 < num_hosts <= order.number and order.source != "PET_NODE_RANK":
        message = f"must be < {num_hosts}, the hosts of {source}, in the environment, but is {order.number}"
        variables.refuse(order.source, message)
    conclusions = [f"{name} ({EVIDENCE})", *torchrun_env.conclusions]
    if num_hosts and not torchrun_env.num_hosts:
        conclusions.append(f"{count(num_hosts, 'host')} ({source}={num_hosts}, which counts pods)")
    if order.number >= 0 and order.source != "PET_NODE_RANK":
        conclusions.append(f"this is host {order.number} ({variables.show(order.source)}), counted from 0")
    if counted.processes and not torchrun_env.processes:
        conclusions.append(f"{count(counted.processes, 'worker')} (WORLD_SIZE={counted.processes * num_hosts} on all hosts)")
    address = _address(variables)
    if address:
        conclusions.append(f"the others reach it at {address} (POD_IP)")
    return ClusterPlace(
        kind,
        order=order.number,
        num_hosts=num_hosts,
        processes=counted.processes,
        address=address,
        peers=_peers(variables, torchrun_env, order),
        conclusions=tuple(conclusions),
        warnings=(*torchrun_env.warnings, *counted.warnings),
    )


def _count_hosts(variables: Variables, torchrun_env: TorchrunEnvironment, *, gpus: int, gpus_from: str) -> _Counted:
    """Reconciles WORLD_SIZE with PET_NNODES.

    WORLD_SIZE counts pods under Kubeflow's operator up to 1.6. Later operators multiply them by PET_NPROC_PER_NODE, and RunAI
    by the GPUs of a pod.
    """
    world_size = variables.whole("WORLD_SIZE", least=1)
    per_host = [number for number in (torchrun_env.processes, gpus) if number]
    if not torchrun_env.num_hosts:
        return _Counted(world_size or 0, "WORLD_SIZE", torchrun_env.processes, _doubts(world_size, per_host))
    known = _Counted(torchrun_env.num_hosts, "PET_NNODES", torchrun_env.processes)
    if torchrun_env.least_hosts != torchrun_env.num_hosts or world_size is None:
        return known
    allowed = sorted({torchrun_env.num_hosts, *(torchrun_env.num_hosts * number for number in per_host)})
    if world_size in allowed:
        return known
    if per_host or world_size % torchrun_env.num_hosts:
        names = [name for name in ("PET_NNODES", "PET_NPROC_PER_NODE", gpus_from) if name and variables.first(name)]
        wanted = " or ".join(map(str, allowed)) if per_host else f"a multiple of {torchrun_env.num_hosts}"
        reasons = ", ".join(map(variables.show, names))
        variables.refuse("WORLD_SIZE", f"must be {wanted} ({reasons}) in the environment, but is {world_size}")
        return known
    follows_gpus = bool(variables.first("PET_NPROC_PER_NODE"))
    return known if follows_gpus else replace(known, processes=world_size // torchrun_env.num_hosts)


def _doubts(world_size: int | None, per_host: Sequence[int]) -> tuple[str, ...]:
    """A WORLD_SIZE that could count workers, where nothing else counts the pods."""
    workers = max(per_host, default=1)
    if not world_size or workers == 1 or world_size % workers:
        return ()
    pods = world_size // workers
    doubt = f"if it counts the workers of {count(pods, 'pod')} with {workers} each, set PET_NNODES={pods}"
    return (f"WORLD_SIZE={world_size} is taken as a number of pods; {doubt}",)


def _order(variables: Variables, torchrun_env: TorchrunEnvironment) -> _PodOrder:
    # RANK numbers the pods: the operator knows nothing of the processes in them.
    rank = variables.whole("RANK")
    if torchrun_env.order >= 0:
        if rank is not None and rank != torchrun_env.order:
            message = f"must be {torchrun_env.order}, the pod's number in PET_NODE_RANK, in the environment, but is {rank}"
            variables.refuse("RANK", message)
        return _PodOrder(torchrun_env.order, "PET_NODE_RANK")
    if variables.first("PET_NODE_RANK"):
        return _PodOrder(-1, "")
    if variables.first("RANK"):
        return _PodOrder(-1 if rank is None else rank, "RANK")
    index = variables.whole("JOB_COMPLETION_INDEX")
    return _PodOrder(-1, "") if index is None else _PodOrder(index, "JOB_COMPLETION_INDEX")


def _address(variables: Variables) -> str:
    text = variables.text("POD_IP")
    if variables.first("POD_IP"):
        try:
            ipaddress.ip_address(text)
        except ValueError:
            variables.refuse("POD_IP", f"must be the pod's IP address in the environment, but is {text!r}")
    return text


def _peers(variables: Variables, torchrun_env: TorchrunEnvironment, order: _PodOrder) -> tuple[str, ...]:
    master = torchrun_env.master or other_host(variables.text("MASTER_ADDR"))
    return (master,) if master and order.number != 0 else ()
