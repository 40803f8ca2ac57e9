"""The ability of a task to write its weights as a Hugging Face folder, and making the task with the options of a run.

A task has the ability by defining the method of `ExportsHuggingFace`; like every ability of a task it inherits from nothing.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol, cast, runtime_checkable

import torch
from torch import Tensor

from elastictrain.checkpoint.commands.output import note
from elastictrain.checkpoint.run_folder import CONFIG_NAME, read_stored_config
from elastictrain.config.task_signature import TARGET, check_call, find_task
from elastictrain.config.validate import construct
from elastictrain.errors import ConfigError, Problem, UsageError
from elastictrain.storage.store import Store

_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", re.ASCII)
_LONGEST_NAME = 200


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
    tree = read_stored_config(run)
    if tree is None:
        raise ConfigError(f"{run.url} must be the folder of a run, but has no {CONFIG_NAME}")
    return tree


def exporting_task(run: Store, *, target: str | None) -> ExportsHuggingFace:
    """The task with the options in the run's configuration. Imports the module of `target`, and nothing that the run names.

    Raises: UsageError if `target` is not given, or is no task that can export; ConfigError; StorageError.
    """
    tree = read_run_config(run)
    values, model = (value if isinstance(value := tree.get(name), dict) else {} for name in ("task", "model"))
    stored = values.get(TARGET.rpartition(".")[2])
    url = f"{run.url}/{CONFIG_NAME}"
    if target is None:
        raise UsageError(_how_to_name(stored, url=url))
    cls, problems = find_task(target)
    if cls is None:
        raise UsageError("; ".join(f"--task {problem.message}" for problem in problems))
    if not callable(getattr(cls, "export_huggingface", None)):
        raise UsageError(
            f"--task must be a task with the method export_huggingface, but {target} has none; "
            "use --to safetensors, torch or dcp"
        )
    if stored != target:
        note(f"{url} names the task {stored!a}; exporting with {target}")
    options = {str(name): value for name, value in values.items() if name != TARGET.rpartition(".")[2]}
    call, problems = check_call(cls, options=options, model=model)
    if call is None:
        raise _config_error(problems, url=url)
    task, problems = construct(cast("type[object]", call.cls), arguments=call.arguments, path="task")
    if problems:
        raise _config_error(problems, url=url)
    return cast(ExportsHuggingFace, task)


def _how_to_name(stored: object, *, url: str) -> str:
    known = isinstance(stored, str) and len(stored) < _LONGEST_NAME and _DOTTED.fullmatch(stored)
    typing = f"if you trust that module, add: --task {stored}" if known else "add: --task PACKAGE.MODULE.CLASS"
    return f"--to hf must be told the task, as a module that {url} names is not imported; {typing}"


def _config_error(problems: list[Problem], *, url: str) -> ConfigError:
    return ConfigError([replace(problem, message=f"{problem.message} ({url})") for problem in problems])
