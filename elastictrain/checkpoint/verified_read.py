"""Reads manifests and parts of checkpoints, and verifies every byte before the caller gets it. Free of torch.

A read that fails the check is repeated once. All code that restores, lists or deletes checkpoints reads through this module, so
that a start takes exactly what `verify` calls valid.
"""

import logging
import os
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from threading import Event, local
from typing import TypeVar

from elastictrain import errors
from elastictrain.checkpoint.folders import FolderFacts, Reject, key_of
from elastictrain.checkpoint.layout import check_shard_header, chunks_by_file
from elastictrain.checkpoint.manifest import MANIFEST_NAME, ChunkRecord, FileRecord, Manifest, has_digest
from elastictrain.checkpoint.manifest_format import parse_manifest
from elastictrain.checkpoint.manifest_parts import ManifestPart, parse_part, with_contents
from elastictrain.checkpoint.signing import SigningKey
from elastictrain.storage.bounded_read import DOCUMENT_BYTES, read_bounded
from elastictrain.storage.store import MappedStore, ReadableStore, Store

logger = logging.getLogger(__name__)

T = TypeVar("T")

SPAN_BYTES = 32 * 2**20
GAP_BYTES = 256 * 2**10  # unwanted bytes read to save a request: about the cost of its latency on an object store


@dataclass(frozen=True, slots=True)
class Span:
    """A range of a file and the chunks in it, in the order of their bytes."""

    file: str
    start: int
    end: int
    chunks: tuple[ChunkRecord, ...]


def coalesced_reads(
    chunks: Iterable[ChunkRecord], *, span_bytes: int = SPAN_BYTES, gap_bytes: int = GAP_BYTES
) -> tuple[Span, ...]:
    """Join neighbours up to `span_bytes`; a larger chunk is its own span. Each chunk is read once."""
    spans: list[Span] = []
    for chunk in sorted(set(chunks), key=lambda chunk: (chunk.file, chunk.start, chunk.size_bytes)):
        end = chunk.start + chunk.size_bytes
        last = spans[-1] if spans else None
        near = last is not None and last.file == chunk.file and chunk.start - last.end <= gap_bytes
        if last is not None and near and end - last.start <= span_bytes:
            spans[-1] = Span(last.file, last.start, max(last.end, end), (*last.chunks, chunk))
        else:
            spans.append(Span(chunk.file, chunk.start, end, (chunk,)))
    return tuple(spans)


