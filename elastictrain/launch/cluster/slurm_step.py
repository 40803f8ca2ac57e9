"""The hosts and tasks of one step of a Slurm job (what one srun started), as one of its tasks sees them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from elastictrain.launch.cluster.gpus import count
from elastictrain.launch.cluster.hostlist import expand_counts, expand_hosts
from elastictrain.launch.cluster.variables import Variables

T = TypeVar("T")

# Those of the step come first: a step may have fewer hosts and other tasks than its job.
_NUM_NODES = ("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")
_NAMES = ("SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST")
_TASKS = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE")
_NUM_TASKS = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")


@dataclass(frozen=True, slots=True)
class SlurmStep:
    """The hosts of a step, and this task among them."""

    order: int
    names: tuple[str, ...]
    own: str
    """This host's name; empty if unknown."""

    local_id: int
    local_tasks: int
    tasks_source: str = ""
    """`NAME=value` of the variable that gave `local_tasks`."""

    conclusions: tuple[str, ...] = field(default=())
    warnings: tuple[str, ...] = field(default=())


def read_step(variables: Variables) -> SlurmStep:
    """Problems are left in `variables`; the result then means nothing."""
    names = _names(variables)
    order = variables.whole("SLURM_NODEID")
    if not variables.first("SLURM_NODEID"):
        variables.refuse("SLURM_NODEID", "must be set in the environment of each task of a step, but is not")
    if order is not None and names and order >= len(names):
        message = f"must be < {len(names)}, the hosts of {variables.first(*_NAMES)}, in the environment, but is {order}"
        variables.refuse("SLURM_NODEID", message)
        order = None
    own = variables.text("SLURMD_NODENAME")
    if own and any(names) and own not in names:
        message = f"must be one of {variables.show(*_NAMES)} in the environment, but is {own!r}"
        variables.refuse("SLURMD_NODENAME", message)
    local_tasks, source = _local_tasks(variables, num_nodes=len(names), order=order)
    local_id = _local_id(variables, local_tasks=local_tasks)
    conclusions = (
        f"{count(len(names), 'host')} ({variables.show(*_NAMES, *_NUM_NODES)})",
        f"this is host {order} (SLURM_NODEID), counted from 0",
    )
    return SlurmStep(
        order=order or 0,
        names=names,
        own=own or (names[order] if order is not None and names else ""),
        local_id=local_id,
        local_tasks=local_tasks,
        tasks_source=source,
        conclusions=conclusions,
        warnings=_left_out(variables, names=names),
    )


def _names(variables: Variables) -> tuple[str, ...]:
    """The hosts of the step; without a list of them as many nameless ones as the step has."""
    number = variables.whole(*_NUM_NODES, least=1)
    list_name = variables.first(*_NAMES)
    if not list_name:
        if not variables.first(*_NUM_NODES):
            variables.refuse(_NAMES[0], "must be set in the environment of each task of a step, but is not")
        return ("",) * min(number or 0, 65536)
    names = _expand(variables, list_name, expand_hosts, "a list of hosts like gpu[001-003,7],login1")
    if names and number is not None and number != len(names):
        message = f"must name the {number} hosts of {variables.first(*_NUM_NODES)} in the environment, but names {len(names)}"
        variables.refuse(list_name, message)
    return names or ()


def _local_tasks(variables: Variables, *, num_nodes: int, order: int | None) -> tuple[int, str]:
    name = variables.first(*_TASKS)
    if not name:
        return _even_tasks(variables, num_nodes=num_nodes)
    counts = _expand(variables, name, expand_counts, "numbers of tasks like 4(x2),3")
    if not counts or not num_nodes or order is None:
        return 1, ""
    if name == "SLURM_NTASKS_PER_NODE" and len(counts) == 1:
        counts *= num_nodes
    if len(counts) != num_nodes or not counts[order]:
        message = f"must give tasks to each of {num_nodes} hosts in the environment, but is {variables.environment[name]!r}"
        variables.refuse(name, message)
        return 1, ""
    return counts[order], variables.show(name)


def _even_tasks(variables: Variables, *, num_nodes: int) -> tuple[int, str]:
    total = variables.whole(*_NUM_TASKS, least=1)
    if total is None or not num_nodes:
        return 1, ""
    if total % num_nodes:
        message = f"must be a multiple of the {num_nodes} hosts where {_TASKS[0]} is not set in the environment, but is {total}"
        variables.refuse(variables.first(*_NUM_TASKS), message)
    return max(1, total // num_nodes), variables.show(*_NUM_TASKS)


def _local_id(variables: Variables, *, local_tasks: int) -> int:
    local_id = variables.whole("SLURM_LOCALID")
    if local_id is None:
        if local_tasks > 1 and not variables.first("SLURM_LOCALID"):
            message = f"must be set in the environment where {local_tasks} tasks are on a host, but is not"
            variables.refuse("SLURM_LOCALID", message)
        return 0
    if local_id >= local_tasks:
        message = f"must be < {local_tasks}, the tasks of this host, in the environment, but is {local_id}"
        variables.refuse("SLURM_LOCALID", message)
    rank, total = variables.whole("SLURM_PROCID"), variables.whole(*_NUM_TASKS, least=1)
    if rank is not None and total is not None and rank >= total:
        message = f"must be < {total}, the tasks of {variables.first(*_NUM_TASKS)}, in the environment, but is {rank}"
        variables.refuse("SLURM_PROCID", message)
    return local_id


def _left_out(variables: Variables, *, names: tuple[str, ...]) -> tuple[str, ...]:
    """A step that is smaller than its job leaves hosts idle that are paid for."""
    components = variables.whole("SLURM_HET_SIZE", least=1) or 1
    if components > 1:
        parts = [
            variables.whole(f"SLURM_JOB_NUM_NODES_HET_GROUP_{n}", f"SLURM_JOB_NODES_HET_GROUP_{n}")
            for n in range(min(components, 1024))
        ]
        total = sum(part or 0 for part in parts)
        remedy = f"add --het-group=0-{components - 1} to srun"
    else:
        total = variables.whole("SLURM_JOB_NUM_NODES", least=1) or 0
        remedy = "leave out --nodes and --nodelist of srun"
    if total <= len(names):
        return ()
    return (f"the job has {total} hosts, but this step only {len(names)}; to use all, {remedy}",)


def _expand(variables: Variables, name: str, expand: Callable[[str], tuple[T, ...]], what: str) -> tuple[T, ...]:
    text = variables.environment[name]
    try:
        return expand(text)
    except ValueError as error:
        variables.refuse(name, f"must be {what} in the environment, but is {text!r}: {error}")
        return ()
