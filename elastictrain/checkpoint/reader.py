"""DCP's StorageReader over a checkpoint: `dcp.load(state, storage_reader=ManifestReader.at(url))` from any script."""

import logging
import os
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from elastictrain.checkpoint.manifest import MANIFEST_NAME, ChunkRecord, Manifest
from elastictrain.checkpoint.signing import SigningKey, load_key
from elastictrain.checkpoint.tensor_bytes import dtype_named, tensor_over
from elastictrain.checkpoint.verified_read import CheckpointFolder, plain_buffer, read_chunks, retry_read
from elastictrain.errors import InvalidCheckpointError, ObjectNotFoundError
from elastictrain.storage.opening import open_store

logger = logging.getLogger(__name__)


def _buffers_for_device() -> Callable[[int], memoryview]:
    """What makes buffers to read into. Page-locked where this process uses a device, which then fetches the bytes by itself:
    what is pageable, its driver copies once more, for one thread after the other."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return plain_buffer
    device = torch.cuda.current_device()

    def allocate(size_bytes: int) -> memoryview:
        try:
            # A new thread would begin to use the first device, whichever is this process's.
            with torch.cuda.device(device):
                return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True).numpy().data
        except (RuntimeError, AssertionError) as error:
            logger.warning("host memory cannot be page-locked, so the restore takes longer: %s", error)
            return plain_buffer(size_bytes)

    return allocate


class ManifestReader(StorageReader):
    """Reads the tensors of one checkpoint, each byte verified before it reaches a tensor."""

    def __init__(
        self, folder: CheckpointFolder, *, manifest: Manifest | None = None, signing: SigningKey | None = None
    ) -> None:
        self._signing = signing
        self._folder = folder
        self._manifest = manifest
        self.bytes_read = 0

    @classmethod
    def at(cls, url: str, *, key_env: str = "") -> "ManifestReader":
        """The checkpoint in the folder `url`, such as `s3://bucket/run/checkpoints/step-000000400`.

        With `key_env`, the name of an environment variable with the run's key, it must be signed with that.

        Raises: ValueError if that variable holds no key.
        """
        return cls(CheckpointFolder(open_store(url), ""), signing=load_key(key_env))

    @property
    def manifest(self) -> Manifest:
        """Read at first use.

        Raises: InvalidCheckpointError, UnknownFormatError, StorageError.
        """
        if self._manifest is None:
            key = f"{self._folder.prefix}{MANIFEST_NAME}"
            try:
                _, self._manifest = retry_read(self._folder.store, key, signing=self._signing)
            except ObjectNotFoundError as error:
                url = self._folder.url(MANIFEST_NAME)
                raise InvalidCheckpointError(f"{url} is not there: this is no checkpoint, or not a whole one") from error
        return self._manifest

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begins another load."""
        self.bytes_read = 0

    def read_metadata(self) -> Metadata:
        """What DCP's load planners need. Names are flat, so there is no planner data."""
        stored: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        for name, tensor in self.manifest.tensors.items():
            chunks = [ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes)) for chunk in tensor.chunks]
            properties = TensorProperties(dtype=dtype_named(tensor.dtype))
            stored[name] = TensorStorageMetadata(properties=properties, size=torch.Size(tensor.shape), chunks=chunks)
        return Metadata(stored)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Ranks read independently of each other."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads what this rank needs into its tensors."""
        tensors = self.manifest.tensors
        chunk_at = {
            (name, chunk.offsets): chunk
            for name in {item.storage_index.fqn for item in plan.items}
            for chunk in tensors[name].chunks
            if chunk.size_bytes
        }
        wanted: dict[ChunkRecord, list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            chunk = chunk_at.get((item.storage_index.fqn, tuple(item.storage_index.offset or ())))
            if chunk is not None:
                wanted[chunk].append(item)

        def take(chunk: ChunkRecord, data: memoryview) -> None:
            for item in wanted[chunk]:
                source = tensor_over(data, dtype=tensors[item.storage_index.fqn].dtype, sizes=chunk.sizes)
                for dim, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                    source = source.narrow(dim, offset, length)
                target = planner.resolve_tensor(item).detach()
                target.copy_(source)
                planner.commit_tensor(item, target)

        self.bytes_read += read_chunks(self._folder, wanted, take=take, allocate=_buffers_for_device())
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Never chosen by URL: an instance knows its folder."""
        return False
