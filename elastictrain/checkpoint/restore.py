"""Loads one checkpoint into the tensors of this rank, and casts this rank's vote."""

import logging
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner

from elastictrain.checkpoint.dcp_metadata import metadata_of
from elastictrain.checkpoint.exchange import describe, gather_json
from elastictrain.checkpoint.manifest import Manifest
from elastictrain.checkpoint.match import TensorFacts, describe_mismatch
from elastictrain.checkpoint.reader import ManifestReader
from elastictrain.checkpoint.tensor_bytes import dtype_name
from elastictrain.checkpoint.verified_read import DamagedFileError, Folder, verify_headers
from elastictrain.checkpoint.votes import Vote, vote_from_json
from elastictrain.errors import ConfigError, ElasticTrainError, InvalidCheckpointError, StorageError

logger = logging.getLogger(__name__)


def load_tensors(folder: Folder, manifest: Manifest, *, tensors: Mapping[str, Tensor]) -> int:
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


class Loader:
    """Loads candidates on one rank of a group."""

    def __init__(self, *, tensors: Mapping[str, Tensor], optional: Collection[str], group: dist.ProcessGroup | None) -> None:
        self._tensors = tensors
        self._optional = optional
        self._group = group
        self._rank = 0 if group is None else dist.get_rank(group)
        self._world_size = 1 if group is None else dist.get_world_size(group)
        self.touched = False
        """Whether tensors may hold parts of a candidate; the same on all ranks."""

    def fit_votes(self, folder: Folder, manifest: Manifest) -> list[Vote]:
        """Whether its headers are sound and it fits the state, before anything is overwritten; ranks share the headers.
        Collective: yes.
        """
        return self._vote(lambda: self._check_fit(folder, manifest))

    def load_votes(self, folder: Folder, manifest: Manifest) -> list[Vote]:
        """Loads. Collective: yes."""
        self.touched = True
        return self._vote(lambda: self._load(folder, manifest))

    def _vote(self, act: Callable[[], int]) -> list[Vote]:
        try:
            vote = Vote("loaded", bytes_read=act())
        except DamagedFileError as error:
            vote = Vote("damaged", file=error.file, message=str(error))
        except InvalidCheckpointError as error:
            vote = Vote("damaged", message=str(error))
        except Exception as error:
            # The others wait for this rank's vote, whatever happened; all raise it then.
            if not isinstance(error, ElasticTrainError):
                logger.exception("a checkpoint could not be loaded")
            described = describe(error)
            file = error.file if isinstance(error, StorageError) else None
            vote = Vote("failed", file=file, error=str(described["type"]), message=str(described["message"]))
        return [vote_from_json(value) for value in gather_json(vote.to_json(), group=self._group)]

    def _check_fit(self, folder: Folder, manifest: Manifest) -> int:
        # First: a manifest whose tensors are not those of its files is damaged, and not of another model.
        verify_headers(folder, manifest, files=manifest.files[self._rank :: self._world_size])
        check_fit(manifest, tensors=self._tensors, optional=self._optional, where=folder.url("").rstrip("/"))
        return 0

    def _load(self, folder: Folder, manifest: Manifest) -> int:
        wanted = {name: tensor for name, tensor in self._tensors.items() if name in manifest.tensors}
        return load_tensors(folder, manifest, tensors=wanted)
