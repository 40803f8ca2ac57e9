"""Reads parts of a checkpoint from a store and verifies every byte before handing it on. Free of torch."""

import logging
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from threading import Event, local
from typing import Protocol

from elastictrain.checkpoint.layout import PlacedChunk, check_shard_header, chunks_by_file
from elastictrain.checkpoint.manifest import ChunkRecord, FileRecord, Manifest, has_digest
from elastictrain.errors import InvalidCheckpointError, ObjectNotFoundError, StorageError

logger = logging.getLogger(__name__)

SPAN_BYTES = 32 * 2**20
GAP_BYTES = 256 * 2**10
"""Unwanted bytes that are read to save a request: about what a request's latency costs on an object store."""


@dataclass(frozen=True, slots=True)
class Span:
    """One range of one file, with the chunks in it, in the order of their bytes."""

    file: str
    start: int
    end: int
    chunks: tuple[ChunkRecord, ...]


def coalesced_reads(
    chunks: Iterable[ChunkRecord], *, span_bytes: int = SPAN_BYTES, gap_bytes: int = GAP_BYTES
) -> tuple[Span, ...]:
    """Neighbours are read together, up to `span_bytes`; a larger chunk is a span of its own. Each chunk is read once."""
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


READ_THREADS = max(4, min(8, (os.cpu_count() or 4) // 4))
READ_BYTES = 16 * 2**20


class DamagedFileError(InvalidCheckpointError):
    """A file is not what the manifest says; `file` is its name."""

    def __init__(self, message: str, *, file: str = "") -> None:
        super().__init__(message)
        self.file = file


class ReadableStore(Protocol):
    """What verified reading needs of a store."""

    @property
    def url(self) -> str:
        """For messages."""

    def read(self, key: str, *, start: int = 0, end: int | None = None) -> bytes:
        """As `Store.read`."""

    def read_into(self, key: str, buffer: memoryview, *, start: int = 0) -> int:
        """As `Store.read_into`."""


@dataclass(frozen=True, slots=True)
class CheckpointFolder:
    """The files of one checkpoint: keys in the store begin with `prefix` (empty, or ending with '/')."""

    store: ReadableStore
    prefix: str

    def url(self, file: str) -> str:
        """For messages."""
        return f"{self.store.url}/{self.prefix}{file}"


def plain_buffer(size_bytes: int) -> memoryview:
    """Memory like any other."""
    return memoryview(bytearray(size_bytes))


def read_chunks(
    folder: CheckpointFolder,
    chunks: Iterable[ChunkRecord],
    *,
    take: Callable[[ChunkRecord, memoryview], None],
    threads: int = READ_THREADS,
    allocate: Callable[[int], memoryview] = plain_buffer,
) -> int:
    """Reads each chunk once and calls `take` with its verified bytes, valid during the call and from any of `threads` threads.

    `allocate` makes a buffer of so many bytes, in the thread that reads into it. Memory is bounded by `threads` times the
    larger of a span and the largest chunk. Returns the bytes read.

    Raises: DamagedFileError if bytes differ from their digest twice, or are gone; StorageError. Nothing unverified is taken.
    """
    spans = coalesced_reads(chunks)
    buffers = local()
    stopped = Event()

    def read(span: Span) -> int:
        if stopped.is_set():
            return 0
        size_bytes = span.end - span.start
        buffer: memoryview | None = getattr(buffers, "buffer", None)
        try:
            if buffer is None or len(buffer) < size_bytes:
                buffer = buffers.buffer = allocate(size_bytes)
            data = buffer[:size_bytes]
            _twice(lambda: _fill(folder, span, data))
            for chunk in span.chunks:
                take(chunk, data[chunk.start - span.start : chunk.start - span.start + chunk.size_bytes])
        except BaseException:
            stopped.set()
            raise
        return size_bytes

    with ThreadPoolExecutor(threads, thread_name_prefix="restore") as pool:
        return sum(pool.map(read, spans))


def _twice(read: Callable[[], None]) -> None:
    """A transfer can garble or cut what is whole in the store: only what reads wrong twice is damaged."""
    try:
        read()
    except DamagedFileError as error:
        read()
        logger.warning("read wrong once, and right again: %s", error)


def _fill(folder: CheckpointFolder, span: Span, data: memoryview) -> None:
    _read_range(folder, span, data)
    bad = _mismatch(span, data)
    if bad is not None:
        where = f"{folder.url(span.file)}: bytes [{bad.start}, {bad.start + bad.size_bytes})"
        raise DamagedFileError(f"{where} do not have their digest", file=span.file)


def _read_range(folder: CheckpointFolder, span: Span, data: memoryview) -> None:
    try:
        count = folder.store.read_into(f"{folder.prefix}{span.file}", data, start=span.start)
    except ObjectNotFoundError as error:
        raise DamagedFileError(f"{folder.url(span.file)} is gone", file=span.file) from error
    except StorageError as error:
        error.file = span.file
        raise
    if count != len(data):
        raise DamagedFileError(f"{folder.url(span.file)} ends at byte {span.start + count}, too early", file=span.file)


def _mismatch(span: Span, data: memoryview) -> ChunkRecord | None:
    for chunk in span.chunks:
        piece = data[chunk.start - span.start : chunk.start - span.start + chunk.size_bytes]
        if not has_digest(piece, chunk.digest, sha256=chunk.sha256):
            return chunk
    return None


def verify_headers(folder: CheckpointFolder, manifest: Manifest, *, files: Sequence[FileRecord]) -> None:
    """Checks the headers of `files`: their digests, and that they tell the same of the tensors as the manifest.

    Raises: DamagedFileError, StorageError.
    """
    placed = chunks_by_file(manifest)
    for file in files:
        _twice(partial(_check_header, folder, file, placed[file.name]))


def _check_header(folder: CheckpointFolder, file: FileRecord, placed: Sequence[PlacedChunk]) -> None:
    head = _read(folder, file, 0, file.header_bytes)
    where = folder.url(file.name)
    if not has_digest(head, file.header_digest, sha256=file.header_sha256):
        raise DamagedFileError(f"{where}: its header does not have its digest", file=file.name)
    try:
        check_shard_header(head, file=file, chunks=placed, where=where)
    except InvalidCheckpointError as error:
        raise DamagedFileError(str(error), file=file.name) from error


def _read(folder: CheckpointFolder, file: FileRecord, start: int, end: int) -> bytes:
    try:
        data = folder.store.read(f"{folder.prefix}{file.name}", start=start, end=end)
    except ObjectNotFoundError as error:
        raise DamagedFileError(f"{folder.url(file.name)} is gone", file=file.name) from error
    except StorageError as error:
        error.file = file.name
        raise
    if len(data) != end - start:
        raise DamagedFileError(f"{folder.url(file.name)} ends at byte {start + len(data)}, too early", file=file.name)
    return data
