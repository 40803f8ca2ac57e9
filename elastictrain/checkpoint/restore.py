"""Loads one checkpoint into the tensors of this rank; all ranks learn how each of them fared, and what follows."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner

from elastictrain.checkpoint.exchange import describe, gather_records
from elastictrain.checkpoint.manifest import Manifest, TensorRecord
from elastictrain.checkpoint.reader import ManifestReader
from elastictrain.checkpoint.tensor_bytes import dtype_name
from elastictrain.checkpoint.verified_read import CheckpointFolder, DamagedFileError, verify_headers
from elastictrain.errors import ConfigError, ElasticTrainError, InvalidCheckpointError, StorageError

logger = logging.getLogger(__name__)

NAMED_AT_MOST = 8


def describe_mismatch(tensors: Mapping[str, Tensor], stored: Mapping[str, TensorRecord]) -> str | None:
    """What differs, by tensor; None if the checkpoint fits. Pure.

    Stored names that the run lacks are a mismatch, too (a layer was removed), in the families that it has: the part before the
    first dot, such as `model`.
    """
    families = {_family(name) for name in tensors}
    removed = [name for name in sorted(stored.keys() - tensors.keys()) if _family(name) in families]
    lines = [f"{name} is not stored" for name in sorted(tensors.keys() - stored.keys())]
    lines += [f"{name} is stored, but the run has none" for name in removed]
    for name in sorted(tensors.keys() & stored.keys()):
        (dtype, shape), have = (dtype_name(tensors[name].dtype), tuple(tensors[name].shape)), stored[name]
        if shape != have.shape:
            lines.append(f"{name} is stored with shape {list(have.shape)}, but the run's has {list(shape)}")
        elif dtype != have.dtype:
            lines.append(f"{name} is stored as {have.dtype}, but the run's is {dtype}")
    if not lines:
        return None
    rest = f"\n  - and {len(lines) - NAMED_AT_MOST} more" if len(lines) > NAMED_AT_MOST else ""
    return "".join(f"\n  - {line}" for line in lines[:NAMED_AT_MOST]) + rest


def _family(name: str) -> str:
    return name.partition(".")[0]


@dataclass(frozen=True, slots=True)
class LoadResult:
    """How one rank or all of them fared: `loaded`, `damaged` (the checkpoint's fault), or `failed` (the store's, the model's or
    our own)."""

    outcome: Literal["loaded", "damaged", "failed"]
    bytes_read: int = 0
    files: tuple[str, ...] = ()
    """That are damaged, or could not be read, as far as is known."""

    error: str = ""
    """Where it failed: the class of the error."""

    message: str = ""


def result_of_all(results: Sequence[LoadResult]) -> LoadResult:
    """Damage that one rank has proved stands, whatever happened to the others. Pure."""
    damaged = [result for result in results if result.outcome == "damaged"]
    if damaged:
        reasons = dict.fromkeys(result.message for result in damaged)
        return LoadResult("damaged", files=damaged[0].files, message="; ".join(reasons))
    files = tuple(dict.fromkeys(file for result in results for file in result.files))
    for rank, result in enumerate(results):
        if result.outcome == "failed":
            message = result.message if len(results) == 1 else f"rank {rank}: {result.message}"
            return LoadResult("failed", files=files, error=result.error, message=message)
    return LoadResult("loaded", bytes_read=sum(result.bytes_read for result in results))


def load_tensors(folder: CheckpointFolder, manifest: Manifest, *, tensors: Mapping[str, Tensor]) -> int:
    """Reads this rank's part of `tensors` in place; returns the bytes read. Collective: no.

    Raises: DamagedFileError, with some tensors loaded and others not; StorageError.
    """
    reader = ManifestReader(folder, manifest=manifest)
    # The load planner of DCP needs no word from other ranks: we drive it ourselves, so errors keep their type.
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    # Parts are filled from several threads, for each of which autograd would be on: it forbids some writes to what it follows.
    targets: dict[str, Any] = {name: tensor.detach() for name, tensor in tensors.items()}
    planner.set_up_planner(targets, reader.read_metadata(), is_coordinator=False)
    reader.read_data(planner.finish_plan(planner.create_local_plan()), planner).wait()
    return reader.bytes_read


def load(
    folder: CheckpointFolder, manifest: Manifest, *, tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None
) -> LoadResult:
    """Loads it on all ranks of a group, if its headers are sound and it fits the state: nothing is overwritten before.
    Collective: yes.
    """
    checked = _together(lambda: _check_fit(folder, manifest, tensors=tensors, group=group), group=group)
    if checked.outcome != "loaded":
        return checked
    return _together(lambda: load_tensors(folder, manifest, tensors=tensors), group=group)


def _together(act: Callable[[], int], *, group: dist.ProcessGroup | None) -> LoadResult:
    try:
        result = LoadResult("loaded", bytes_read=act())
    except InvalidCheckpointError as error:
        files = (error.file,) if isinstance(error, DamagedFileError) else ()
        result = LoadResult("damaged", files=files, message=str(error))
    except Exception as error:
        # The others wait for this rank's result, whatever happened; all raise it then.
        if not isinstance(error, ElasticTrainError):
            logger.exception("a checkpoint could not be loaded")
        described = describe(error)
        files = (error.file,) if isinstance(error, StorageError) and error.file else ()
        result = LoadResult("failed", files=files, error=str(described["type"]), message=str(described["message"]))
    return result_of_all(gather_records(result, group=group))


def _check_fit(
    folder: CheckpointFolder, manifest: Manifest, *, tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None
) -> int:
    """Ranks share the headers. Raises: DamagedFileError; ConfigError if it is of another model; StorageError."""
    rank, world_size = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    # First: a manifest whose tensors are not those of its files is damaged, and not of another model.
    verify_headers(folder, manifest, files=manifest.files[rank::world_size])
    if (mismatch := describe_mismatch(tensors, manifest.tensors)) is not None:
        raise ConfigError(
            f"{folder.url('').rstrip('/')} is a checkpoint of another model or optimizer:{mismatch}\n"
            "Give the config that it was saved with, or another `run.dir` for a new run."
        )
    return 0
