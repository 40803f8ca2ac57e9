"""Writes shard files through a store, and commits the files of all ranks as a checkpoint by creating its manifest.

Free of torch: bytes come from a `ByteSource`. Synchronous saves and the saver both write here.
"""

from collections.abc import Callable, Iterable, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace

import xxhash

from elastictrain.checkpoint.folders import ROOT, Listing, discard_files, key_of, read_listing
from elastictrain.checkpoint.layout import Item, ShardFile
from elastictrain.checkpoint.lineage import Fence
from elastictrain.checkpoint.manifest import (
    MANIFEST_NAME,
    ChunkRecord,
    FileRecord,
    Manifest,
    TensorRecord,
    digest_of,
    sha256_of,
)
from elastictrain.checkpoint.manifest_format import check_manifest, encode_manifest
from elastictrain.checkpoint.manifest_parts import PART_SUFFIX, ManifestPart, WrittenPart, encode_part, with_written
from elastictrain.checkpoint.memory.layout import RankDigests, RankPart, joined
from elastictrain.checkpoint.retention import Pruner
from elastictrain.checkpoint.signing import SigningKey
from elastictrain.errors import CheckpointError, ObjectExistsError, StorageError, TransientStorageError
from elastictrain.events import CheckpointsPruned, Event
from elastictrain.storage.store import Store

FILES_AT_ONCE = 4

ByteReader = Callable[[int, int], memoryview]  # bytes [begin, end) of one item, valid until the next call
Written = RankPart | WrittenPart  # what the committer learns of a rank's files, or of a part of the manifest
ByteSource = Callable[[Item], ByteReader]  # called when an item is written, so that only items being written need memory


def write_files(
    store: Store, files: Sequence[ShardFile], *, prefix: str, source: ByteSource, sha256: bool = False
) -> RankDigests:
    """Write all files below the key `prefix`, several at once; they are durable on return.

    `sha256` adds that digest, for a signed manifest. Raises: the first StorageError of any file, after all have ended.
    """
    with ThreadPoolExecutor(FILES_AT_ONCE, thread_name_prefix="save") as pool:
        futures = [pool.submit(write_file, store, file, prefix=prefix, source=source, sha256=sha256) for file in files]
        return joined([future.result() for future in futures])


def write_file(store: Store, file: ShardFile, *, prefix: str, source: ByteSource, sha256: bool = False) -> RankDigests:
    """Write one file below the key `prefix`, durable on return; returns its digests. `sha256`: as for `write_files`.
    Raises: StorageError, what `source` raises: then the file is not made."""
    whole, chunks = xxhash.xxh3_128(file.header), []
    strong = [sha256_of(file.header)] if sha256 else []
    with store.open_writer(f"{prefix}/{file.name}") as writer:
        writer.write(file.header)
        for placed in file.items:
            read = source(placed.item)
            for chunk in placed.chunks:
                begin = chunk.start - placed.start
                data = read(begin, begin + chunk.size_bytes)
                whole.update(data)
                chunks.append(digest_of(data))
                if sha256:
                    strong.append(sha256_of(data))
                writer.write(data)
    return RankDigests((whole.hexdigest(),), (digest_of(file.header),), tuple(chunks), tuple(strong))


def build_manifest(written: Iterable[Written], *, facts: Manifest) -> Manifest:
    """Add what all ranks wrote to `facts`, a manifest without files and tensors.

    Raises: CheckpointError if ranks disagree on a tensor's shape or element type, or digests are of another layout.
    """
    told = list(written)
    here = _together((one for one in told if isinstance(one, RankPart)), incarnation=facts.incarnation)
    manifest = replace(facts, files=here.files, tensors=here.tensors)
    parts = sorted((one for one in told if isinstance(one, WrittenPart)), key=lambda one: one.record.name)
    try:
        return with_written(manifest, parts) if parts else manifest
    except ValueError as error:
        raise CheckpointError(str(error)) from error


def _together(parts: Iterable[RankPart], *, incarnation: str) -> ManifestPart:
    """Files and chunks of these ranks. Raises: CheckpointError."""
    files: dict[str, FileRecord] = {}
    first: dict[str, Item] = {}
    chunks: dict[str, list[ChunkRecord]] = {}
    for file, item, records in (one for part in parts for one in part.written(incarnation)):
        files[file.name] = file
        known = first.setdefault(item.name, item)
        if (known.dtype, known.shape) != (item.dtype, item.shape):
            raise CheckpointError(
                f"ranks disagree on tensor {item.name!r}: {known.dtype}{known.shape} and {item.dtype}{item.shape}"
            )
        chunks.setdefault(item.name, []).extend(records)
    tensors = {name: TensorRecord(first[name].dtype, first[name].shape, tuple(chunks[name])) for name in sorted(first)}
    return ManifestPart(tuple(files[name] for name in sorted(files)), tensors)


