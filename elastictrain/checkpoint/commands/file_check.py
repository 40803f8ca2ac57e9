"""Reads one file of a checkpoint once, from end to end, and compares every digest that the manifest has of it."""

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Event
from typing import Protocol

import xxhash

from elastictrain.checkpoint.commands.speaking import Advance
from elastictrain.checkpoint.manifest import FileRecord
from elastictrain.checkpoint.shard_header import PlacedChunk, check_shard_header
from elastictrain.checkpoint.verified_read import READ_BYTES
from elastictrain.errors import InvalidCheckpointError, IrregularFileError, ObjectNotFoundError
from elastictrain.storage.store import Store

logger = logging.getLogger(__name__)


_SHA256_DIGITS = 64


class _Hash(Protocol):
    """A digest in the making."""

    def update(self, data: memoryview, /) -> None: ...
    def hexdigest(self) -> str: ...


@dataclass(frozen=True, slots=True)
class DigestedRange:
    """Bytes [start, end) of a file, the digest that they must have (xxh3_128 or, if it is longer, SHA-256), and what they
    are."""

    start: int
    end: int
    digest: str
    what: str


def ranges_of(file: FileRecord, placed: Sequence[PlacedChunk]) -> tuple[DigestedRange, ...]:
    """The header of a file and the chunks of tensors in it, in the order of their bytes."""
    found = [
        DigestedRange(0, file.header_bytes, digest, "its header")
        for digest in (file.header_digest, file.header_sha256)
        if digest
    ]
    for one in placed:
        start, end = one.chunk.start, one.chunk.start + one.chunk.size_bytes
        for digest in (one.chunk.digest, one.chunk.sha256):
            if start < end and digest:
                found.append(DigestedRange(start, end, digest, f"{one.name} in bytes [{start}, {end})"))
    return tuple(found)


class RangeDigests:
    """Digests ranges of a stream of bytes while it goes by; they may overlap."""

    def __init__(self, ranges: Sequence[DigestedRange]) -> None:
        """`ranges` in the order of their starts."""
        self._waiting = list(reversed(ranges))
        self._open: list[tuple[DigestedRange, _Hash]] = []
        self._position = 0
        self.wrong: list[DigestedRange] = []
        """Ranges that have gone by with another digest."""

    def update(self, piece: memoryview) -> None:
        """The next bytes of the stream."""
        begin, end = self._position, self._position + len(piece)
        self._position = end
        while self._waiting and self._waiting[-1].start < end:
            one = self._waiting.pop()
            self._open.append((one, hashlib.sha256() if len(one.digest) == _SHA256_DIGITS else xxhash.xxh3_128()))
        still_open = []
        for one, digest in self._open:
            digest.update(piece[max(one.start, begin) - begin : min(one.end, end) - begin])
            if one.end > end:
                still_open.append((one, digest))
            elif digest.hexdigest() != one.digest:
                self.wrong.append(one)
        self._open = still_open


def check_file(
    store: Store, key: str, *, file: FileRecord, placed: Sequence[PlacedChunk], advance: Advance, stopped: Event
) -> tuple[str, ...]:
    """What is wrong with the file at `key`, a sentence each; it is read again before anything is.

    `placed` is what the manifest has in the file, in the order of the bytes. Memory: `READ_BYTES`, and the header.

    Raises: StorageError.
    """
    first = _look(store, key, file=file, placed=placed, advance=advance, stopped=stopped)
    if not first:
        return ()
    second = _look(store, key, file=file, placed=placed, advance=lambda _: None, stopped=stopped)
    if not second:
        logger.warning("%s read wrong once, and right again: %s", f"{store.url}/{key}", first[0])
        return ()
    lasting = tuple(problem for problem in second if problem in first)
    # What is damaged in the store stays where it is.
    return lasting or (f"reads differently each time, as if the way to this machine garbled it: {first[0]}, then {second[0]}",)


def _look(
    store: Store, key: str, *, file: FileRecord, placed: Sequence[PlacedChunk], advance: Advance, stopped: Event
) -> tuple[str, ...]:
    digests, whole, head = RangeDigests(ranges_of(file, placed)), xxhash.xxh3_128(), bytearray()
    try:
        size_bytes = store.stat(key).size_bytes
        if size_bytes != file.size_bytes:
            return (f"must have {file.size_bytes} bytes, but has {size_bytes}",)
        buffer = memoryview(bytearray(min(READ_BYTES, file.size_bytes)))
        done = 0
        while done < file.size_bytes and not stopped.is_set():
            piece = buffer[: file.size_bytes - done]
            count = store.read_into(key, piece, start=done)
            if count < len(piece):
                return (f"ends at byte {done + count}, too early",)
            whole.update(piece)
            digests.update(piece)
            head += piece[: max(0, file.header_bytes - done)]
            done += count
            advance(count)
    except ObjectNotFoundError:
        return ("is gone",)
    except IrregularFileError as error:
        return (str(error),)
    if stopped.is_set():
        return ()
    if whole.hexdigest() == file.digest and not digests.wrong:
        return _header_problems(bytes(head), file=file, placed=placed)
    wrong = tuple(f"{one.what} does not have its digest" for one in digests.wrong)
    return wrong or ("does not have its digest, although its header and all tensors in it have theirs",)


def _header_problems(head: bytes, *, file: FileRecord, placed: Sequence[PlacedChunk]) -> tuple[str, ...]:
    try:
        check_shard_header(head, file=file, chunks=placed, where="its header")
    except InvalidCheckpointError as error:
        return (str(error),)
    return ()
