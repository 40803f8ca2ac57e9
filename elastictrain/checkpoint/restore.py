"""Loads one checkpoint into the tensors of this rank; all ranks learn how each of them fared, and what follows."""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner

from elastictrain.checkpoint.dcp_metadata import metadata_of
from elastictrain.checkpoint.exchange import describe, gather_json
from elastictrain.checkpoint.manifest import JsonValue, Manifest, TensorRecord
from elastictrain.checkpoint.reader import ManifestReader
from elastictrain.checkpoint.select_checkpoint import Reject
from elastictrain.checkpoint.tensor_bytes import dtype_name
from elastictrain.checkpoint.verified_read import CheckpointFolder, DamagedFileError, verify_headers
from elastictrain.errors import ConfigError, ElasticTrainError, InvalidCheckpointError, StorageError

logger = logging.getLogger(__name__)

NAMED_AT_MOST = 8


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """What must agree; `shape` is that of the whole tensor."""

    dtype: str
    shape: tuple[int, ...]


def describe_mismatch(
    tensors: Mapping[str, TensorFacts], stored: Mapping[str, TensorRecord], *, optional: Collection[str]
) -> str | None:
    """What differs, by tensor; None if the checkpoint fits.

    `optional` names need not be stored. Stored names that nobody asks for are a mismatch, too (a layer was removed), in those
    families (`model`, `optim`: the part before the first dot) whose given names are all required.
    """
    families = {_family(name) for name in tensors} - {_family(name) for name in optional}
    lines = [f"{name} is not stored" for name in sorted(tensors) if name not in stored and name not in optional]
    lines += [
        f"{name} is stored, but the run has none"
        for name in sorted(stored)
        if name not in tensors and _family(name) in families
    ]
    for name in sorted(tensors.keys() & stored.keys()):
        want, have = tensors[name], stored[name]
        if want.shape != have.shape:
            lines.append(f"{name} is stored with shape {list(have.shape)}, but the run's has {list(want.shape)}")
        elif want.dtype != have.dtype:
            lines.append(f"{name} is stored as {have.dtype}, but the run's is {want.dtype}")
    if not lines:
        return None
    rest = f"\n  - and {len(lines) - NAMED_AT_MOST} more" if len(lines) > NAMED_AT_MOST else ""
    return "".join(f"\n  - {line}" for line in lines[:NAMED_AT_MOST]) + rest


def _family(name: str) -> str:
    return name.partition(".")[0]


@dataclass(frozen=True, slots=True)
class LoadResult:
    """One rank's outcome: `loaded`, `damaged` (the checkpoint's fault), or `failed` (the store's, the model's or our own)."""

    outcome: Literal["loaded", "damaged", "failed"]
    bytes_read: int = 0
    file: str | None = None
    """That is damaged, or could not be read."""

    error: str = ""
    message: str = ""

    def to_json(self) -> JsonValue:
        """For `exchange.gather_json`."""
        return [self.outcome, self.bytes_read, self.file, self.error, self.message]


def result_from_json(value: JsonValue) -> LoadResult:
    """The inverse of `LoadResult.to_json`."""
    if not isinstance(value, list) or len(value) != 5:
        raise TypeError(f"a result must be a list of 5 values, but is {value!r}")
    outcome, bytes_read, file, error, message = value
    return LoadResult(
        outcome="loaded" if outcome == "loaded" else "damaged" if outcome == "damaged" else "failed",
        bytes_read=bytes_read if isinstance(bytes_read, int) else 0,
        file=file if isinstance(file, str) else None,
        error=str(error),
        message=str(message),
    )


@dataclass(frozen=True, slots=True)
class LoadAccepted:
    """All ranks have loaded it."""

    bytes_read: int


@dataclass(frozen=True, slots=True)
class LoadFailed:
    """At least one rank could not go on, for a reason that condemns no checkpoint."""

    error: str
    message: str
    files: tuple[str, ...] = ()
    """That could not be read, as far as ranks know."""


