"""`export`: write a checkpoint in a format that other tools read."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, cast, runtime_checkable

import torch
from torch import Tensor

from elastictrain.checkpoint.commands.export_formats import (
    AVERAGE,
    MODEL,
    ExportSource,
    ExportTarget,
    file_target,
    folder_target,
    write_dcp,
    write_safetensors,
    write_torch,
)
from elastictrain.checkpoint.commands.output import note
from elastictrain.checkpoint.commands.survey import find_checkpoint, locate
from elastictrain.checkpoint.folders import Reject
from elastictrain.checkpoint.run_folder import CONFIG_NAME, read_stored_config
from elastictrain.checkpoint.verified_read import DamagedFileError
from elastictrain.config.task_signature import TARGET, find_task, make_task
from elastictrain.entry_point import progress
from elastictrain.errors import EXIT_OK, ConfigError, UsageError
from elastictrain.storage.store import Store

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", re.ASCII)
_LONGEST_NAME = 200


@dataclass(frozen=True, slots=True)
class StoredModel:
    """The model in a checkpoint; averaged, where the run has kept averages of its weights."""

    url: str
    shapes: Mapping[str, tuple[int, ...]]
    """By name, as in the model's `state_dict`."""

    read: Callable[[str], Tensor]
    """Read one whole tensor, in the element type of training, on the CPU; every byte is verified."""


@runtime_checkable
class ExportsHuggingFace(Protocol):
    """A task that can write its weights as a Hugging Face folder. The task inherits from nothing."""

    def export_huggingface(self, model: StoredModel, *, store: Store, dtype: torch.dtype) -> None:
        """Write a folder that `from_pretrained` reads to the root of the empty `store`. Write `config.json` last, so that no
        reader takes a part of an export for all of it. Read one tensor at a time: the model may be larger than memory.

        Raises: ConfigError naming a tensor if the checkpoint is of another model; whatever `read` raises.
        """


def export_checkpoint(
    url: str,
    *,
    to: str,
    out: str,
    step: int | None,
    dtype: str | None,
    task_target: str | None = None,
    key_env: str = "",
) -> int:
    """Write the newest valid checkpoint at `url`, or that of `step`, to `out`; if it is damaged, the one before it.

    `to` is hf, torch, safetensors or dcp; `dtype` is one of `DTYPES` for the model's weights, None for the format's default.
    `task_target` is the dotted path of the task's class, for hf alone: no module that the stored run names is imported.

    Raises: UsageError; ConfigError; HostUnfitError; NoValidCheckpointError; UnknownFormatError; StorageError.
    """
    if task_target is not None and to != "hf":
        raise UsageError(f"--task must be given with --to hf alone, but --to is {to}")
    location = locate(url, key_env=key_env)
    write: Callable[[ExportSource, ExportTarget], None]
    if to == "hf":
        write = partial(write_huggingface, exporting_task(location.run, target=task_target))
        read_by = "transformers.AutoModelForCausalLM.from_pretrained reads it from a local folder"
    else:
        write, read_by = {
            "torch": (write_torch, "torch.load reads it"),
            "safetensors": (write_safetensors, "safetensors.torch.load_file reads its files"),
            "dcp": (write_dcp, "torch.distributed.checkpoint.load reads it with a FileSystemReader"),
        }[to]
    target = file_target(out) if to == "torch" else folder_target(out)
    element = DTYPES[dtype or "bf16"] if to == "hf" else DTYPES.get(dtype or "")
    rejected: list[Reject] = []
    while True:
        found = find_checkpoint(location, step=step, rejected=rejected)
        names = [name for name in found.manifest.tensors if to != "hf" or name.startswith(MODEL)]
        note(f"exporting {found.url} ({len(names)} tensors) to {target.url}")
        try:
            with progress("exporting", len(names), unit="tensor", lines=True) as advance:
                write(ExportSource(found, element, advance), target)
        except DamagedFileError as error:
            target.clear()
            rejected.append(Reject(found.name, error.file, str(error)))
            note(f"damaged, going back: {error}")
            continue
        note(f"done: step {found.manifest.step}; {read_by}")
        return EXIT_OK


def write_huggingface(task: ExportsHuggingFace, source: ExportSource, target: ExportTarget) -> None:
    """The averages of the weights, where the checkpoint has them: evaluations were of these."""
    tensors = source.manifest.tensors
    model = StoredModel(
        url=source.checkpoint.url,
        shapes={name.removeprefix(MODEL): tensors[name].shape for name in tensors if name.startswith(MODEL)},
        read=lambda name: source.read(f"{AVERAGE}{name}" if f"{AVERAGE}{name}" in tensors else f"{MODEL}{name}"),
    )
    task.export_huggingface(model, store=target.store, dtype=source.dtype or torch.bfloat16)


def exporting_task(run: Store, *, target: str | None) -> ExportsHuggingFace:
    """The task with the run's options. Imports no module that the run names. Raises: UsageError; ConfigError; StorageError."""
    tree = read_run_config(run)
    values, model = (value if isinstance(value := tree.get(name), dict) else {} for name in ("task", "model"))
    key = TARGET.rpartition(".")[2]
    stored = values.get(key)
    url = f"{run.url}/{CONFIG_NAME}"
    if target is None:
        known = isinstance(stored, str) and len(stored) < _LONGEST_NAME and _DOTTED.fullmatch(stored)
        typing = f"if you trust that module, add: --task {stored}" if known else "add: --task PACKAGE.MODULE.CLASS"
        raise UsageError(f"--to hf must be told the task, as a module that {url} names is not imported; {typing}")
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
    options = {str(name): value for name, value in values.items() if name != key}
    try:
        return cast(ExportsHuggingFace, make_task(cls, options=options, model=model))
    except ConfigError as error:
        raise ConfigError([replace(one, message=f"{one.message} ({url})") for one in error.problems]) from error


def read_run_config(run: Store) -> dict[str, object]:
    """The run's config.yaml. Raises: ConfigError; StorageError."""
    tree = read_stored_config(run)
    if tree is None:
        raise ConfigError(f"{run.url} must be the folder of a run, but has no {CONFIG_NAME}")
    return tree
