"""A task of a Slurm job.

Source: the sections on environment variables of Slurm's sbatch(1) and srun(1), and its page about heterogeneous jobs.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from elastictrain.launch.cluster.gpus import count, visible_gpus, workers_for
from elastictrain.launch.cluster.place import ClusterPlace, Role
from elastictrain.launch.cluster.slurm_step import SlurmStep, read_step
from elastictrain.launch.cluster.variables import Variables

_JOB = ("SLURM_JOB_ID", "SLURM_JOBID")
_NODES = ("SLURM_JOB_NUM_NODES", "SLURM_NNODES")
_SPECIAL_STEPS = range(2**32 - 16, 2**32)
"""The numbers of batch scripts, interactive shells and the like; printed as negative numbers in places."""

_STEP_ID = re.compile(r"-?[0-9]{1,10}")
_REQUEST = re.compile(r"(?:[^,:\s]+:)?([0-9]{1,6})")
_LAST_SECOND = 253402300799
"""The last one of the year 9999."""

_START = "srun --ntasks-per-node=1 python -m elastictrain.launch ..."


@dataclass(frozen=True, slots=True)
class _Workers:
    """0: the GPUs are to be asked."""

    number: int
    conclusions: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def is_slurm(environment: Mapping[str, str]) -> bool:
    """Whether this is a process of a Slurm job."""
    return any(name in environment for name in _JOB)


def read_slurm(environment: Mapping[str, str]) -> ClusterPlace:
    """The place of a task. Raises: ConfigError with every variable that is wrong."""
    variables = Variables(environment)
    step = read_step(variables) if _is_step(variables) else _without_step(variables)
    role: Role = "idle" if step.local_id else "launcher"
    workers = _workers(variables, step)
    deadline = _deadline(variables)
    variables.check()
    conclusions = [f"Slurm ({variables.show(*_JOB)})", *step.conclusions]
    if role == "idle":
        conclusions.append("the task with SLURM_LOCALID=0 launches; this one waits for its end")
    conclusions += workers.conclusions
    if deadline:
        end = datetime.fromtimestamp(deadline, UTC)
        conclusions.append(f"the job ends at {end:%Y-%m-%d %H:%M:%S} UTC ({variables.show('SLURM_JOB_END_TIME')})")
    restarts = environment.get("SLURM_RESTART_COUNT", "0")
    if restarts != "0":
        conclusions.append(f"the job was requeued before (SLURM_RESTART_COUNT={restarts})")
    return ClusterPlace(
        "slurm",
        role=role,
        order=step.order,
        num_hosts=len(step.names),
        processes=workers.number,
        peers=tuple(name for name in step.names if name not in ("", step.own)),
        deadline=deadline,
        job=variables.text(*_JOB),
        conclusions=tuple(conclusions),
        warnings=(*step.warnings, *workers.warnings, *_job_warnings(variables, deadline=deadline)),
    )


def _is_step(variables: Variables) -> bool:
    """Whether srun started this process, in an ordinary step: one that has a task on each of its hosts."""
    name = variables.first("SLURM_STEP_ID", "SLURM_STEPID")
    if not name:
        return False
    text = variables.environment[name]
    if not _STEP_ID.fullmatch(text):
        variables.refuse(name, f"must be the number of a step in the environment, but is {text!r}")
        return True
    return int(text) % 2**32 not in _SPECIAL_STEPS


def _without_step(variables: Variables) -> SlurmStep:
    """A batch script or an interactive shell: on the first host of the job only, or on none."""
    num_nodes = variables.whole(*_NODES, least=1) or 1
    node_id = variables.whole("SLURM_NODEID")
    if not variables.first("SLURM_NODEID"):
        message = (
            f"must be set in the environment, but is not: the shell of an allocation is not on its hosts; start with `{_START}`"
        )
        variables.refuse("SLURM_NODEID", message)
    elif num_nodes > 1:
        message = (
            f"must be that of an srun where a job has several hosts ({variables.show(*_NODES)}), or the others stay without a"
            f" launcher; start with `{_START}`"
        )
        variables.refuse("SLURM_STEP_ID", message)
    elif node_id:
        variables.refuse("SLURM_NODEID", f"must be 0 in the environment of a job of one host, but is {node_id}")
    own = variables.text("SLURMD_NODENAME")
    sentence = "this host alone: started without srun in a job of one host"
    return SlurmStep(order=node_id or 0, names=(own,), own=own, local_id=0, local_tasks=1, conclusions=(sentence,), warnings=())


def _workers(variables: Variables, step: SlurmStep) -> _Workers:
    gpus, source = _gpus(variables, local_tasks=step.local_tasks)
    if step.local_tasks == 1:
        number, sentence = workers_for(gpus, source=source, environment=variables.environment) if gpus else (0, "")
        return _Workers(number, (sentence,) if sentence else (), _cpu_warnings(variables, workers=number))
    tasks = step.local_tasks
    mask = visible_gpus(variables.environment)
    if gpus and mask is not None and 0 < mask[1] < tasks <= gpus:
        # Slurm gave each task its own GPUs, and the launcher's workers would see those of its task alone.
        message = (
            f"must show all GPUs to the launcher where {tasks} tasks are on a host, but shows {mask[1]}; start one task per"
            " host (--ntasks-per-node=1), or add --gpu-bind=none to srun"
        )
        variables.refuse(mask[0], message)
    warnings = []
    if gpus and gpus != tasks:
        warnings.append(
            f"{tasks} tasks, but {count(gpus, 'GPU')} ({source}) on this host, and each task stands for a worker;"
            " start one task per host (--ntasks-per-node=1)"
        )
    return _Workers(tasks, (f"{tasks} workers, one for each task of this host ({step.tasks_source})",), tuple(warnings))


def _gpus(variables: Variables, *, local_tasks: int) -> tuple[int, str]:
    """GPUs of this host (0: unknown or none), and `NAME=value` of the variable that said so."""
    if variables.first("SLURM_GPUS_ON_NODE"):
        return variables.whole("SLURM_GPUS_ON_NODE") or 0, variables.show("SLURM_GPUS_ON_NODE")
    for name, times in (("SLURM_GPUS_PER_NODE", 1), ("SLURM_GPUS_PER_TASK", local_tasks)):
        if not variables.first(name):
            continue
        text = variables.text(name)
        matches = [_REQUEST.fullmatch(item) for item in text.split(",")]
        if None in matches:
            variables.refuse(name, f"must be a number of GPUs like 8 or a100:8 in the environment, but is {text!r}")
            return 0, ""
        return times * sum(int(match[1]) for match in matches if match), variables.show(name)
    return 0, ""


def _cpu_warnings(variables: Variables, *, workers: int) -> tuple[str, ...]:
    cpus = variables.whole("SLURM_CPUS_ON_NODE", least=1)
    if cpus is None or cpus >= workers:
        return ()
    shown = f"{count(cpus, 'CPU')} (SLURM_CPUS_ON_NODE) for {count(workers, 'worker')}"
    return (f"{shown}: give --cpus-per-task to srun as well; it does not take that of sbatch",)


def _deadline(variables: Variables) -> float | None:
    end = variables.whole("SLURM_JOB_END_TIME", least=1)
    start = variables.whole("SLURM_JOB_START_TIME")
    if end is None:
        return None
    if end > _LAST_SECOND:
        message = f"must be a time in seconds since 1970 in the environment, but is {end}"
        variables.refuse("SLURM_JOB_END_TIME", message)
        return None
    if start is not None and start >= end:
        message = f"must be > SLURM_JOB_START_TIME={start} in the environment, but is {end}"
        variables.refuse("SLURM_JOB_END_TIME", message)
    return float(end)


def _job_warnings(variables: Variables, *, deadline: float | None) -> tuple[str, ...]:
    warnings = []
    if deadline is None:
        warnings.append(
            "this Slurm does not say when the job ends (no SLURM_JOB_END_TIME): have it send a signal (--signal=USR1@300), or"
            " say `launch.max_hours`"
        )
    if variables.first("SLURM_ARRAY_TASK_ID"):
        shown = variables.show("SLURM_ARRAY_TASK_ID")
        warnings.append(f"each job of an array ({shown}) must have a `run.dir` of its own")
    return tuple(warnings)
