"""Checks the bytes of a snapshot against its digests while they come. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass

import xxhash

from elastictrain.checkpoint.layout import file_name
from elastictrain.checkpoint.memory.layout import RankDigests, RankLayout
from elastictrain.errors import InvalidCheckpointError


@dataclass(frozen=True, slots=True)
class _Piece:
    """Bytes [begin, end) of the snapshot, which have a digest of their own: a file's header or one chunk."""

    begin: int
    end: int
    digest: str
    file: int
    start: int
    """Of the piece in its file."""

    last: bool
    """Whether the file ends with it."""


class Verifier:
    """Takes the bytes of one snapshot in their order. `digests` must be as many as the layout has files and chunks."""

    def __init__(self, layout: RankLayout, digests: RankDigests, *, incarnation: str, rank: int) -> None:
        self._digests = digests
        self._incarnation = incarnation
        self._rank = rank
        self._size_bytes = layout.size_bytes
        self._pieces = _pieces(layout, digests)
        self._piece = next(self._pieces, None)
        self._position = 0
        self._hash = xxhash.xxh3_128()
        self._whole = xxhash.xxh3_128()

    def feed(self, data: memoryview) -> None:
        """The next bytes. Raises: InvalidCheckpointError naming the bytes that do not have their digest."""
        base, end = self._position, self._position + len(data)
        self._position = end
        # Padding between files belongs to no piece, and has no digest.
        while self._piece is not None and self._piece.begin <= end:
            piece = self._piece
            part = data[max(piece.begin, base) - base : max(0, min(piece.end, end) - base)]
            self._hash.update(part)
            self._whole.update(part)
            if piece.end > end:
                break
            self._check(piece)
            self._piece = next(self._pieces, None)

    def finish(self) -> None:
        """All bytes have come. Raises: InvalidCheckpointError if not."""
        if self._piece is not None or self._position != self._size_bytes:
            raise InvalidCheckpointError(f"the snapshot must have {self._size_bytes} bytes, but {self._position} came")

    def _check(self, piece: _Piece) -> None:
        name = file_name(self._incarnation, rank=self._rank, index=piece.file)
        if self._hash.hexdigest() != piece.digest:
            end = piece.start + piece.end - piece.begin
            raise InvalidCheckpointError(f"{name}: bytes [{piece.start}, {end}) do not have their digest")
        self._hash.reset()
        if piece.last:
            if self._whole.hexdigest() != self._digests.files[piece.file]:
                raise InvalidCheckpointError(f"{name} does not have its digest")
            self._whole.reset()


def _pieces(layout: RankLayout, digests: RankDigests) -> Iterator[_Piece]:
    chunk_digests = iter(digests.chunks)
    for index, (file, base) in enumerate(zip(layout.template, layout.starts, strict=True)):
        num_chunks = sum(len(placed.chunks) for placed in file.items)
        yield _Piece(base, base + len(file.header), digests.headers[index], index, 0, last=num_chunks == 0)
        for placed in file.items:
            for chunk in placed.chunks:
                num_chunks -= 1
                start = placed.start + chunk.begin
                end = base + start + chunk.size_bytes
                yield _Piece(base + start, end, next(chunk_digests), index, start, last=num_chunks == 0)
