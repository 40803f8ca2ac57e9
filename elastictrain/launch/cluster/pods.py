"""A pod of Kubernetes (PyTorchJob, TrainJob, JobSet, Indexed Job) or RunAI; and torchrun's own variables.

Source: the arguments of torch.distributed.run; the variables that Kubeflow's training operator 1.5 to 1.9 and trainer 2 set;
the Kubernetes page about Indexed Jobs; NVIDIA Run:ai, "Environment Variables inside a Run:ai Workload"; the binder of
KAI-Scheduler, for parts of a GPU.
"""

import re
from collections.abc import Mapping
from dataclasses import replace

from elastictrain.launch.cluster.place import ClusterPlace, EnvironmentReader, as_ip, as_whole, count

EVIDENCE = "KUBERNETES_SERVICE_HOST"  # Kubernetes sets it in every container
_RUNAI_GPUS = "RUNAI_NUM_OF_GPUS"
_NNODES = re.compile(r"([0-9]{1,9})(?::([0-9]{1,9}))?")
_DECIMAL = re.compile(r"[0-9]{1,6}(?:\.[0-9]{1,9})?")
_THIS_HOST = ("localhost", "127.0.0.1", "::1")


def read_torchrun_environment(reader: EnvironmentReader) -> ClusterPlace:
    """Read torchrun's own `PET_*` variables. Conclusions and problems go to `reader`.
    Of a range of hosts the largest number counts. The peer is torchrun's master, unless that is this host."""
    least, most = _range_of_hosts(reader)
    if most:
        hosts = count(most, "host") if least == most else f"{least} to {most} hosts"
        reader.conclusions.append(f"{hosts} ({reader.show('PET_NNODES')})")
    if 1 < least < most:
        reader.warnings.append(
            f"PET_NNODES asks for at least {least} hosts: say `launch.min_hosts={least}`, or fewer will train, too"
        )
    order = reader.whole("PET_NODE_RANK")
    if order is not None and most and order >= most:
        reader.require("PET_NODE_RANK", f"< {most}, the hosts of PET_NNODES,")
    if order is not None:
        reader.conclusions.append(f"this is host {order} (PET_NODE_RANK={order}), counted from 0")
    processes = 0
    if reader.first("PET_NPROC_PER_NODE") and (text := reader.text("PET_NPROC_PER_NODE")) not in ("auto", "gpu"):
        processes = as_whole(text) or 0
        if not processes:
            reader.require("PET_NPROC_PER_NODE", "a whole number >= 1, `auto` or `gpu`")
        else:
            reader.conclusions.append(f"{count(processes, 'worker')} ({reader.show('PET_NPROC_PER_NODE')})")
    master = reader.text("PET_MASTER_ADDR")
    if not master:
        host, colon, _ = reader.text("PET_RDZV_ENDPOINT").rpartition(":")
        master = host.strip("[]") if colon else reader.text("PET_RDZV_ENDPOINT")
    return ClusterPlace(
        "plain",
        order=-1 if order is None else order,
        num_hosts=most,
        processes=processes,
        peers=() if order == 0 else _other_hosts(master),
    )


def _range_of_hosts(reader: EnvironmentReader) -> tuple[int, int]:
    if not reader.first("PET_NNODES"):
        return 0, 0
    match = _NNODES.fullmatch(reader.text("PET_NNODES"))
    least, most = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= least <= most:
        reader.require("PET_NNODES", "a number of hosts >= 1, or a range like 1:4,")
        return 0, 0
    return least, most


def _other_hosts(name: str) -> tuple[str, ...]:
    return () if name in ("", *_THIS_HOST) else (name,)


def is_kubernetes(environment: Mapping[str, str]) -> bool:
    return EVIDENCE in environment


def is_runai(environment: Mapping[str, str]) -> bool:
    by_runai = any(name.startswith("RUNAI_") for name in environment)
    return _RUNAI_GPUS in environment or (is_kubernetes(environment) and by_runai)


def read_runai(reader: EnvironmentReader) -> ClusterPlace:
    """As `read_kubernetes`; where no variable counts workers, one for each GPU of the pod. Problems go to `reader`."""
    given = 0.0  # GPUs of this pod, or a fraction of one; 0 if unknown
    if reader.first(_RUNAI_GPUS):
        text = reader.text(_RUNAI_GPUS)
        given = float(text) if _DECIMAL.fullmatch(text) else 0.0
        if given <= 0 or (given > 1 and given != int(given)):
            given, hint = 0.0, f"request GPUs for the workload, or start with `env -u {_RUNAI_GPUS}` to train without"
            reader.require(_RUNAI_GPUS, "a whole number of GPUs >= 1, or a part of one,", hint=hint)
    gpus = max(1, int(given)) if given else 0
    place = read_kubernetes(reader, name="RunAI", gpus=gpus)
    processes, source = place.processes, reader.show(_RUNAI_GPUS)
    if gpus and processes > gpus:
        reader.require("PET_NPROC_PER_NODE", f"<= {gpus}, the GPUs of {_RUNAI_GPUS},")
    elif 0 < given < 1 and not processes:
        processes = 1
        reader.conclusions.append(f"1 worker with a part of a GPU ({source})")
    elif gpus and not processes:
        processes = reader.workers_for(gpus, source=source)
    job = reader.text("RUNAI_JOB_NAME", "JOB_NAME")
    return replace(place, kind="runai", processes=processes, job=job)


