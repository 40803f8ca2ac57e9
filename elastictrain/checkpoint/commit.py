"""Makes the files of all ranks a checkpoint, by creating its manifest. Free of torch."""

from collections.abc import Iterable
from dataclasses import replace

from elastictrain.checkpoint.folders import ROOT, key_of, read_listing
from elastictrain.checkpoint.layout import Item
from elastictrain.checkpoint.manifest import MANIFEST_NAME, ChunkRecord, FileRecord, Manifest, TensorRecord
from elastictrain.checkpoint.manifest_format import encode_manifest
from elastictrain.checkpoint.signing import SigningKey
from elastictrain.checkpoint.writer import WrittenItem
from elastictrain.errors import CheckpointError, ObjectExistsError, StorageError, TransientStorageError
from elastictrain.storage.store import Store


def build_manifest(written: Iterable[WrittenItem], *, facts: Manifest) -> Manifest:
    """Adds what all ranks wrote to `facts`, a manifest that has no files and tensors yet.

    Raises: CheckpointError if ranks disagree on a tensor's shape or element type.
    """
    files: dict[str, FileRecord] = {}
    first: dict[str, Item] = {}
    chunks: dict[str, list[ChunkRecord]] = {}
    for one in written:
        files[one.file.name] = one.file
        item = one.item
        known = first.setdefault(item.name, item)
        if (known.dtype, known.shape) != (item.dtype, item.shape):
            raise CheckpointError(
                f"ranks disagree on tensor {item.name!r}: {known.dtype}{known.shape} and {item.dtype}{item.shape}"
            )
        chunks.setdefault(item.name, []).extend(one.chunks)
    return replace(
        facts,
        files=tuple(files[name] for name in sorted(files)),
        tensors={name: TensorRecord(first[name].dtype, first[name].shape, tuple(chunks[name])) for name in sorted(first)},
    )


def check_files(store: Store, manifest: Manifest, *, folder: str) -> None:
    """Looks for every file, with its size, before the commit.

    Raises: CheckpointError if one is not there: another incarnation took the folder. StorageError.
    """
    listed = read_listing(store.list(f"{ROOT}/{folder}")).folder(folder)
    present = listed.files if listed is not None else {}
    for file in manifest.files:
        if present.get(file.name) != file.size_bytes:
            raise CheckpointError(
                f"{store.url}/{key_of(folder, file.name)} must have {file.size_bytes} bytes before the commit, but has "
                f"{present.get(file.name, 'been removed')}; is another run using this folder?"
            )


def commit(store: Store, manifest: Manifest, *, folder: str, signing: SigningKey | None = None) -> None:
    """Creates the manifest, signed if there is a key. After an error it may be there or not.

    Raises: CheckpointError, StorageError.
    """
    raw = encode_manifest(manifest, key=signing)
    key = key_of(folder, MANIFEST_NAME)
    try:
        store.create(key, raw)
    except (ObjectExistsError, TransientStorageError):
        # The answer to a create that succeeded can be lost; its repetition then finds the object there. Only its bytes tell
        # whether it is ours.
        if not _holds(store, key, raw):
            raise
    if store.read(key, end=len(raw) + 1) != raw:
        raise CheckpointError(f"{store.url}/{key} does not read back as it was written")


def _holds(store: Store, key: str, raw: bytes) -> bool:
    try:
        return store.read(key, end=len(raw) + 1) == raw
    except StorageError:
        return False