def rank_results(results: Sequence[LoadResult], *, folder: str) -> LoadAccepted | Reject | LoadFailed:
    """Damage that one rank has proved stands, whatever happened to the others."""
    damaged = [result for result in results if result.outcome == "damaged"]
    if damaged:
        reasons = list(dict.fromkeys(result.message for result in damaged))
        return Reject(folder, damaged[0].file, "; ".join(reasons))
    files = tuple(dict.fromkeys(result.file for result in results if result.outcome == "failed" and result.file))
    for rank, result in enumerate(results):
        if result.outcome == "failed":
            return LoadFailed(result.error, result.message if len(results) == 1 else f"rank {rank}: {result.message}", files)
    return LoadAccepted(sum(result.bytes_read for result in results))


def load_tensors(folder: CheckpointFolder, manifest: Manifest, *, tensors: Mapping[str, Tensor]) -> int:
    """Reads this rank's part of `tensors` in place; returns the bytes read. Collective: no.

    Raises: DamagedFileError, with some tensors loaded and others not; StorageError.
    """
    reader = ManifestReader(folder, manifest=manifest)
    # The load planner of DCP needs no word from other ranks: we drive it ourselves, so errors keep their type.
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    # Parts are filled from several threads, for each of which autograd would be on: it forbids some writes to what it follows.
    targets: dict[str, Any] = {name: tensor.detach() for name, tensor in tensors.items()}
    planner.set_up_planner(targets, metadata_of(manifest), is_coordinator=False)
    reader.read_data(planner.finish_plan(planner.create_local_plan()), planner).wait()
    return reader.bytes_read


def check_fit(manifest: Manifest, *, tensors: Mapping[str, Tensor], optional: Collection[str], where: str) -> None:
    """Raises: ConfigError naming the tensors if the checkpoint is of another model."""
    facts = {name: TensorFacts(dtype_name(tensor.dtype), tuple(tensor.shape)) for name, tensor in tensors.items()}
    mismatch = describe_mismatch(facts, manifest.tensors, optional=optional)
    if mismatch is not None:
        raise ConfigError(
            f"{where} is a checkpoint of another model or optimizer:{mismatch}\n"
            "Give the config that it was saved with, or another `run.dir` for a new run."
        )


class CheckpointLoader:
    """Loads candidates on one rank of a group."""

    def __init__(self, *, tensors: Mapping[str, Tensor], optional: Collection[str], group: dist.ProcessGroup | None) -> None:
        self._tensors = tensors
        self._optional = optional
        self._group = group
        self._rank = 0 if group is None else dist.get_rank(group)
        self._world_size = 1 if group is None else dist.get_world_size(group)
        self.touched = False
        """Whether tensors may hold parts of a candidate; the same on all ranks."""

    def check_fit(self, folder: CheckpointFolder, manifest: Manifest) -> list[LoadResult]:
        """Whether its headers are sound and it fits the state, before anything is overwritten; ranks share the headers.
        Collective: yes.
        """
        return self._outcome(lambda: self._check_fit(folder, manifest))

    def load(self, folder: CheckpointFolder, manifest: Manifest) -> list[LoadResult]:
        """Loads. Collective: yes."""
        self.touched = True
        return self._outcome(lambda: self._load(folder, manifest))

    def _outcome(self, act: Callable[[], int]) -> list[LoadResult]:
        try:
            result = LoadResult("loaded", bytes_read=act())
        except DamagedFileError as error:
            result = LoadResult("damaged", file=error.file, message=str(error))
        except InvalidCheckpointError as error:
            result = LoadResult("damaged", message=str(error))
        except Exception as error:
            # The others wait for this rank's result, whatever happened; all raise it then.
            if not isinstance(error, ElasticTrainError):
                logger.exception("a checkpoint could not be loaded")
            described = describe(error)
            file = error.file if isinstance(error, StorageError) else None
            result = LoadResult("failed", file=file, error=str(described["type"]), message=str(described["message"]))
        return [result_from_json(value) for value in gather_json(result.to_json(), group=self._group)]

    def _check_fit(self, folder: CheckpointFolder, manifest: Manifest) -> int:
        # First: a manifest whose tensors are not those of its files is damaged, and not of another model.
        verify_headers(folder, manifest, files=manifest.files[self._rank :: self._world_size])
        check_fit(manifest, tensors=self._tensors, optional=self._optional, where=folder.url("").rstrip("/"))
        return 0

    def _load(self, folder: CheckpointFolder, manifest: Manifest) -> int:
        wanted = {name: tensor for name, tensor in self._tensors.items() if name in manifest.tensors}
        return load_tensors(folder, manifest, tensors=wanted)