def read_kubernetes(reader: EnvironmentReader, *, name: str = "Kubernetes", gpus: int = 0) -> ClusterPlace:
    """`gpus`: of each pod, from RunAI; 0 if unknown."""
    reader.conclusions.append(f"{name} ({EVIDENCE})")
    torchrun_env = read_torchrun_environment(reader)
    num_hosts, processes = _count_hosts(reader, torchrun_env, gpus=gpus)
    order, source = _order(reader, torchrun_env)
    if num_hosts and not torchrun_env.num_hosts:
        reader.conclusions.append(f"{count(num_hosts, 'host')} (WORLD_SIZE={num_hosts}, which counts pods)")
    if order >= 0 and source != "PET_NODE_RANK":
        reader.conclusions.append(f"this is host {order} ({reader.show(source)}), counted from 0")
        if 0 < num_hosts <= order:
            counted_by = "PET_NNODES" if torchrun_env.num_hosts else "WORLD_SIZE"
            reader.require(source, f"< {num_hosts}, the hosts of {counted_by},")
    if processes and not torchrun_env.processes:
        reader.conclusions.append(f"{count(processes, 'worker')} (WORLD_SIZE={processes * num_hosts} on all hosts)")
    address = reader.text("POD_IP")
    if reader.first("POD_IP"):
        if as_ip(address) is None:
            reader.require("POD_IP", "the pod's IP address")
        reader.conclusions.append(f"the others reach it at {address} (POD_IP)")
    peers = torchrun_env.peers or _other_hosts(reader.text("MASTER_ADDR"))
    return replace(
        torchrun_env,
        kind="kubernetes",
        order=order,
        num_hosts=num_hosts,
        processes=processes,
        address=address,
        peers=() if order == 0 else peers,
    )


def _count_hosts(reader: EnvironmentReader, torchrun_env: ClusterPlace, *, gpus: int) -> tuple[int, int]:
    """Number of hosts, and workers per host; 0 if unknown. Reconciles WORLD_SIZE with PET_NNODES. WORLD_SIZE counts pods under
    Kubeflow's operator up to 1.6. Later operators multiply them by PET_NPROC_PER_NODE, and RunAI by the GPUs of a pod."""
    world_size = reader.whole("WORLD_SIZE", least=1)
    num_hosts, processes = torchrun_env.num_hosts, torchrun_env.processes
    per_host = [number for number in (processes, gpus) if number]
    workers = max(per_host, default=1)
    if not num_hosts:
        if world_size and workers > 1 and world_size % workers == 0:
            pods = world_size // workers
            doubt = f"if it counts the workers of {count(pods, 'pod')} with {workers} each, set PET_NNODES={pods}"
            reader.warnings.append(f"WORLD_SIZE={world_size} is taken as a number of pods; {doubt}")
        return world_size or 0, processes
    allowed = sorted({num_hosts, *(num_hosts * number for number in per_host)})
    if _range_of_hosts(reader)[0] != num_hosts or world_size is None or world_size in allowed:
        return num_hosts, processes
    if per_host or world_size % num_hosts:
        names = [name for name in ("PET_NNODES", "PET_NPROC_PER_NODE", _RUNAI_GPUS if gpus else "") if reader.first(name)]
        wanted = " or ".join(map(str, allowed)) if per_host else f"a multiple of {num_hosts}"
        reasons = ", ".join(map(reader.show, names))
        reader.require("WORLD_SIZE", f"{wanted} ({reasons})")
        return num_hosts, processes
    # PET_NPROC_PER_NODE is `auto` or `gpu`, or is not set.
    return num_hosts, processes if reader.first("PET_NPROC_PER_NODE") else world_size // num_hosts


def _order(reader: EnvironmentReader, torchrun_env: ClusterPlace) -> tuple[int, str]:
    """The pod's number (-1 if unknown), and the variable that holds it."""
    # RANK numbers the pods: the operator does not know the processes in them.
    rank = reader.whole("RANK")
    if torchrun_env.order >= 0:
        if rank is not None and rank != torchrun_env.order:
            reader.require("RANK", f"{torchrun_env.order}, the pod's number in PET_NODE_RANK,")
        return torchrun_env.order, "PET_NODE_RANK"
    source = reader.first("PET_NODE_RANK", "RANK", "JOB_COMPLETION_INDEX")
    number = reader.whole(source) if source else None
    return -1 if number is None else number, source
