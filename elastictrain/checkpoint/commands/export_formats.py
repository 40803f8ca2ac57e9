"""The source and target of an export, and the writers of safetensors, torch and DCP files."""

import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass

import psutil
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException, FileSystemWriter

from elastictrain.checkpoint.commands.output import size_text
from elastictrain.checkpoint.commands.survey import Checkpoint, split_url
from elastictrain.checkpoint.folders import is_there
from elastictrain.checkpoint.layout import grouped
from elastictrain.checkpoint.manifest import Manifest
from elastictrain.checkpoint.safetensors_format import BY_NAME, encode_header
from elastictrain.checkpoint.tensor_bytes import dtype_name, dtype_named, read_tensor
from elastictrain.errors import HostUnfitError, UsageError
from elastictrain.storage.failures import fault_of, reason_of, storage_error
from elastictrain.storage.local import LocalStore
from elastictrain.storage.opening import open_store
from elastictrain.storage.store import ObjectWriter, Store

MODEL = "model."  # prefix of the names of the model's tensors
AVERAGE = "ema."  # of the averages of its parameters, where the run has kept them


@dataclass(frozen=True, slots=True)
class ExportSource:
    """One checkpoint. `dtype` is for the model's floating-point tensors and averages; None keeps the stored one."""

    checkpoint: Checkpoint
    dtype: torch.dtype | None
    advance: Callable[[int], None]

    @property
    def manifest(self) -> Manifest:
        return self.checkpoint.manifest

    def read(self, name: str) -> Tensor:
        """The whole tensor, on the CPU. Raises: DamagedFileError, StorageError."""
        tensor = read_tensor(self.checkpoint.folder, self.manifest.tensors[name])
        self.advance(1)
        return tensor.to(dtype_named(self.dtype_of(name)))

    def dtype_of(self, name: str) -> str:
        stored = self.manifest.tensors[name].dtype
        if self.dtype is None or not name.startswith((MODEL, AVERAGE)) or not dtype_named(stored).is_floating_point:
            return stored
        return dtype_name(self.dtype)

    def size_bytes_of(self, name: str) -> int:
        return torch.Size(self.manifest.tensors[name].shape).numel() * BY_NAME[self.dtype_of(name)].size_bytes


@dataclass(frozen=True, slots=True)
class ExportTarget:
    """A folder (`file` is empty), or one file in it."""

    url: str
    store: Store
    file: str = ""

    def clear(self) -> None:
        """Delete what an export has written so far. Raises: StorageError."""
        for info in [] if self.file else list(self.store.list()):
            self.store.delete(info.key)


def folder_target(url: str) -> ExportTarget:
    """An empty folder: readers could mix up two exports. Raises: UsageError if it is not empty; ConfigError; StorageError."""
    store = open_store(url)
    if (present := next(iter(store.list()), None)) is not None:
        raise UsageError(f"{store.url} must be empty, but holds {present.key}; choose another folder, or delete it")
    return ExportTarget(url, store)


def file_target(url: str) -> ExportTarget:
    """A file that does not exist. Raises: UsageError; ConfigError; StorageError."""
    name, parent = split_url(url)
    if not name or url.endswith("/"):
        raise UsageError(f"--to torch writes one file, so OUT must be the name of a file, but is {url}")
    store = open_store(parent)
    folder_there = isinstance(store, LocalStore) and os.path.isdir(store.path(name))  # noqa: PTH112
    if folder_there or next(iter(store.list(name)), None) is not None:
        raise UsageError(f"--to torch writes one file, but {url} is a folder; give a name such as {url}/checkpoint.pt")
    if is_there(store, name):
        raise UsageError(f"{url} must not exist, but does; choose another name, or delete it")
    return ExportTarget(url, store, name)


INDEX = "model.safetensors.index.json"
SHARD_BYTES = 5 * 10**9  # most bytes of a file, unless one tensor is larger


