"""Turns texts into token files: streaming, in parallel, resumable, complete only once the index exists."""

import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import msgspec
import numpy as np
import xxhash

from elastictrain.bounded_json import DOCUMENT, encode_record, parse_record
from elastictrain.data.encoding import EncodedPiece, Encoder, encode_pieces
from elastictrain.data.formats import PIECE_BYTES, pieces
from elastictrain.data.index import (
    INDEX_FILE,
    DocumentStarts,
    Shard,
    TokenIndex,
    encode_index,
    read_index,
    stored_type,
)
from elastictrain.data.sources import SourceFile
from elastictrain.data.tokenizer import TOKENIZER_FILE, Tokenizer
from elastictrain.errors import DataError, ObjectExistsError, ObjectNotFoundError, ObjectTooLargeError
from elastictrain.storage.bounded_read import DOCUMENT_BYTES, exists, read_bounded
from elastictrain.storage.store import Store

PROGRESS_FILE = "prepare.json"
DEFAULT_SHARD_TOKENS = 2**27

_logger = logging.getLogger(__name__)
_WRITE_TOKENS = 2**20
_MOST_WORKERS = 32


@dataclass(frozen=True, slots=True)
class Position:
    """The next token: token `token` of the piece that starts at `offset_bytes` of file `document`; tables count rows."""

    document: int
    offset_bytes: int
    token: int


@dataclass(frozen=True, slots=True)
class PlanProgress:
    plan: str  # `plan_digest` of the work
    shards: tuple[Shard, ...]
    position: Position
    documents: tuple[DocumentStarts, ...] = ()


def plan_digest(sources: Sequence[SourceFile], *, encoder: Encoder, shard_tokens: int) -> str:
    """Identifies the work: the same digest gives the same bytes."""
    plan = {
        "sources": [[source.name, source.size_bytes, source.stamp] for source in sources],
        "format": [encoder.kind, encoder.field],
        "tokenizer": msgspec.to_builtins(encoder.tokenizer.description),
        "shard_tokens": shard_tokens,
    }
    return xxhash.xxh3_128_hexdigest(json.dumps(plan, sort_keys=True).encode())


def default_workers(sources: Sequence[SourceFile], *, tokenizer: Tokenizer) -> int:
    """Processes worth starting: none for bytes, which need no work to become tokens, or for one piece of text."""
    num_pieces = -(-sum(source.size_bytes for source in sources) // PIECE_BYTES)
    if tokenizer.description.kind == "bytes" or num_pieces == 1:
        return 0
    return min(len(os.sched_getaffinity(0)), num_pieces, _MOST_WORKERS)


def prepare(
    sources: Sequence[SourceFile],
    *,
    plan: str,
    store: Store,
    encoder: Encoder,
    shard_tokens: int = DEFAULT_SHARD_TOKENS,
    workers: int = 0,
    on_bytes: Callable[[int], object] = lambda _: None,
) -> tuple[TokenIndex, bool]:
    """Write token files of `sources` to `store`; return their index, and whether they were complete before.

    The same call resumes an interrupted one, with any number of `workers` (processes; 0: this one). `plan` identifies the work
    (see `plan_digest`): a folder with another plan is refused. `on_bytes` gets the bytes of the files that are done.
    """
    start = _claim(store, plan=plan)
    if isinstance(start, TokenIndex):
        return start, True
    if start.shards:
        _logger.info("going on after %d finished shards in %s", len(start.shards), store.url)
    if encoder.tokenizer.file is not None:
        store.write(TOKENIZER_FILE, encoder.tokenizer.file)
    at = start.position
    todo = pieces(sources, kind=encoder.kind, field=encoder.field, start=(at.document, at.offset_bytes))
    encoded = encode_pieces(todo, encoder=encoder, sources=sources, workers=workers)
    stream = _TokenStream(encoded, start=at, sources=sources, on_bytes=on_bytes)
    shards, documents = list(start.shards), list(start.documents)
    try:
        while not stream.exhausted():
            before = sum(shard.num_tokens for shard in shards)
            shard, starts = _write_shard(store, len(shards), stream=stream, limit=shard_tokens, encoder=encoder, before=before)
            shards.append(shard)
            documents.append(starts)
            store.write(PROGRESS_FILE, encode_record(PlanProgress(plan, tuple(shards), stream.position, tuple(documents))))
        if not shards:
            raise DataError(f"the inputs must hold at least one text, but {sources[0].url} and all others hold none")
    except DataError:
        # The corrected command has another plan, and would be refused by the claim of this one.
        if not shards:
            store.delete(PROGRESS_FILE)
        raise
    finally:
        encoded.close()
    num_documents = sum(one.num_documents for one in documents)
    index = TokenIndex(encoder.dtype, encoder.tokenizer.description, num_documents, tuple(shards), tuple(documents))
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


def _write_shard(
    store: Store, number: int, *, stream: "_TokenStream", limit: int, encoder: Encoder, before: int
) -> tuple[Shard, DocumentStarts]:
    """Write shard `number`, which follows `before` tokens, and where its documents begin."""
    file, digest, stored = f"tokens-{number:05d}.bin", xxhash.xxh3_128(), stored_type(encoder.dtype)
    count = 0
    found = [np.empty(0, dtype="<u8")]
    with store.open_writer(file) as writer:
        while count < limit and not stream.exhausted():
            tokens, starts = stream.take(min(limit - count, _WRITE_TOKENS))
            data = tokens.tobytes()
            digest.update(data)
            writer.write(data)
            found.append((starts + (before + count)).astype("<u8"))
            count += len(tokens)
    positions = np.concatenate(found).tobytes()
    documents = f"documents-{number:05d}.bin"
    store.write(documents, positions)
    return (
        Shard(file, count, count * stored.itemsize, digest.hexdigest()),
        DocumentStarts(documents, len(positions) // 8, len(positions), xxhash.xxh3_128_hexdigest(positions)),
    )


class _TokenStream:
    """The tokens of all documents in a row, from a position on."""

    def __init__(
        self,
        encoded: Iterator[EncodedPiece],
        *,
        start: Position,
        sources: Sequence[SourceFile],
        on_bytes: Callable[[int], object],
    ) -> None:
        self.position = start
        self._encoded = encoded
        self._before_bytes = (0, *accumulate(source.size_bytes for source in sources))
        self._on_bytes = on_bytes
        self._piece: EncodedPiece | None = None
        self._told_bytes = 0

    def exhausted(self) -> bool:
        """Load the next piece if the current one is used up; True if no token is left."""
        while self._piece is None or self.position.token >= len(self._piece.tokens):
            piece = next(self._encoded, None)
            if piece is None:
                return True
            # `position` points into the first piece.
            self.position = Position(piece.source, piece.offset, self.position.token if self._piece is None else 0)
            self._piece = piece
            read_bytes = self._before_bytes[piece.source] + piece.read_bytes
            self._on_bytes(read_bytes - self._told_bytes)
            self._told_bytes = read_bytes
        return False

    def take(self, count: int) -> tuple["np.ndarray[Any, Any]", "np.ndarray[Any, Any]"]:
        """At most `count` tokens of the piece, and which of them begin documents."""
        assert self._piece is not None  # noqa: S101  `exhausted` comes first
        begin = self.position.token
        taken = self._piece.tokens[begin : begin + count]
        starts = self._piece.starts
        starts = starts[(starts >= begin) & (starts < begin + len(taken))] - begin
        self.position = replace(self.position, token=begin + len(taken))
        return taken, starts
