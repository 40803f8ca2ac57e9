"""Turns text files into token files: streaming, resumable, complete only once the index exists."""

import glob
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from elastictrain.bounded_json import DOCUMENT, encode_record, parse_record
from elastictrain.data.index import (
    INDEX_FILE,
    Shard,
    TokenIndex,
    TokenizerDescription,
    TokenType,
    encode_index,
    read_index,
    stored_type,
)
from elastictrain.data.tokenizer import TOKENIZER_FILE, Tokenizer
from elastictrain.errors import DataError, ObjectExistsError, ObjectNotFoundError, ObjectTooLargeError
from elastictrain.storage.bounded_read import DOCUMENT_BYTES, exists, read_bounded
from elastictrain.storage.store import Store

PROGRESS_FILE = "prepare.json"
DEFAULT_SHARD_TOKENS = 2**27

_logger = logging.getLogger(__name__)
_PIECE_BYTES = 2**22
_BATCH_DOCUMENTS = 64
_WRITE_TOKENS = 2**20


@dataclass(frozen=True, slots=True)
class Document:
    path: Path
    name: str  # path relative to the input that it was found by
    size_bytes: int
    modified_ns: int


@dataclass(frozen=True, slots=True)
class Position:
    """The next token: token `token` of the piece that starts at `offset_bytes` of a document."""

    document: int
    offset_bytes: int
    token: int


@dataclass(frozen=True, slots=True)
class PlanProgress:
    plan: str  # `plan_digest` of the work
    shards: tuple[Shard, ...]
    position: Position


def plan_digest(documents: Sequence[Document], *, tokenizer: TokenizerDescription, shard_tokens: int) -> str:
    """Identifies the work: the same digest gives the same bytes."""
    plan = {
        "documents": [[document.name, document.size_bytes, document.modified_ns] for document in documents],
        "tokenizer": msgspec.to_builtins(tokenizer),
        "shard_tokens": shard_tokens,
    }
    return xxhash.xxh3_128_hexdigest(json.dumps(plan, sort_keys=True).encode())


def discover(inputs: Sequence[str], *, patterns: Sequence[str]) -> tuple[Document, ...]:
    """The documents that files, folders and globs name, in the given order, those of each folder and glob in name order.

    Empty files and repetitions are left out. Raises: DataError naming the input that is missing or matches nothing.
    """
    found: dict[Path, Document] = {}
    for given in inputs:
        if "://" in given:
            raise DataError(f"input {given} must be on a local disk, but is a URL; copy it to this host first")
        for path, name in _expand(given, patterns=patterns):
            try:
                status = path.stat()
            except OSError as error:
                raise DataError(f"input {path} must be a readable file, but is not: {error.strerror}") from None
            if status.st_size and path.resolve() not in found:
                found[path.resolve()] = Document(path, name, status.st_size, status.st_mtime_ns)
    if not found:
        raise DataError(f"the inputs must hold at least one byte of text, but {', '.join(inputs)} hold none")
    return tuple(found.values())


def _expand(given: str, *, patterns: Sequence[str]) -> Iterator[tuple[Path, str]]:
    path = Path(given).expanduser()
    if path.is_file():
        yield path, path.name
    elif path.is_dir():
        names = sorted(
            {file.relative_to(path).as_posix() for pattern in patterns for file in path.rglob(pattern) if file.is_file()}
        )
        if not names:
            raise DataError(f"input {given} must hold files that match {' or '.join(patterns)}, but holds none; pass --pattern")
        for name in names:
            yield path / name, name
    else:
        # Path.glob accepts no absolute pattern.
        matches = sorted(match for match in glob.glob(str(path), recursive=True) if Path(match).is_file())  # noqa: PTH207
        if not matches:
            raise DataError(
                f"input {given} must be a file, a folder or a pattern that matches files, but there is nothing of that name"
            )
        for match in matches:
            yield Path(match), match


def prepare(
    documents: Sequence[Document],
    *,
    plan: str,
    store: Store,
    tokenizer: Tokenizer,
    shard_tokens: int = DEFAULT_SHARD_TOKENS,
    on_bytes: Callable[[int], object] = lambda _: None,
) -> tuple[TokenIndex, bool]:
    """Write token files of `documents` to `store`; return their index, and whether they were complete before.

    The same call resumes an interrupted one. `plan` identifies the work (see `plan_digest`): a folder with another plan is
    refused. `on_bytes` gets the bytes of text read, including those that a resumed call skips.
    """
    start = _claim(store, plan=plan)
    if isinstance(start, TokenIndex):
        return start, True
    if start.shards:
        _logger.info("going on after %d finished shards in %s", len(start.shards), store.url)
    if tokenizer.file is not None:
        store.write(TOKENIZER_FILE, tokenizer.file)
    dtype: TokenType = "uint16" if tokenizer.description.vocab_size <= 2**16 else "uint32"
    on_bytes(sum(document.size_bytes for document in documents[: start.position.document]) + start.position.offset_bytes)
    stream = _TokenStream(documents, tokenizer=tokenizer, start=start.position, on_bytes=on_bytes)
    shards = list(start.shards)
    while not stream.exhausted():
        shards.append(_write_shard(store, f"tokens-{len(shards):05d}.bin", stream=stream, limit=shard_tokens, dtype=dtype))
        store.write(PROGRESS_FILE, encode_record(PlanProgress(plan, tuple(shards), stream.position)))
    index = TokenIndex(dtype, tokenizer.description, len(documents), tuple(shards))
    store.write(INDEX_FILE, encode_index(index))
    return index, False


