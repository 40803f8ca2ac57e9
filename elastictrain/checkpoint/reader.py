"""Loads a checkpoint: DCP's StorageReader over it, and the load by all ranks with one common result.

Any script can load one: `dcp.load(state, storage_reader=ManifestReader.at(url))`.
"""

import logging
import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.distributed.tensor import DTensor
from torch.futures import Future

from elastictrain.checkpoint.exchange import describe, gather_records
from elastictrain.checkpoint.manifest import MANIFEST_NAME, PER_RANK, ChunkRecord, Manifest, TensorRecord
from elastictrain.checkpoint.signing import SigningKey, load_key
from elastictrain.checkpoint.tensor_bytes import copy_bytes, dtype_name, dtype_named, overlap, tensor_over
from elastictrain.checkpoint.verified_read import (
    CheckpointFolder,
    DamagedFileError,
    read_chunks,
    read_parts,
    retry_read,
    verify_headers,
)
from elastictrain.errors import (
    ConfigError,
    ElasticTrainError,
    InvalidCheckpointError,
    ObjectNotFoundError,
    Problem,
    StorageError,
)
from elastictrain.storage.opening import open_store
from elastictrain.torch_private import local_box

logger = logging.getLogger(__name__)

NAMED_AT_MOST = 8


def _buffers_for_device() -> Callable[[int], bytearray | memoryview]:
    """Makes read buffers: page-locked if this process uses a device, which then fetches the bytes itself. Its driver copies
    pageable memory once more, for one thread after the other."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return bytearray
    device = torch.cuda.current_device()

    def allocate(size_bytes: int) -> bytearray | memoryview:
        try:
            # A new thread would use device 0, not the device of this process.
            with torch.cuda.device(device):
                return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True).numpy().data
        except (RuntimeError, AssertionError) as error:
            logger.warning("host memory cannot be page-locked, so the restore takes longer: %s", error)
            return bytearray(size_bytes)

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

        If `key_env` names a variable, the checkpoint must be signed with the key in it. Raises: ValueError if it holds no key.
        """
        return cls(CheckpointFolder(open_store(url), ""), signing=load_key(key_env))

    @property
    def manifest(self) -> Manifest:
        """With all its parts, read at first use. Raises: InvalidCheckpointError, UnknownFormatError, StorageError."""
        self._manifest = read_parts(self._folder, self.root)
        return self._manifest

    @property
    def root(self) -> Manifest:
        """Without its parts, read at first use. Raises: as `manifest`."""
        if self._manifest is None:
            key = f"{self._folder.prefix}{MANIFEST_NAME}"
            try:
                _, self._manifest = retry_read(self._folder.store, key, signing=self._signing)
            except ObjectNotFoundError as error:
                url = self._folder.url(MANIFEST_NAME)
                raise InvalidCheckpointError(f"{url} is not there: this is no checkpoint, or not a whole one") from error
        return self._manifest

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
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
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read and verify each chunk once; done on return. Raises: DamagedFileError, partly loaded; as `manifest`."""
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

        copying: set[torch.device] = set()

        def take(chunk: ChunkRecord, data: memoryview, *, non_blocking: bool = False) -> None:
            """Copy a verified chunk to all items that are part of it, or only begin to. Called by the threads of `read_chunks`,
            which copy on the default stream of a device."""
            for item in wanted[chunk]:
                source = tensor_over(data, dtype=tensors[item.storage_index.fqn].dtype, sizes=chunk.sizes)
                for dim, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                    source = source.narrow(dim, offset, length)
                target = planner.resolve_tensor(item).detach()
                if target.is_cuda and source.numel():
                    whole = target.is_contiguous() and source.is_contiguous()
                    onto = target if whole else torch.empty_like(source, device=target.device)
                    flat, data_of = onto.reshape(-1).view(torch.uint8), source.reshape(-1).view(torch.uint8)
                    copy_bytes(flat, data_of, non_blocking=non_blocking and whole)
                    copying.add(target.device)
                    source = onto
                if source is not target:
                    target.copy_(source)
                planner.commit_tensor(item, target)

        begin, allocate = partial(take, non_blocking=True), _buffers_for_device()
        try:
            self.bytes_read += read_chunks(self._folder, wanted, take=take, take_mapped=begin, allocate=allocate)
        finally:
            for device in copying:
                # Also after an error: the bytes may soon be others. Not the whole device: NCCL may wait there for other ranks.
                torch.cuda.default_stream(device).synchronize()
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Never chosen by URL: an instance knows its folder."""
        return False


def describe_mismatch(tensors: Mapping[str, Tensor], stored: Mapping[str, TensorRecord]) -> str | None:
    """What differs, a line per tensor; None if the checkpoint fits. Pure.

    A stored name that the run lacks (a layer was removed) counts, too, in the families that the run has: the part before the
    first dot, such as `model`.
    """
    families = {name.partition(".")[0] for name in tensors}
    removed = [name for name in sorted(stored.keys() - tensors.keys()) if name.partition(".")[0] in families]
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


