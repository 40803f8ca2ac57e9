"""Which ranges of which files are read to get a set of chunks. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass

from elastictrain.checkpoint.manifest import ChunkRecord

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


def plan_spans(chunks: Iterable[ChunkRecord], *, span_bytes: int = SPAN_BYTES, gap_bytes: int = GAP_BYTES) -> tuple[Span, ...]:
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
