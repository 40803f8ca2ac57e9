"""What a checkpoint shows before its tensors are read. What one answer of a store shows as wrong is asked for again.

Whoever takes, lists or deletes checkpoints asks here, so that a start takes what `verify` calls valid, and nothing else.
"""

import logging
from contextlib import suppress
from dataclasses import dataclass, replace

from elastictrain.checkpoint.folders import FolderFacts, key_of
from elastictrain.checkpoint.manifest import MANIFEST_NAME, Manifest
from elastictrain.checkpoint.manifest_format import parse_manifest
from elastictrain.checkpoint.select_checkpoint import Reject, missing_files
from elastictrain.checkpoint.signing import SigningKey
from elastictrain.checkpoint.verified_read import ReadableStore
from elastictrain.errors import (
    CheckpointError,
    InvalidCheckpointError,
    IrregularFileError,
    ObjectNotFoundError,
    ObjectTooLargeError,
    UntrustedCheckpointError,
)
from elastictrain.storage.bounded_read import DOCUMENT_BYTES, read_bounded
from elastictrain.storage.store import Store

logger = logging.getLogger(__name__)


def retry_read(store: ReadableStore, key: str, *, where: str, signing: SigningKey | None = None) -> tuple[bytes, Manifest]:
    """A manifest and its bytes; read again if it is wrong, as a transfer can garble what is whole in the store.

    Raises: InvalidCheckpointError (UntrustedCheckpointError where there is a key) or UnknownFormatError, if it is so twice;
    ObjectNotFoundError; StorageError.
    """
    try:
        return _read(store, key, where=where, signing=signing)
    except (CheckpointError, ObjectNotFoundError) as error:
        found = _read(store, key, where=where, signing=signing)
        logger.warning("read wrong once, and right again: %s", error)
        return found


def find_missing(store: Store, manifest: Manifest, *, folder: FolderFacts) -> Reject | None:
    """The first file that neither the listing nor the store, asked for it, has in its size.

    Raises: StorageError.
    """
    if missing_files(manifest, folder) is None:
        return None
    # A listing can lag behind what was written.
    sizes: dict[str, int] = {}
    for file in manifest.files:
        with suppress(ObjectNotFoundError, IrregularFileError):
            sizes[file.name] = store.stat(key_of(folder.name, file.name)).size_bytes
    return missing_files(manifest, replace(folder, files=sizes))


def is_there(store: Store, key: str) -> bool:
    """Whether the store, asked for it, has the object, or a file system something else of that name. Raises: StorageError."""
    try:
        store.stat(key)
    except ObjectNotFoundError:
        return False
    except IrregularFileError:
        return True
    return True


def _read(store: ReadableStore, key: str, *, where: str, signing: SigningKey | None) -> tuple[bytes, Manifest]:
    try:
        raw = read_bounded(store, key, most_bytes=DOCUMENT_BYTES)
    except ObjectTooLargeError as error:
        raise InvalidCheckpointError(str(error)) from error
    return raw, parse_manifest(raw, where=where, key=signing)


@dataclass(frozen=True, slots=True)
class Examined:
    """A committed folder. It is taken if `reject` is None; `manifest` and its bytes are there if that can be read."""

    manifest: Manifest | None
    raw: bytes
    reject: Reject | None


def examine(store: Store, folder: FolderFacts, *, signing: SigningKey | None = None) -> Examined:
    """Whether the manifest of a folder is valid, of the folder's step, and all files are there in their sizes; and, if there is
    a key, whether it is signed with that.

    Raises: ObjectNotFoundError if the manifest is gone; UnknownFormatError; StorageError.
    """
    key = key_of(folder.name, MANIFEST_NAME)
    where = f"{store.url}/{key}"
    try:
        raw, manifest = retry_read(store, key, where=where, signing=signing)
    except InvalidCheckpointError as error:
        lasting = not isinstance(error, UntrustedCheckpointError)
        return Examined(None, b"", Reject(folder.name, MANIFEST_NAME, str(error), lasting=lasting))
    if manifest.step != folder.step:
        moved = f"{where} is of step {manifest.step}: files were moved"
        return Examined(manifest, raw, Reject(folder.name, MANIFEST_NAME, moved))
    return Examined(manifest, raw, find_missing(store, manifest, folder=folder))