def write_safetensors(source: ExportSource, target: ExportTarget, *, shard_bytes: int = SHARD_BYTES) -> None:
    """`model.safetensors`, or several files and, last, their index. Raises: DamagedFileError; StorageError."""
    sizes = {name: source.size_bytes_of(name) for name in source.manifest.tensors}
    plan = plan_shards(sizes, shard_bytes=shard_bytes)
    for file, names in plan.items():
        # Wide elements first, so that all are aligned.
        ordered = sorted(names, key=lambda name: (-BY_NAME[source.dtype_of(name)].size_bytes, name))
        with target.store.open_writer(file) as writer:
            entries = [(name, source.dtype_of(name), source.manifest.tensors[name].shape) for name in ordered]
            writer.write(encode_header(entries, metadata={"format": "pt", "step": str(source.manifest.step)}))
            for name in ordered:
                writer.write(source.read(name).contiguous().reshape(-1).view(torch.uint8).numpy().data)
    if len(plan) > 1:
        weight_map = {name: file for file, names in plan.items() for name in names}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        target.store.write(INDEX, json.dumps(index, indent=2).encode() + b"\n")


def plan_shards(sizes: Mapping[str, int], *, shard_bytes: int) -> dict[str, list[str]]:
    """The names of the tensors in each file, from the bytes of each tensor. Pure."""
    groups = grouped(sizes.keys(), sizes.values(), max_bytes=shard_bytes) or [[]]
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {f"model-{number:05d}-of-{len(groups):05d}.safetensors": group for number, group in enumerate(groups, 1)}


FACTS = "elastictrain"  # beside the families of tensors (`model`, `optim`): step, world size, versions and state
_METADATA = ".metadata"
_PIECE_BYTES = 16 * 2**20


def write_torch(source: ExportSource, target: ExportTarget) -> None:
    """One file that `torch.load` reads: `{"model": {name: tensor}, "optim": {...}, "elastictrain": {...}}`.

    The file appears when it is complete. Raises: DamagedFileError; HostUnfitError; StorageError.
    """
    # Opened first: a target that refuses writes fails before everything is read.
    with target.store.open_writer(target.file) as writer:
        torch.save(nested_state(source), _Stream(writer))  # type: ignore[arg-type]


def write_dcp(source: ExportSource, target: ExportTarget) -> None:
    """A folder that `dcp.load` reads with its `FileSystemReader`; names are those of `write_torch`, joined by dots.

    `.metadata`, which every reader needs, is written last. For a remote target the folder for temporary files needs room for
    all of it. Raises: DamagedFileError; HostUnfitError; StorageError.
    """
    with ExitStack() as stack:
        store = target.store
        if isinstance(store, LocalStore):
            folder = store.root
        else:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="elastictrain-export-"))
        state = nested_state(source)
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
                dcp.save(state, storage_writer=FileSystemWriter(folder), no_dist=True)
        except (OSError, CheckpointException) as error:
            # DCP's writer met a full disk, or has no permission.
            failures = [error] if isinstance(error, OSError) else [failure for failure, _ in error.failures.values()]
            for failure in failures:
                if isinstance(failure, OSError):
                    reason = reason_of(failure)
                    raise storage_error(fault_of(failure), action="write", url=target.url, reason=reason) from error
            raise
        if not isinstance(store, LocalStore):
            for name in sorted(os.listdir(folder), key=lambda name: (name == _METADATA, name)):  # noqa: PTH208
                with open(f"{folder}/{name}", "rb") as file, store.open_writer(name) as writer:  # noqa: PTH123
                    shutil.copyfileobj(file, writer, _PIECE_BYTES)


def nested_state(source: ExportSource) -> dict[str, object]:
    """All tensors by family and name, and `FACTS`. Raises: HostUnfitError if memory is too small."""
    manifest = source.manifest
    needed_bytes = sum(source.size_bytes_of(name) for name in manifest.tensors)
    available_bytes = psutil.virtual_memory().available
    if needed_bytes > available_bytes:
        raise HostUnfitError(
            f"this format needs all tensors in host memory at once, {size_text(needed_bytes)}, but only "
            f"{size_text(available_bytes)} are available; use --to safetensors, which needs one at a time, or another machine"
        )
    families: dict[str, dict[str, object]] = {}
    for name in manifest.tensors:
        family, _, rest = name.partition(".")
        families.setdefault(family, {})[rest] = source.read(name)
    facts = {
        "step": manifest.step,
        "world_size": manifest.world_size,
        "config_digest": manifest.config_digest,
        "versions": dict(manifest.versions),
        "state": dict(manifest.state),
    }
    return {**families, FACTS: facts}


@dataclass(frozen=True, slots=True)
class _Stream:
    """The part of a file that torch.save needs; torch writes it from the first byte to the last."""

    writer: ObjectWriter

    def write(self, data: bytes | memoryview) -> int:
        self.writer.write(data)
        return memoryview(data).nbytes

    def flush(self) -> None:
        """Nothing is buffered here."""
