"""A task of a Slurm job.

Source: the sections on environment variables of Slurm's sbatch(1) and srun(1), and its page about heterogeneous jobs.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from itertools import product
from math import prod
from typing import TypeVar

from elastictrain.launch.cluster.place import ClusterPlace, EnvironmentReader, count, visible_gpus

T = TypeVar("T")

_JOB = ("SLURM_JOB_ID", "SLURM_JOBID")
# The step's variables come first: a step may have fewer hosts and other tasks than its job.
_NUM_NODES = ("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")
_NAMES = ("SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST")
_TASKS = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE")
_NUM_TASKS = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
_SPECIAL_STEPS = range(2**32 - 16, 2**32)  # of batch scripts, interactive shells and the like; sometimes printed as negatives
_STEP_ID = re.compile(r"-?[0-9]{1,10}")
_REQUEST = re.compile(r"(?:[^,:\s]+:)?([0-9]{1,6})")
_LAST_SECOND = 253402300799  # the last one of the year 9999
_START = "srun --ntasks-per-node=1 python -m elastictrain.launch ..."

_MOST_HOSTS = 65536  # more than any cluster has: a longer list is a mistake, and would only fill memory
_PART = re.compile(r"\[([^\[\]]*)\]|([^\[\],\s]+)|(,|\Z)")
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")
_COUNT = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?")


def is_slurm(environment: Mapping[str, str]) -> bool:
    return any(name in environment for name in _JOB)


def read_slurm(reader: EnvironmentReader) -> ClusterPlace:
    """The place of a step's task, or of a script or shell in a job of one host. Problems and warnings go to `reader`."""
    reader.conclusions.append(f"Slurm ({reader.show(*_JOB)})")
    # Whether srun started this process, in an ordinary step: one with a task on each of its hosts.
    in_step = False
    if name := reader.first("SLURM_STEP_ID", "SLURM_STEPID"):
        is_number = _STEP_ID.fullmatch(reader.text(name)) is not None
        if not is_number:
            reader.require(name, "the number of a step")
        in_step = not is_number or int(reader.text(name)) % 2**32 not in _SPECIAL_STEPS
    place = _read_step(reader) if in_step else _without_step(reader)
    deadline = _read_deadline(reader)
    if reader.text("SLURM_RESTART_COUNT") not in ("", "0"):
        reader.conclusions.append(f"the job was requeued before ({reader.show('SLURM_RESTART_COUNT')})")
    if reader.first("SLURM_ARRAY_TASK_ID"):
        shown = reader.show("SLURM_ARRAY_TASK_ID")
        reader.warnings.append(f"each job of an array ({shown}) must have a `run.dir` of its own")
    return replace(place, deadline=deadline, job=reader.text(*_JOB))


def _without_step(reader: EnvironmentReader) -> ClusterPlace:
    """A batch script or an interactive shell: it runs on the job's first host only, or on none of its hosts."""
    of_job = ("SLURM_JOB_NUM_NODES", "SLURM_NNODES")
    num_nodes = reader.whole(*of_job, least=1) or 1
    node_id = reader.whole("SLURM_NODEID")
    if not reader.first("SLURM_NODEID"):
        hint = f"the shell of an allocation is not on its hosts; start with `{_START}`"
        reader.require("SLURM_NODEID", "set", hint=hint)
    elif num_nodes > 1:
        message = (
            f"must be that of an srun where a job has several hosts ({reader.show(*of_job)}), or the others stay without a"
            f" launcher; start with `{_START}`"
        )
        reader.refuse("SLURM_STEP_ID", message)
    elif node_id:
        reader.require("SLURM_NODEID", "0 for a job of one host")
    reader.conclusions.append("this host alone: started without srun in a job of one host")
    return ClusterPlace("slurm", order=node_id or 0, num_hosts=1, processes=_count_workers(reader, 1, ""))


