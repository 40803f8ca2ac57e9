"""A pod that RunAI scheduled: Kubernetes, and the number of GPUs that it was given.

Source: NVIDIA Run:ai, "Environment Variables inside a Run:ai Workload"; the binder of KAI-Scheduler, for parts of a GPU.
"""

import re
from collections.abc import Mapping
from dataclasses import replace

from elastictrain.launch.cluster.gpus import workers_for
from elastictrain.launch.cluster.kubernetes import is_kubernetes, pod_place
from elastictrain.launch.cluster.place import Place
from elastictrain.launch.cluster.variables import Variables

GPUS = "RUNAI_NUM_OF_GPUS"
_DECIMAL = re.compile(r"[0-9]{1,6}(?:\.[0-9]{1,9})?")


def is_runai(environment: Mapping[str, str]) -> bool:
    """Whether RunAI started this pod."""
    return GPUS in environment or (is_kubernetes(environment) and any(name.startswith("RUNAI_") for name in environment))


def read_runai(environment: Mapping[str, str]) -> Place:
    """The place of a pod of RunAI. Raises: ConfigError with every variable that is wrong."""
    variables = Variables(environment)
    place = pod_place(variables, kind="runai", name="RunAI")
    processes, conclusion = _workers(variables, asked=place.processes)
    variables.check()
    return replace(
        place,
        processes=processes,
        job=variables.text("RUNAI_JOB_NAME", "JOB_NAME"),
        conclusions=(*place.conclusions, *conclusion),
    )


def _workers(variables: Variables, *, asked: int) -> tuple[int, tuple[str, ...]]:
    """Workers and a sentence about them; `asked` is what PET_NPROC_PER_NODE says, 0 for nothing."""
    if not variables.first(GPUS):
        return asked, ()
    text = variables.text(GPUS)
    given = float(text) if _DECIMAL.fullmatch(text) else 0.0
    if given <= 0 or (given > 1 and given != int(given)):
        message = (
            f"must be a whole number of GPUs >= 1, or a part of one, in the environment, but is {text!r}; request GPUs for the"
            f" workload, or start with `env -u {GPUS}` to train without"
        )
        variables.refuse(GPUS, message)
        return asked, ()
    gpus = max(1, int(given))
    if asked > gpus:
        variables.refuse("PET_NPROC_PER_NODE", f"must be <= {gpus}, the GPUs of {GPUS}, in the environment, but is {asked}")
    if asked:
        return asked, ()
    if given < 1:
        return 1, (f"1 worker with a part of a GPU ({GPUS}={text})",)
    workers, sentence = workers_for(gpus, source=f"{GPUS}={text}", environment=variables.environment)
    return workers, (sentence,)
