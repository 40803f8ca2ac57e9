"""The ability of a task to write its weights as a Hugging Face folder, and finding the task of a run.

A task has the ability by defining the method of `ExportsHuggingFace`; like every ability of a task it inherits from nothing.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol, cast, runtime_checkable

import torch
from torch import Tensor

from elastictrain.checkpoint.commands.location import CONFIG_NAME
from elastictrain.config.digest import from_yaml
from elastictrain.config.task_signature import TARGET, check_call, find_task
from elastictrain.config.validate import construct
from elastictrain.errors import ConfigError, ObjectNotFoundError, Problem, UsageError
from elastictrain.storage.store import Store


@dataclass(frozen=True, slots=True)
class StoredModel:
    """The model in a checkpoint."""

    url: str
    """Of the checkpoint, for messages."""

    shapes: Mapping[str, tuple[int, ...]]
    """By the model's own names, as in its `state_dict`."""

    read: Callable[[str], Tensor]
    """Reads one whole tensor, in the element type that it was trained in, on the CPU; every byte is verified."""


@runtime_checkable
class ExportsHuggingFace(Protocol):
    """The task knows what Hugging Face calls its tensors, and how its configuration is written there."""

    def export_huggingface(self, model: StoredModel, *, store: Store, dtype: torch.dtype) -> None:
        """Write a folder that `from_pretrained` reads to the root of `store`, which is empty: `config.json` last, so that a
        part of an export is not taken for a whole one. Read one tensor at a time: the model may be larger than memory.

        Raises: ConfigError naming a tensor if the checkpoint is of another model than the task's. What `read` raises must pass.
        """


def read_run_config(run: Store) -> dict[str, object]:
    """The tree in the run's config.yaml. Raises: ConfigError; StorageError."""
    try:
        text = run.read(CONFIG_NAME).decode("utf-8", errors="replace")
    except ObjectNotFoundError as error:
        raise ConfigError(f"{run.url} must be the folder of a run, but has no {CONFIG_NAME}") from error
    return from_yaml(text, source=f"{run.url}/{CONFIG_NAME}")


def exporting_task(run: Store) -> ExportsHuggingFace:
    """The task that the run trains, from its configuration. Imports the task's module.

    Raises: ConfigError; UsageError if the task cannot export; StorageError.
    """
    tree = read_run_config(run)
    values, model = (value if isinstance(value := tree.get(name), dict) else {} for name in ("task", "model"))
    target = values.get("_target_")
    url = f"{run.url}/{CONFIG_NAME}"
    if not isinstance(target, str):
        raise ConfigError([Problem(TARGET, f"must name the task of the run in {url}, but is {target!r}")])
    cls, problems = find_task(target)
    if cls is None:
        raise _config_error(problems, url=url)
    if not callable(getattr(cls, "export_huggingface", None)):
        raise UsageError(
            f"--to hf must be for a task with the method export_huggingface, but {target} of {url} has none; "
            "use --to safetensors, torch or dcp"
        )
    options = {str(name): value for name, value in values.items() if name != TARGET.rpartition(".")[2]}
    call, problems = check_call(cls, options=options, model=model)
    if call is None:
        raise _config_error(problems, url=url)
    task, problems = construct(cast("type[object]", call.cls), arguments=call.arguments, path="task")
    if problems:
        raise _config_error(problems, url=url)
    return cast(ExportsHuggingFace, task)


def _config_error(problems: list[Problem], *, url: str) -> ConfigError:
    return ConfigError([replace(problem, message=f"{problem.message} ({url})") for problem in problems])
