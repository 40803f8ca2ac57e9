"""A pod that RunAI scheduled: Kubernetes, and the number of GPUs that it was given.

Source: NVIDIA Run:ai, "Environment Variables inside a Run:ai Workload"; the binder of KAI-Scheduler, for parts of a GPU.
"""

import re
from collections.abc import Mapping
from dataclasses import replace

from elastictrain.launch.cluster.gpus import workers_for
from elastictrain.launch.cluster.kubernetes import is_kubernetes, pod_place
from elastictrain.launch.cluster.place import ClusterPlace
from elastictrain.launch.cluster.variables import Variables

GPUS = "RUNAI_NUM_OF_GPUS"
_DECIMAL = re.compile(r"[0-9]{1,6}(?:\.[0-9]{1,9})?")


def is_runai(environment: Mapping[str, str]) -> bool:
    """Whether RunAI started this pod."""
    return GPUS in environment or (is_kubernetes(environment) and any(name.startswith("RUNAI_") for name in environment))


def read_runai(environment: Mapping[str, str]) -> ClusterPlace:
    """The place of a pod of RunAI. Raises: ConfigError with every variable that is wrong."""
    variables = Variables(environment)
    given = _gpus(variables)
    gpus = max(1, int(given)) if given else 0
    place = pod_place(variables, kind="runai", name="RunAI", gpus=gpus, gpus_from=GPUS)
    asked = place.processes
    if gpus and asked > gpus:
        variables.refuse("PET_NPROC_PER_NODE", f"must be <= {gpus}, the GPUs of {GPUS}, in the environment, but is {asked}")
    variables.check()
    processes, conclusion = (asked, ()) if asked or not gpus else _workers(variables, given=given)
    return replace(
        place,
        processes=processes,
        job=variables.text("RUNAI_JOB_NAME", "JOB_NAME"),
        conclusions=(*place.conclusions, *conclusion),
    )


def _gpus(variables: Variables) -> float:
    """The GPUs of this pod, or the part of one; 0 if nothing tells."""
    if not variables.first(GPUS):
        return 0.0
    text = variables.text(GPUS)
    given = float(text) if _DECIMAL.fullmatch(text) else 0.0
    if given <= 0 or (given > 1 and given != int(given)):
        message = (
            f"must be a whole number of GPUs >= 1, or a part of one, in the environment, but is {text!r}; request GPUs for the"
            f" workload, or start with `env -u {GPUS}` to train without"
        )
        variables.refuse(GPUS, message)
        return 0.0
    return given


def _workers(variables: Variables, *, given: float) -> tuple[int, tuple[str, ...]]:
    """Workers for the GPUs, and a sentence about them."""
    text = variables.text(GPUS)
    if given < 1:
        return 1, (f"1 worker with a part of a GPU ({GPUS}={text})",)
    workers, sentence = workers_for(int(given), source=f"{GPUS}={text}", environment=variables.environment)
    return workers, (sentence,)
