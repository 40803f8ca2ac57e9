"""Formats that are written from the whole state in host memory: one file of torch.save, and a folder of stock DCP."""

import os
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, FileSystemWriter

from elastictrain.checkpoint.commands.export_source import Source
from elastictrain.checkpoint.commands.export_target import ExportTarget
from elastictrain.checkpoint.commands.texts import size_text
from elastictrain.errors import HostUnfitError
from elastictrain.storage.failures import fault_of, reason_of, storage_error
from elastictrain.storage.local import LocalStore
from elastictrain.storage.store import ObjectWriter, Store

FACTS = "elastictrain"
"""Beside the families of tensors (`model`, `optim`): step, world size, versions and state."""

_METADATA = ".metadata"
_PIECE_BYTES = 16 * 2**20


def write_torch(source: Source, target: ExportTarget) -> None:
    """One file that `torch.load` reads: `{"model": {name: tensor}, "optim": {...}, "elastictrain": {...}}`.

    The file appears when it is whole. Raises: DamagedFileError; HostUnfitError; StorageError.
    """
    check_memory(source.size_bytes, available_bytes=psutil.virtual_memory().available)
    # Opened first: a place that cannot be written to is better known before everything is read.
    with target.store.open_writer(target.file) as writer:
        torch.save(nested_state(source), _Stream(writer))  # type: ignore[arg-type]


def write_dcp(source: Source, target: ExportTarget) -> None:
    """A folder that `dcp.load` reads with its `FileSystemReader`; names are those of `write_torch`, joined by dots.

    `.metadata`, without which nobody reads it, is written last. A remote target needs room for all of it in the folder for
    temporary files.

    Raises: DamagedFileError; HostUnfitError; StorageError.
    """
    check_memory(source.size_bytes, available_bytes=psutil.virtual_memory().available)
    with _local_folder(target.store) as folder:
        state = nested_state(source)
        with warnings.catch_warnings(), _translated(target.url):
            warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
            dcp.save(state, storage_writer=FileSystemWriter(folder), no_dist=True)


def check_memory(needed_bytes: int, *, available_bytes: int) -> None:
    """Raises: HostUnfitError, rather than to be killed half-way."""
    if needed_bytes > available_bytes:
        raise HostUnfitError(
            f"this format needs all tensors in host memory at once, {size_text(needed_bytes)}, but only "
            f"{size_text(available_bytes)} are available; use --to safetensors, which needs one at a time, or another machine"
        )


def nested_state(source: Source) -> dict[str, object]:
    """All tensors by family and name, and the facts."""
    families: dict[str, dict[str, object]] = {}
    for name in source.manifest.tensors:
        family, _, rest = name.partition(".")
        families.setdefault(family, {})[rest] = source.read(name)
    return {**families, FACTS: source.facts}


class _Stream:
    """The part of a file that torch.save needs; it writes from the first byte to the last."""

    def __init__(self, writer: ObjectWriter) -> None:
        self._writer = writer

    def write(self, data: bytes | memoryview) -> int:
        self._writer.write(data)
        return memoryview(data).nbytes

    def flush(self) -> None:
        """What is written is with the writer already."""


@contextmanager
def _local_folder(store: Store) -> Iterator[str]:
    """The folder itself if it is on this machine; else one whose content is brought to the store at the end."""
    if isinstance(store, LocalStore):
        yield store.root
        return
    with tempfile.TemporaryDirectory(prefix="elastictrain-export-") as folder:
        yield folder
        for name in sorted(os.listdir(folder), key=lambda name: (name == _METADATA, name)):  # noqa: PTH208
            _upload(f"{folder}/{name}", store, name)


def _upload(path: str, store: Store, key: str) -> None:
    piece = memoryview(bytearray(_PIECE_BYTES))
    with open(path, "rb") as file, store.open_writer(key) as writer:  # noqa: PTH123
        while count := file.readinto(piece):
            writer.write(piece[:count])


@contextmanager
def _translated(url: str) -> Iterator[None]:
    """What the writer of DCP raises for a disk that is full or not ours, as an error of the store."""
    try:
        yield
    except OSError as error:
        raise storage_error(fault_of(error), action="write", url=url, reason=reason_of(error)) from error
    except CheckpointException as exception:
        for failure, _ in exception.failures.values():
            if isinstance(failure, OSError):
                raise storage_error(fault_of(failure), action="write", url=url, reason=reason_of(failure)) from exception
        raise