def _claim(store: Store, *, plan: str) -> PlanProgress | TokenIndex:
    """The progress to resume from, or the finished index. Raises: DataError if the folder holds or gets something else."""
    while True:
        begun: PlanProgress | None = None
        try:
            text = read_bounded(store, PROGRESS_FILE, max_bytes=DOCUMENT_BYTES)
            begun = parse_record(text, PlanProgress, limits=DOCUMENT)
        except ObjectNotFoundError:
            pass
        except (ObjectTooLargeError, ValueError) as error:
            raise DataError(
                f"{store.url}/{PROGRESS_FILE} is damaged ({error}); delete that folder to prepare the data again"
            ) from None
        finished = exists(store, INDEX_FILE)
        if begun is None and not finished:
            start = PlanProgress(plan, (), Position(0, 0, 0))
            # Of two different preparations of one empty folder one creates this; the other reads it in its next round.
            with suppress(ObjectExistsError):
                store.create(PROGRESS_FILE, encode_record(start))
                return start
        elif begun is None or begun.plan != plan:
            raise DataError(
                f"{store.url} holds token files made from other inputs or with other options; choose another --out, or delete "
                "that folder to make them again"
            )
        else:
            return read_index(store) if finished else begun


def _write_shard(store: Store, file: str, *, stream: "_TokenStream", limit: int, dtype: TokenType) -> Shard:
    digest, stored = xxhash.xxh3_128(), stored_type(dtype)
    count = 0
    with store.open_writer(file) as writer:
        while count < limit and not stream.exhausted():
            data = stream.take(min(limit - count, _WRITE_TOKENS)).astype(stored).tobytes()
            digest.update(data)
            writer.write(data)
            count += len(data) // stored.itemsize
    return Shard(file, count, count * stored.itemsize, digest.hexdigest())


def cut(data: bytes, *, final: bool) -> int:
    """Where the piece that begins with `data` ends: after the last line break, or else between two characters of UTF-8.

    Long documents are encoded in pieces to bound the memory; a cut at a line break hardly changes the tokens.
    """
    if final:
        return len(data)
    end = data.rfind(b"\n") + 1
    if end:
        return end
    end = len(data) - 1
    while end > max(1, len(data) - 4) and data[end] & 0xC0 == 0x80:
        end -= 1
    return end


@dataclass(frozen=True, slots=True)
class _TextPiece:
    document: int
    offset_bytes: int
    text: bytes
    ends_document: bool


class _TokenStream:
    """The tokens of all documents in a row, from a position on."""

    def __init__(
        self, documents: Sequence[Document], *, tokenizer: Tokenizer, start: Position, on_bytes: Callable[[int], object]
    ) -> None:
        self.position = start
        self._tokens: npt.NDArray[np.uint32] = np.empty(0, dtype=np.uint32)
        self._encoded = _encode(_pieces(documents, start=start), tokenizer=tokenizer)
        self._on_bytes = on_bytes
        self._first = True

    def exhausted(self) -> bool:
        """Load the next piece if the current one is used up; True if no token is left."""
        while self.position.token >= len(self._tokens):
            piece, tokens = next(self._encoded, (None, self._tokens))
            if piece is None:
                return True
            # `position` points into the first piece.
            self.position = Position(piece.document, piece.offset_bytes, self.position.token if self._first else 0)
            self._first = False
            self._tokens = tokens
            self._on_bytes(len(piece.text))
        return False

    def take(self, count: int) -> npt.NDArray[np.uint32]:
        taken = self._tokens[self.position.token : self.position.token + count]
        self.position = replace(self.position, token=self.position.token + len(taken))
        return taken


def _encode(pieces: Iterator[_TextPiece], *, tokenizer: Tokenizer) -> Iterator[tuple[_TextPiece, npt.NDArray[np.uint32]]]:
    """Encode several small documents, or one large piece, at a time: tokenizers work in parallel, and memory is bounded."""
    separator = np.array([tokenizer.description.separator], dtype=np.uint32)
    batch: list[_TextPiece] = []
    for piece in chain(pieces, (None,)):
        if piece is not None:
            batch.append(piece)
        if piece is None or len(batch) == _BATCH_DOCUMENTS or sum(len(one.text) for one in batch) >= _PIECE_BYTES:
            for one, tokens in zip(batch, tokenizer.encode([one.text for one in batch]), strict=True):
                yield one, np.concatenate((tokens, separator)) if one.ends_document else tokens
            batch.clear()


def _pieces(documents: Sequence[Document], *, start: Position) -> Iterator[_TextPiece]:
    offset = start.offset_bytes
    for number in range(start.document, len(documents)):
        document = documents[number]
        while offset < document.size_bytes:
            try:
                with document.path.open("rb") as file:
                    file.seek(offset)
                    data = file.read(_PIECE_BYTES)
                    status = document.path.stat()
            except OSError as error:
                raise DataError(f"input {document.path} must be a readable file, but is not: {error.strerror}") from None
            if (status.st_size, status.st_mtime_ns) != (document.size_bytes, document.modified_ns):
                message = (
                    f"input {document.path} changed while it was being read; prepare the data again when it stays as it is"
                )
                raise DataError(message)
            text = data[: cut(data, final=offset + len(data) >= document.size_bytes)]
            yield _TextPiece(number, offset, text, ends_document=offset + len(text) == document.size_bytes)
            offset += len(text)
        offset = 0
