"""`export`: writes a checkpoint in a format that other tools read."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from elastictrain.checkpoint.commands.export_formats import (
    MODEL,
    ExportSource,
    ExportTarget,
    file_target,
    folder_target,
    write_dcp,
    write_safetensors,
    write_torch,
)
from elastictrain.checkpoint.commands.huggingface import ExportsHuggingFace, StoredModel, exporting_task
from elastictrain.checkpoint.commands.output import note, progress
from elastictrain.checkpoint.commands.survey import find_checkpoint, locate
from elastictrain.checkpoint.folders import Reject
from elastictrain.checkpoint.verified_read import DamagedFileError
from elastictrain.errors import EXIT_OK, UsageError

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True, slots=True)
class ExportFormat:
    """One way to write a checkpoint, and which tool reads it then."""

    write: Callable[[ExportSource, ExportTarget], None]
    read_by: str
    only_model: bool = False


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
    """Writes the newest valid checkpoint at `url`, or that of `step`, to `out`; goes back from one that turns out damaged.

    `to` is hf, torch, safetensors or dcp; `dtype` is one of `DTYPES` for the model's weights, None for the format's own choice.
    `task_target` is the dotted path of the task's class, for hf alone: a module that the stored run names is not imported.

    Raises: UsageError; ConfigError; HostUnfitError; NoValidCheckpointError; UnknownFormatError; StorageError.
    """
    if task_target is not None and to != "hf":
        raise UsageError(f"--task must be given with --to hf alone, but --to is {to}")
    location = locate(url, key_env=key_env)
    task = exporting_task(location.run, target=task_target) if to == "hf" else None
    target = file_target(out) if to == "torch" else folder_target(out)
    chosen = _format(to, task)
    element = DTYPES[dtype or "bf16"] if to == "hf" else DTYPES.get(dtype or "")
    rejected: list[Reject] = []
    while True:
        found = find_checkpoint(location, step=step, rejected=rejected)
        names = [name for name in found.manifest.tensors if not chosen.only_model or name.startswith(MODEL)]
        note(f"exporting {found.url} ({len(names)} tensors) to {target.url}")
        try:
            with progress("exporting", total=len(names), unit="tensor", lines=True) as advance:
                chosen.write(ExportSource(found, element, advance), target)
        except DamagedFileError as error:
            target.clear()
            rejected.append(Reject(found.name, error.file, str(error)))
            note(f"damaged, going back: {error}")
            continue
        note(f"done: step {found.manifest.step}; {chosen.read_by}")
        return EXIT_OK


def _format(to: str, task: ExportsHuggingFace | None) -> ExportFormat:
    if task is not None:
        read_by = "transformers.AutoModelForCausalLM.from_pretrained reads it from a local folder"
        return ExportFormat(partial(write_huggingface, task=task), read_by, only_model=True)
    return {
        "torch": ExportFormat(write_torch, "torch.load reads it"),
        "safetensors": ExportFormat(write_safetensors, "safetensors.torch.load_file reads its files"),
        "dcp": ExportFormat(write_dcp, "torch.distributed.checkpoint.load reads it with a FileSystemReader"),
    }[to]


def write_huggingface(source: ExportSource, target: ExportTarget, *, task: ExportsHuggingFace) -> None:
    """A folder that `from_pretrained` reads, as the task writes it. Raises: ConfigError; DamagedFileError; StorageError."""
    tensors = source.manifest.tensors
    model = StoredModel(
        url=source.checkpoint.url,
        shapes={name.removeprefix(MODEL): tensors[name].shape for name in tensors if name.startswith(MODEL)},
        read=lambda name: source.read(f"{MODEL}{name}"),
    )
    task.export_huggingface(model, store=target.store, dtype=source.dtype or torch.bfloat16)