def _read_step(reader: EnvironmentReader) -> ClusterPlace:
    """One task of a step; a step is what one srun started."""
    names = _read_names(reader)
    order = reader.whole("SLURM_NODEID")
    if not reader.first("SLURM_NODEID"):
        reader.require("SLURM_NODEID", "set for each task of a step")
    if order is not None and names and order >= len(names):
        reader.require("SLURM_NODEID", f"< {len(names)}, the hosts of {reader.first(*_NAMES)},")
        order = None
    own = reader.text("SLURMD_NODENAME")
    if own and any(names) and own not in names:
        reader.require("SLURMD_NODENAME", f"one of {reader.show(*_NAMES)}")
    if not own and order is not None and names:
        own = names[order]
    reader.conclusions.append(f"{count(len(names), 'host')} ({reader.show(*_NAMES, *_NUM_NODES)})")
    reader.conclusions.append(f"this is host {order} (SLURM_NODEID), counted from 0")
    _warn_of_idle_hosts(reader, names=names)
    local_tasks, source = _read_local_tasks(reader, num_nodes=len(names), order=order)
    local_id = reader.whole("SLURM_LOCALID")
    if local_id is not None:
        if local_id >= local_tasks:
            reader.require("SLURM_LOCALID", f"< {local_tasks}, the tasks of this host,")
        rank, total = reader.whole("SLURM_PROCID"), reader.whole(*_NUM_TASKS, least=1)
        if rank is not None and total is not None and rank >= total:
            reader.require("SLURM_PROCID", f"< {total}, the tasks of {reader.first(*_NUM_TASKS)},")
    elif local_tasks > 1 and not reader.first("SLURM_LOCALID"):
        reader.require("SLURM_LOCALID", f"set where {local_tasks} tasks are on a host")
    if local_id:
        reader.conclusions.append("the task with SLURM_LOCALID=0 launches; this one waits for its end")
    return ClusterPlace(
        "slurm",
        role="idle" if local_id else "launcher",
        order=order or 0,
        num_hosts=len(names),
        processes=_count_workers(reader, local_tasks, source),
        peers=tuple(name for name in names if name not in ("", own)),
    )


def _read_names(reader: EnvironmentReader) -> tuple[str, ...]:
    """Hosts of the step; without a list, as many empty names as the step has hosts."""
    number = reader.whole(*_NUM_NODES, least=1)
    list_name = reader.first(*_NAMES)
    if not list_name:
        if not reader.first(*_NUM_NODES):
            reader.require(_NAMES[0], "set for each task of a step")
        return ("",) * min(number or 0, _MOST_HOSTS)
    names = _expand(reader, list_name, expand_hosts, "a list of hosts like gpu[001-003,7],login1")
    if names and number is not None and number != len(names):
        message = f"must name the {number} hosts of {reader.first(*_NUM_NODES)} in the environment, but names {len(names)}"
        reader.refuse(list_name, message)
    return names


