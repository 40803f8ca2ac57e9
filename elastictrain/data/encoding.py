"""Pieces of text to tokens, in this process or in several."""

import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from elastictrain.data.formats import Piece, RefusedTextError, documents, refusal
from elastictrain.data.index import TokenType, stored_type
from elastictrain.data.sources import SourceFile
from elastictrain.data.tokenizer import Tokenizer
from elastictrain.errors import ElasticTrainError
from elastictrain.processes import follow_parent

_PER_WORKER = 2


@dataclass(frozen=True, slots=True)
class EncodedPiece:
    source: int  # number of the file
    offset: int  # as in the piece
    read_bytes: int
    tokens: "np.ndarray[Any, Any]"  # [N], in the type of the files
    starts: "np.ndarray[Any, Any]"  # [documents that begin here] int64, ascending: the first token of each


@dataclass(frozen=True, slots=True)
class Encoder:
    """Turns pieces of one format into tokens; a separator ends each document."""

    tokenizer: Tokenizer
    kind: str = "text"
    field: str = ""  # field or column that holds the text

    @property
    def dtype(self) -> TokenType:
        return "uint16" if self.tokenizer.description.vocab_size <= 2**16 else "uint32"

    def __call__(self, piece: Piece) -> EncodedPiece:
        """Raises: RefusedTextError."""
        found = documents(piece, kind=self.kind, field=self.field)
        separator = np.array([self.tokenizer.description.separator], dtype=np.uint32)
        parts, starts, length = [np.empty(0, dtype=np.uint32)], [], 0
        for number, tokens in enumerate(self.tokenizer.encode(found.texts)):
            if number or found.begins:
                starts.append(length)
            ends = found.ends or number + 1 < len(found.texts)
            parts += (tokens, separator) if ends else (tokens,)
            length += len(tokens) + ends
        together = np.concatenate(parts).astype(stored_type(self.dtype))
        return EncodedPiece(piece.source, piece.offset, piece.read_bytes, together, np.array(starts, dtype=np.int64))


def encode_pieces(
    todo: Iterator[Piece], *, encoder: Encoder, sources: Sequence[SourceFile], workers: int
) -> Generator[EncodedPiece, None, None]:
    """The tokens of all pieces in their order, which are the same with any number of `workers` (processes; 0: this one).

    Raises: DataError naming the line of a text that is refused; ElasticTrainError if a process died; what `todo` raises.
    """
    if not workers:
        for piece in todo:
            yield _outcome(piece, partial(encoder, piece), sources=sources, kind=encoder.kind)
        return
    context = multiprocessing.get_context("spawn")
    waiting: deque[tuple[Piece, Future[EncodedPiece]]] = deque()
    with ProcessPoolExecutor(workers, context, initializer=_begin, initargs=(encoder, os.getpid())) as pool:
        try:
            for piece in todo:
                if len(waiting) == _PER_WORKER * workers:
                    first, answer = waiting.popleft()
                    yield _outcome(first, answer.result, sources=sources, kind=encoder.kind)
                waiting.append((piece, pool.submit(_encode, piece)))
            while waiting:
                first, answer = waiting.popleft()
                yield _outcome(first, answer.result, sources=sources, kind=encoder.kind)
        except BrokenProcessPool:
            raise ElasticTrainError(
                "a process of `prepare` must run to the end, but was killed or could not start; the same command continues; if "
                "the host ran out of memory, pass fewer --workers"
            ) from None
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _outcome(piece: Piece, get: Callable[[], EncodedPiece], *, sources: Sequence[SourceFile], kind: str) -> EncodedPiece:
    try:
        return get()
    except RefusedTextError as error:
        raise refusal(error, offset=piece.offset, source=sources[piece.source], kind=kind) from None


_encoder: list[Encoder] = []  # of a worker process


def _begin(encoder: Encoder, parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if not follow_parent(parent, with_signal=signal.SIGKILL):
        os._exit(1)
    # Each process is one of several: the library's own threads would only compete.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _encoder.append(encoder)


def _encode(piece: Piece) -> EncodedPiece:
    return _encoder[0](piece)
