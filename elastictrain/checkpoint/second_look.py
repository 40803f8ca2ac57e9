"""Second looks: what one answer of a store shows as wrong is asked for again before a checkpoint is condemned."""

import logging
from contextlib import suppress
from dataclasses import replace

from elastictrain.checkpoint.choose import Reject, missing_files
from elastictrain.checkpoint.folders import FolderFacts, key_of
from elastictrain.checkpoint.manifest import Manifest
from elastictrain.checkpoint.manifest_format import parse_manifest
from elastictrain.checkpoint.signing import SigningKey
from elastictrain.checkpoint.verified_read import Readable
from elastictrain.errors import (
    CheckpointError,
    InvalidCheckpointError,
    IrregularFileError,
    ObjectNotFoundError,
    ObjectTooLargeError,
)
from elastictrain.storage.bounded_read import DOCUMENT_BYTES, read_bounded
from elastictrain.storage.store import Store

logger = logging.getLogger(__name__)


def read_twice(store: Readable, key: str, *, where: str, signing: SigningKey | None = None) -> tuple[bytes, Manifest]:
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


def _read(store: Readable, key: str, *, where: str, signing: SigningKey | None) -> tuple[bytes, Manifest]:
    try:
        raw = read_bounded(store, key, most_bytes=DOCUMENT_BYTES)
    except ObjectTooLargeError as error:
        raise InvalidCheckpointError(str(error)) from error
    return raw, parse_manifest(raw, where=where, key=signing)
