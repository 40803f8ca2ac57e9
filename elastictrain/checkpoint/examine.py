"""What a checkpoint shows before the bytes of its tensors are read. Whoever takes, lists or deletes checkpoints asks here, so
that a start takes what `verify` calls valid, and nothing else."""

from dataclasses import dataclass

from elastictrain.checkpoint.choose import Reject
from elastictrain.checkpoint.folders import FolderFacts, key_of
from elastictrain.checkpoint.manifest import MANIFEST_NAME, Manifest
from elastictrain.checkpoint.second_look import find_missing, read_twice
from elastictrain.checkpoint.signing import SigningKey
from elastictrain.errors import InvalidCheckpointError, UntrustedCheckpointError
from elastictrain.storage.store import Store


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
        raw, manifest = read_twice(store, key, where=where, signing=signing)
    except InvalidCheckpointError as error:
        lasting = not isinstance(error, UntrustedCheckpointError)
        return Examined(None, b"", Reject(folder.name, MANIFEST_NAME, str(error), lasting=lasting))
    if manifest.step != folder.step:
        moved = f"{where} is of step {manifest.step}: files were moved"
        return Examined(manifest, raw, Reject(folder.name, MANIFEST_NAME, moved))
    return Examined(manifest, raw, find_missing(store, manifest, folder=folder))