def write_part(
    store: Store, parts: Sequence[RankPart], *, folder: str, incarnation: str, world_size: int, manifest_bytes: int
) -> list[Written]:
    """What the committer is told of files that are written. If it is more than the share of these ranks in the manifest, of
    which all ranks together have `manifest_bytes`, a part is written, too. Raises: CheckpointError; StorageError."""
    contents, ranks = _together(parts, incarnation=incarnation), [part.rank for part in parts]
    name, signed = f"{incarnation}-r{min(ranks):05d}{PART_SUFFIX}", any(part.digests.sha256 for part in parts)
    raw, written = encode_part(contents, name=name, ranks=ranks, signed=signed)
    if len(raw) <= manifest_bytes * len(parts) // world_size or not contents.files:
        return [*parts]
    create_exactly(store, key_of(folder, name), raw)
    return [written]


def check_files(store: Store, manifest: Manifest, *, folder: str) -> None:
    """Raises: CheckpointError if a file is missing or too short, as if another run used the folder; StorageError."""
    listed = read_listing(store.list(f"{ROOT}/{folder}")).folder(folder)
    present = listed.files if listed is not None else {}
    for name, size_bytes in manifest.objects:
        if present.get(name) != size_bytes:
            raise CheckpointError(
                f"{store.url}/{key_of(folder, name)} must have {size_bytes} bytes before the commit, but has "
                f"{present.get(name, 'been removed')}; is another run using this folder?"
            )


class Committer:
    """Commits the files of all ranks, and prunes. One for all saves of a process."""

    def __init__(self, store: Store, *, keep_last: int, keep_every: int, signing: SigningKey | None = None) -> None:
        self._store = store
        self._signing = signing
        self._pruner = Pruner(store, keep_last=keep_last, keep_every=keep_every, signing=signing)
        self._fence = Fence(store)

    def commit(self, parts: Iterable[Written], *, facts: Manifest, folder: str, names: Set[str] | None = None) -> Manifest:
        """Commit what all ranks wrote; `names` of all tensors, if known. If this fails before the manifest may exist, delete
        what this incarnation wrote. Raises: LeaseLostError, CheckpointError, StorageError."""
        committing = False
        try:
            manifest = build_manifest(parts, facts=facts)
            if names is not None and (lost := sorted(manifest.tensors.keys() ^ names)):
                raise CheckpointError(f"not all ranks have the same tensors: {', '.join(lost)}")
            check_manifest(manifest)
            check_files(self._store, manifest, folder=folder)
            self._fence.check(facts.incarnation, step=facts.step)
            committing = True
            commit(self._store, manifest, folder=folder, signing=self._signing)
        except BaseException:
            if not committing:
                discard_files(self._store, folder, incarnation=facts.incarnation)
            raise
        return manifest

    def tidy(
        self, folder: str, manifest: Manifest, *, listing: Listing, time_s: float, record: Callable[[Event], None]
    ) -> None:
        """After a commit, prune what it supersedes. `listing` is from before the save."""
        pruned = self._pruner.tidy(folder, manifest=manifest, listing=listing, time_s=time_s, fence=self._fence)
        if pruned:
            record(CheckpointsPruned(checkpoints=pruned))


def commit(store: Store, manifest: Manifest, *, folder: str, signing: SigningKey | None = None) -> None:
    """Create the manifest, signed if there is a key. Raises: CheckpointError, StorageError; it may exist then, or not."""
    create_exactly(store, key_of(folder, MANIFEST_NAME), encode_manifest(manifest, key=signing))


def create_exactly(store: Store, key: str, raw: bytes) -> None:
    """Raises: CheckpointError if it does not read back so: then it is deleted; StorageError: it may exist then, or not."""
    try:
        store.create(key, raw)
    except (ObjectExistsError, TransientStorageError):
        # The reply to a create that succeeded can be lost; its retry then finds the object. Its bytes show whether it is ours.
        with suppress(StorageError):
            if store.read(key, end=len(raw) + 1) == raw:
                return
        raise
    if store.read(key, end=len(raw) + 1) != raw:
        # Nobody else can have created it. Where it is a run's first manifest, no start would find a checkpoint that is valid.
        with suppress(StorageError):
            store.delete(key)
        raise CheckpointError(f"{store.url}/{key} does not read back as it was written")