READ_THREADS = max(4, min(8, (os.cpu_count() or 4) // 2))


class DamagedFileError(errors.InvalidCheckpointError):
    """A file differs from what the manifest says; `file` is its name."""

    def __init__(self, message: str, *, file: str = "") -> None:
        super().__init__(message)
        self.file = file


@dataclass(frozen=True, slots=True)
class CheckpointFolder:
    """The files of one checkpoint: keys in the store begin with `prefix` (empty, or ending with '/')."""

    store: ReadableStore
    prefix: str

    def url(self, file: str) -> str:
        return f"{self.store.url}/{self.prefix}{file}"

    def mapped(self, span: Span) -> memoryview | None:
        """The bytes of `span`, where they lie in memory of this process."""
        store = self.store
        return store.mapped(f"{self.prefix}{span.file}", span.start, span.end) if isinstance(store, MappedStore) else None


def read_chunks(
    folder: CheckpointFolder,
    chunks: Iterable[ChunkRecord],
    *,
    take: Callable[[ChunkRecord, memoryview], None],
    take_mapped: Callable[[ChunkRecord, memoryview], None] | None = None,
    threads: int = READ_THREADS,
    allocate: Callable[[int], bytearray | memoryview] = bytearray,
) -> int:
    """Read each chunk once and call `take` with its verified bytes; returns the bytes read.

    `take` runs in any of `threads` threads, and its bytes are valid during the call. If there is a `take_mapped`, it gets those
    that lie in memory of this process anyway, which stay valid. `allocate` makes a buffer of so many bytes in the thread that
    reads into it. Memory is at most `threads` times the larger of a span and the largest chunk.

    Raises: DamagedFileError if a file is missing, or bytes differ from their digest twice; StorageError.
    """
    spans = coalesced_reads(chunks)
    buffers = local()
    stopped = Event()

    def read(span: Span) -> int:
        """Returns the bytes read; 0 once another span has failed. A thread keeps its buffer for its next span."""
        if stopped.is_set():
            return 0
        size_bytes = span.end - span.start
        buffer: memoryview | None = getattr(buffers, "buffer", None)
        try:
            deliver, data = take, folder.mapped(span)
            if data is not None:
                _check(folder, span, data)
                deliver = take_mapped or take
            else:
                if buffer is None or len(buffer) < size_bytes:
                    buffer = buffers.buffer = memoryview(allocate(size_bytes))
                data = buffer[:size_bytes]
                _twice(partial(_fill, folder, span, data), DamagedFileError)
            for chunk in span.chunks:
                deliver(chunk, data[chunk.start - span.start : chunk.start - span.start + chunk.size_bytes])
        except BaseException:
            stopped.set()
            raise
        return size_bytes

    with ThreadPoolExecutor(threads, thread_name_prefix="restore") as pool:
        return sum(pool.map(read, spans))


def _twice(read: Callable[[], T], *wrong: type[Exception]) -> T:
    """A transfer can garble or cut what is whole in the store: a file is damaged only if it reads wrong twice."""
    try:
        return read()
    except wrong as error:
        found = read()
        logger.warning("a second read returned the right bytes: %s", error)
        return found


def wrong_chunks(span: Span, data: memoryview) -> list[ChunkRecord]:
    """The chunks of `span` whose bytes in `data` do not have their digest. Chunks without one are those of snapshots: a
    manifest that is parsed has all (`manifest.Digest`)."""
    return [
        chunk
        for chunk in span.chunks
        if chunk.digest
        and not has_digest(
            data[chunk.start - span.start : chunk.start - span.start + chunk.size_bytes], chunk.digest, sha256=chunk.sha256
        )
    ]


def _fill(folder: CheckpointFolder, span: Span, data: memoryview) -> None:
    _read_range(folder, span.file, data, start=span.start)
    _check(folder, span, data)


def _check(folder: CheckpointFolder, span: Span, data: memoryview) -> None:
    for chunk in wrong_chunks(span, data):
        where = f"{folder.url(span.file)}: bytes [{chunk.start}, {chunk.start + chunk.size_bytes})"
        raise DamagedFileError(f"{where} do not have their digest", file=span.file)


def _read_range(folder: CheckpointFolder, file: str, data: memoryview, *, start: int) -> None:
    try:
        count = folder.store.read_into(f"{folder.prefix}{file}", data, start=start)
    except errors.ObjectNotFoundError as error:
        raise DamagedFileError(f"{folder.url(file)} is gone", file=file) from error
    except errors.StorageError as error:
        error.file = file
        raise
    if count != len(data):
        raise DamagedFileError(f"{folder.url(file)} ends at byte {start + count}, too early", file=file)


def verify_headers(folder: CheckpointFolder, manifest: Manifest, *, files: Sequence[FileRecord]) -> None:
    """Check the headers of `files` against their digests and the manifest. Raises: DamagedFileError, StorageError."""
    placed = chunks_by_file(manifest)

    def check(file: FileRecord) -> None:
        """Raises: DamagedFileError if the header is missing or cut short, or fits neither digest nor manifest; StorageError."""
        head = bytearray(file.header_bytes)
        _read_range(folder, file.name, memoryview(head), start=0)
        where = folder.url(file.name)
        if not has_digest(memoryview(head), file.header_digest, sha256=file.header_sha256):
            raise DamagedFileError(f"{where}: its header does not have its digest", file=file.name)
        try:
            check_shard_header(bytes(head), file=file, chunks=placed[file.name], where=where)
        except errors.InvalidCheckpointError as error:
            raise DamagedFileError(str(error), file=file.name) from error

    for file in files:
        _twice(partial(check, file), DamagedFileError)


def read_parts(
    folder: CheckpointFolder,
    manifest: Manifest,
    *,
    numbers: Collection[int] | None = None,
    damaged: Callable[[DamagedFileError], None] | None = None,
) -> Manifest:
    """The manifest with the contents of its parts, or of those of `numbers`; if `damaged` takes those that are, without these.
    Raises: DamagedFileError, StorageError."""

    def read(number: int) -> ManifestPart:
        record = manifest.parts[number]
        raw = bytearray(record.size_bytes)
        _read_range(folder, record.name, memoryview(raw), start=0)
        try:
            return parse_part(bytes(raw), manifest=manifest, number=number)
        except ValueError as error:
            raise DamagedFileError(f"{folder.url(record.name)}: {error}", file=record.name) from error

    def read_twice(number: int) -> list[ManifestPart]:
        try:
            return [_twice(partial(read, number), DamagedFileError)]
        except DamagedFileError as error:
            if damaged is None:
                raise
            damaged(error)
            return []

    if not manifest.parts:
        return manifest
    with ThreadPoolExecutor(READ_THREADS, thread_name_prefix="parts") as pool:
        found = pool.map(read_twice, sorted(range(len(manifest.parts)) if numbers is None else numbers))
        return with_contents(manifest, [part for parts in found for part in parts])


def retry_read(store: ReadableStore, key: str, *, signing: SigningKey | None = None) -> tuple[bytes, Manifest]:
    """A manifest and its bytes. Raises, if both reads fail: InvalidCheckpointError, UnknownFormatError, ObjectNotFoundError;
    UntrustedCheckpointError, if there is a key and the manifest is not signed with it; StorageError."""

    def read() -> tuple[bytes, Manifest]:
        try:
            raw = read_bounded(store, key, max_bytes=DOCUMENT_BYTES)
        except errors.ObjectTooLargeError as error:
            raise errors.InvalidCheckpointError(str(error)) from error
        return raw, parse_manifest(raw, where=f"{store.url}/{key}", key=signing)

    return _twice(read, errors.CheckpointError, errors.ObjectNotFoundError)


def find_missing(store: Store, manifest: Manifest, *, folder: FolderFacts) -> Reject | None:
    """The first file or part that neither the listing nor the store itself has in its size. Raises: StorageError."""
    for name, bytes_then in manifest.objects:
        if folder.files.get(name) == bytes_then:
            continue
        # A listing can lag behind what was written.
        size_bytes = None
        with suppress(errors.ObjectNotFoundError, errors.IrregularFileError):
            size_bytes = store.stat(key_of(folder.name, name)).size_bytes
        if size_bytes is None:
            return Reject(folder.name, name, f"{name} is gone")
        if size_bytes != bytes_then:
            return Reject(folder.name, name, f"{name} must have {bytes_then} bytes, but has {size_bytes}")
    return None


@dataclass(frozen=True, slots=True)
class Examined:
    """A committed folder, valid if `reject` is None; `manifest` and its bytes `raw` are set if it can be read."""

    manifest: Manifest | None
    raw: bytes
    reject: Reject | None


def examine(store: Store, folder: FolderFacts, *, signing: SigningKey | None = None) -> Examined:
    """Whether a folder's manifest is valid, of the folder's step, signed with the key if there is one, and all its files exist.

    Raises: ObjectNotFoundError if the manifest was deleted; UnknownFormatError; StorageError.
    """
    key = key_of(folder.name, MANIFEST_NAME)
    try:
        raw, manifest = retry_read(store, key, signing=signing)
    except errors.InvalidCheckpointError as error:
        lasting = not isinstance(error, errors.UntrustedCheckpointError)
        return Examined(None, b"", Reject(folder.name, MANIFEST_NAME, str(error), lasting=lasting))
    if manifest.step != folder.step:
        moved = f"{store.url}/{key} is of step {manifest.step}: files were moved"
        return Examined(manifest, raw, Reject(folder.name, MANIFEST_NAME, moved))
    return Examined(manifest, raw, find_missing(store, manifest, folder=folder))
