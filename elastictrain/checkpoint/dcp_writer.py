"""DCP's StorageWriter over a Store: shard files by every rank, then the manifest by one."""

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from elastictrain.checkpoint.commit import build_manifest, check_files, commit
from elastictrain.checkpoint.dcp_metadata import item_of
from elastictrain.checkpoint.fence import Fence
from elastictrain.checkpoint.folders import ROOT
from elastictrain.checkpoint.layout import Item, plan_files
from elastictrain.checkpoint.manifest import Manifest
from elastictrain.checkpoint.signing import SigningKey
from elastictrain.checkpoint.tensor_bytes import reader_of
from elastictrain.checkpoint.writer import ByteReader, WrittenItem, write_files
from elastictrain.errors import CheckpointError
from elastictrain.storage.store import Store


@dataclass(frozen=True, slots=True)
class WriterOptions:
    """How one rank writes."""

    rank: int
    shard_bytes: int
    signing: SigningKey | None = None
    """Signs the manifest."""


class ManifestWriter(StorageWriter):
    """Writes one checkpoint into one folder; for one call of `dcp.save`."""

    def __init__(self, store: Store, *, folder: str, facts: Manifest, options: WriterOptions, fence: Fence) -> None:
        self._store = store
        self._fence = fence
        self._folder = folder
        self._facts = facts
        self._options = options
        self.committing = False
        """Whether the manifest may exist by now; on the committing rank."""
        self.manifest: Manifest | None = None
        """On the committing rank, once committed."""
        self.seconds: dict[str, float] = {}
        """Duration of `plan`, `write` (with the wait for other ranks) and `commit`, on the committing rank."""
        self._mark = time.monotonic()

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing is left over: an instance writes once."""
        self._mark = time.monotonic()

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Ranks play the same part until `finish`."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """The plan as it is: layout is decided when duplicates are out of it."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """The plans as they are: ranks' files do not depend on each other."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes this rank's files; they are durable when it returns."""
        self._end_phase("plan")
        planned = {item_of(entry): entry for entry in plan.items}

        def open_item(item: Item) -> ByteReader:
            tensor = planner.resolve_data(planned[item])
            if not isinstance(tensor, Tensor):
                raise CheckpointError(f"{item.name!r} was planned as a tensor, but is a {type(tensor).__name__}")
            return reader_of(tensor, item)

        files = plan_files(
            list(planned),
            incarnation=self._facts.incarnation,
            rank=self._options.rank,
            shard_bytes=self._options.shard_bytes,
            metadata={"format": "pt", "step": str(self._facts.step), "incarnation": self._facts.incarnation},
        )
        written = write_files(
            self._store, files, prefix=f"{ROOT}/{self._folder}", source=open_item, sha256=self._options.signing is not None
        )
        future: Future[list[WriteResult]] = Future()
        future.set_result([WriteResult(planned[one.item].index, one.item.size_bytes, one) for one in written])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commits what all ranks wrote."""
        self._end_phase("write")
        manifest = build_manifest(_written(results), facts=self._facts)
        if manifest.tensors.keys() != metadata.state_dict_metadata.keys():
            lost = sorted(manifest.tensors.keys() ^ metadata.state_dict_metadata.keys())
            raise CheckpointError(f"planned and written tensors differ: {', '.join(lost)}")
        check_files(self._store, manifest, folder=self._folder)
        self._fence.check(self._facts.incarnation, step=self._facts.step)
        self.committing = True
        commit(self._store, manifest, folder=self._folder, signing=self._options.signing)
        self.manifest = manifest
        self._end_phase("commit")

    def _end_phase(self, phase: str) -> None:
        now = time.monotonic()
        self.seconds[phase] = now - self._mark
        self._mark = now

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Never chosen by URL: an instance knows its folder."""
        return False


def _written(results: list[list[WriteResult]]) -> Iterable[WrittenItem]:
    for of_rank in results:
        for result in of_rank:
            written: WrittenItem = result.storage_data
            yield written