@dataclass(frozen=True, slots=True)
class LoadResult:
    """The load of one rank or of all: `damaged` is the checkpoint's fault, `failed` the store's, the model's or our own."""

    outcome: Literal["loaded", "damaged", "failed"]
    bytes_read: int = 0
    files: tuple[str, ...] = ()  # that are damaged or could not be read, as far as known
    error: str = ""  # class of the error, if it failed
    message: str = ""


def result_of_all(results: Sequence[LoadResult]) -> LoadResult:
    """Damage that one rank has proved outweighs other failures. Pure."""
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


def parts_of(manifest: Manifest, tensors: Mapping[str, Tensor]) -> set[int]:
    """The parts of the manifest with chunks of what this rank has of `tensors`. Collective: no."""
    found: set[int] = set()
    seen: set[tuple[int, tuple[int, ...], tuple[int, ...]]] = set()
    for name in tensors.keys() & manifest.tensors.keys():
        tensor, stored = tensors[name], manifest.tensors[name]
        # One of another shape is an error that comes later.
        if stored.boxes is None or stored.shape != (shape := tuple(tensor.shape)):
            continue
        sizes, offsets = local_box(tensor) if isinstance(tensor, DTensor) else (shape, (0,) * len(shape))
        if (place := (stored.boxes, offsets, sizes)) not in seen:
            seen.add(place)
            boxes = manifest.boxes[stored.boxes]
            found |= {box.part for box in boxes if overlap(box, offsets=offsets, sizes=sizes) is not None}
    return found


def load_tensors(folder: CheckpointFolder, manifest: Manifest, *, tensors: Mapping[str, Tensor]) -> int:
    """Read into `tensors`; returns the bytes read. Collective: no. Raises: DamagedFileError, partly loaded; StorageError."""
    reader = ManifestReader(folder, manifest=read_parts(folder, manifest, numbers=parts_of(manifest, tensors)))
    # DCP's load planner needs no other rank. We drive it ourselves, so errors keep their type.
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    # Several threads write the parts. Autograd is on in each new thread and forbids some writes to tensors that it tracks.
    targets: dict[str, Any] = {name: tensor.detach() for name, tensor in tensors.items()}
    planner.set_up_planner(targets, reader.read_metadata(), is_coordinator=False)
    reader.read_data(planner.finish_plan(planner.create_local_plan()), planner).wait()
    return reader.bytes_read


def load(
    folder: CheckpointFolder, manifest: Manifest, *, tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None
) -> LoadResult:
    """Load on all ranks of `group`. Nothing is overwritten before the headers and the fit are checked. Collective: yes."""
    rank, world_size = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    known = manifest

    def check_fit() -> int:
        """Sets `known`. Raises: DamagedFileError, StorageError; ConfigError if model, optimizer or world size do not fit."""
        # Each rank checks its share of the headers, neighbours together: in a world like the one that saved, its own part of
        # the manifest has them. This first: a manifest whose tensors are not those of its files is damaged, and not of another
        # model.
        nonlocal known
        files = [(file.name, -1) for file in manifest.files]
        files += [(name, number) for number, part in enumerate(manifest.parts) for name in part.files]
        share = dict(files[len(files) * rank // world_size : len(files) * (rank + 1) // world_size])
        known = read_parts(folder, manifest, numbers=parts_of(manifest, tensors) | ({*share.values()} - {-1}))
        verify_headers(folder, known, files=[file for file in known.files if file.name in share])
        for name in sorted(one for one in tensors.keys() & manifest.tensors.keys() if one.endswith(PER_RANK)):
            if (ranks := manifest.tensors[name].shape[0]) != world_size:
                message = (
                    f"has a place for each rank, and {folder.url('').rstrip('/')} has those of {ranks}, but there are "
                    f"{world_size} ranks: start {ranks}, or read by `SampleOrder`, which goes on with any number"
                )
                raise ConfigError([Problem(name.removesuffix(PER_RANK), message)])
        if (mismatch := describe_mismatch(tensors, manifest.tensors)) is not None:
            raise ConfigError(
                f"{folder.url('').rstrip('/')} is a checkpoint of another model or optimizer:{mismatch}\n"
                "Give the config that it was saved with, or another `run.dir` for a new run."
            )
        return 0

    checked = _together(check_fit, group=group)
    if checked.outcome != "loaded":
        return checked
    return _together(lambda: load_tensors(folder, known, tensors=tensors), group=group)


def _together(act: Callable[[], int], *, group: dist.ProcessGroup | None) -> LoadResult:
    try:
        result = LoadResult("loaded", bytes_read=act())
    except InvalidCheckpointError as error:
        files = (error.file,) if isinstance(error, DamagedFileError) else ()
        result = LoadResult("damaged", files=files, message=str(error))
    except Exception as error:
        # The other ranks wait for this rank's result, whatever happened.
        if not isinstance(error, ElasticTrainError):
            logger.exception("a checkpoint could not be loaded")
        described = describe(error)
        files = (error.file,) if isinstance(error, StorageError) and error.file else ()
        result = LoadResult("failed", files=files, error=str(described["type"]), message=str(described["message"]))
    return result_of_all(gather_records(result, group=group))