def _read_local_tasks(reader: EnvironmentReader, *, num_nodes: int, order: int | None) -> tuple[int, str]:
    """Number of the step's tasks on this host, and `NAME=value` of its variable."""
    name = reader.first(*_TASKS)
    if not name:
        total = reader.whole(*_NUM_TASKS, least=1)
        if total is None or not num_nodes:
            return 1, ""
        if total % num_nodes:
            reader.require(reader.first(*_NUM_TASKS), f"a multiple of the {num_nodes} hosts where {_TASKS[0]} is not set")
        return max(1, total // num_nodes), reader.show(*_NUM_TASKS)
    counts = _expand(reader, name, expand_counts, "numbers of tasks like 4(x2),3")
    if not counts or not num_nodes or order is None:
        return 1, ""
    if name == "SLURM_NTASKS_PER_NODE" and len(counts) == 1:
        counts *= num_nodes
    if len(counts) != num_nodes or not counts[order]:
        reader.require(name, f"numbers of tasks for each of {num_nodes} hosts")
        return 1, ""
    return counts[order], reader.show(name)


def _warn_of_idle_hosts(reader: EnvironmentReader, *, names: tuple[str, ...]) -> None:
    """A step with fewer hosts than its job leaves paid hosts idle."""
    components = reader.whole("SLURM_HET_SIZE", least=1) or 1
    if components > 1:
        parts = [
            reader.whole(f"SLURM_JOB_NUM_NODES_HET_GROUP_{n}", f"SLURM_JOB_NODES_HET_GROUP_{n}")
            for n in range(min(components, 1024))
        ]
        total = sum(part or 0 for part in parts)
        remedy = f"add --het-group=0-{components - 1} to srun"
    else:
        total = reader.whole("SLURM_JOB_NUM_NODES", least=1) or 0
        remedy = "leave out --nodes and --nodelist of srun"
    if total > len(names):
        reader.warnings.append(f"the job has {total} hosts, but this step only {len(names)}; to use all, {remedy}")


def _count_workers(reader: EnvironmentReader, tasks: int, tasks_source: str) -> int:
    """0: count the GPUs instead. `tasks`: the step's tasks on this host."""
    gpus, source = _count_gpus(reader, local_tasks=tasks)
    if tasks == 1:
        workers = reader.workers_for(gpus, source=source) if gpus else 0
        cpus = reader.whole("SLURM_CPUS_ON_NODE", least=1)
        if cpus is not None and cpus < workers:
            shown = f"{count(cpus, 'CPU')} (SLURM_CPUS_ON_NODE) for {count(workers, 'worker')}"
            reader.warnings.append(f"{shown}: give --cpus-per-task to srun as well; it does not take that of sbatch")
        return workers
    mask = visible_gpus(reader.environment)
    if gpus and mask is not None and 0 < mask[1] < tasks <= gpus:
        # Slurm bound GPUs to each task, so the launcher's workers would see only those of its task.
        message = (
            f"must show all GPUs to the launcher where {tasks} tasks are on a host, but shows {mask[1]}; start one task per"
            " host (--ntasks-per-node=1), or add --gpu-bind=none to srun"
        )
        reader.refuse(mask[0], message)
    reader.conclusions.append(f"{tasks} workers, one for each task of this host ({tasks_source})")
    if gpus and gpus != tasks:
        reader.warnings.append(
            f"{tasks} tasks, but {count(gpus, 'GPU')} ({source}) on this host, and each task stands for a worker;"
            " start one task per host (--ntasks-per-node=1)"
        )
    return tasks


def _count_gpus(reader: EnvironmentReader, *, local_tasks: int) -> tuple[int, str]:
    """GPUs of this host (0: unknown or none), and `NAME=value` of their variable."""
    if reader.first("SLURM_GPUS_ON_NODE"):
        return reader.whole("SLURM_GPUS_ON_NODE") or 0, reader.show("SLURM_GPUS_ON_NODE")
    name = reader.first("SLURM_GPUS_PER_NODE", "SLURM_GPUS_PER_TASK")
    if not name:
        return 0, ""
    matches = [_REQUEST.fullmatch(item) for item in reader.text(name).split(",")]
    if None in matches:
        reader.require(name, "a number of GPUs like 8 or a100:8")
        return 0, ""
    times = local_tasks if name == "SLURM_GPUS_PER_TASK" else 1
    return times * sum(int(match[1]) for match in matches if match), reader.show(name)


def _read_deadline(reader: EnvironmentReader) -> float | None:
    end = reader.whole("SLURM_JOB_END_TIME", least=1)
    start = reader.whole("SLURM_JOB_START_TIME")
    if end is None:
        reader.warnings.append(
            "this Slurm does not say when the job ends (no SLURM_JOB_END_TIME): have it send a signal (--signal=USR1@300), or"
            " say `launch.max_hours`"
        )
        return None
    if end > _LAST_SECOND:
        reader.require("SLURM_JOB_END_TIME", "a time in seconds since 1970")
        return None
    if start is not None and start >= end:
        reader.require("SLURM_JOB_END_TIME", f"> SLURM_JOB_START_TIME={start}")
    shown = f"{datetime.fromtimestamp(end, UTC):%Y-%m-%d %H:%M:%S} UTC"
    reader.conclusions.append(f"the job ends at {shown} ({reader.show('SLURM_JOB_END_TIME')})")
    return float(end)


def _expand(reader: EnvironmentReader, name: str, expand: Callable[[str], tuple[T, ...]], what: str) -> tuple[T, ...]:
    try:
        return expand(reader.text(name))
    except ValueError as error:
        reader.require(name, what, hint=str(error))
        return ()


def expand_hosts(text: str) -> tuple[str, ...]:
    """The hosts in Slurm's order: the last bracket varies fastest; the first number of a range sets the width.
    Raises: ValueError with what is wrong, to follow "must be a list of hosts like gpu[001-003,7],login1"."""
    hosts: list[str] = []
    choices: list[tuple[str, ...]] = []  # the alternatives of each part of one expression between commas outside brackets
    position = 0
    while match := _PART.match(text, position):
        position = match.end()
        if match[3] is None:
            choices.append((match[2],) if match[2] is not None else tuple(_numbers(match[1])))
            continue
        if not choices:
            raise ValueError("a name is empty")
        if len(hosts) + prod(len(choice) for choice in choices) > _MOST_HOSTS:
            raise ValueError(f"names more than {_MOST_HOSTS} hosts")
        hosts.extend("".join(parts) for parts in product(*choices))
        if not match[3]:
            return tuple(hosts)
        choices = []
    raise ValueError(f"{text[position:]!r} is no host")


def _numbers(ranges: str) -> Iterator[str]:
    total = 0
    for item in ranges.split(","):
        match = _RANGE.fullmatch(item)
        if match is None:
            raise ValueError(f"{item!r} in brackets is no number and no range")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise ValueError(f"the range {item!r} runs backwards")
        total += last - first + 1
        if total > _MOST_HOSTS:
            raise ValueError(f"names more than {_MOST_HOSTS} hosts")
        yield from (f"{number:0{len(match[1])}d}" for number in range(first, last + 1))


def expand_counts(text: str) -> tuple[int, ...]:
    """One number per host, from a text like `4(x2),3`.
    Raises: ValueError with what is wrong, to follow "must be numbers like 4(x2),3"."""
    counts: list[int] = []
    for item in text.split(","):
        match = _COUNT.fullmatch(item)
        if match is None:
            raise ValueError(f"{item!r} is no number")
        times = int(match[2] or 1)
        if len(counts) + times > _MOST_HOSTS:
            raise ValueError(f"is for more than {_MOST_HOSTS} hosts")
        counts.extend([int(match[1])] * times)
    return tuple(counts)
