"""The layout of one rank's snapshot in memory: its shard files, one after another, as in storage. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain
from typing import Annotated

import msgspec
from msgspec.structs import replace

from elastictrain.bounded_json import DOCUMENT, MalformedJsonError, encode_record, parse_record
from elastictrain.checkpoint.layout import CHUNK_BYTES, Item, ShardFile, plan_files
from elastictrain.checkpoint.manifest import ChunkRecord, FileRecord, digest_of
from elastictrain.checkpoint.safetensors_format import BY_NAME
from elastictrain.errors import InvalidCheckpointError

PAGE_BYTES = 4096
HEADER_BYTES = 4 * PAGE_BYTES  # of a slot, before the snapshot's bytes

_Positive = Annotated[int, msgspec.Meta(ge=1)]


class RankLayout(msgspec.Struct, frozen=True, dict=True):
    """What one rank writes at each snapshot; the same in all incarnations that shard the state alike."""

    items: tuple[Item, ...]
    shard_bytes: _Positive
    chunk_bytes: _Positive = CHUNK_BYTES

    @cached_property
    def digest(self) -> str:
        return digest_of(self.to_bytes())

    @cached_property
    def template(self) -> tuple[ShardFile, ...]:
        """The files, under names of no incarnation."""
        return self.files(incarnation="layout", rank=0)

    @cached_property
    def _places(self) -> tuple[int, ...]:
        """Offset of each file in the snapshot, at a multiple of the page size; and the end of the last one."""
        pages = accumulate((-(-file.size_bytes // PAGE_BYTES) for file in self.template), initial=0)
        return tuple(page * PAGE_BYTES for page in pages)

    @property
    def starts(self) -> tuple[int, ...]:
        return self._places[:-1]

    @property
    def size_bytes(self) -> int:
        """Size of the snapshot, with the padding between files."""
        return self._places[-1]

    @property
    def file_bytes(self) -> int:
        return HEADER_BYTES + self.size_bytes

    def digests_of_headers(self) -> "RankDigests":
        """The digests of a snapshot whose bytes nothing has digested: those of chunks and files are empty."""
        headers = tuple(digest_of(file.header) for file in self.template)
        chunks = sum(len(placed.chunks) for file in self.template for placed in file.items)
        return RankDigests(("",) * len(headers), headers, ("",) * chunks)

    def files(self, *, incarnation: str, rank: int) -> tuple[ShardFile, ...]:
        sizes = {"shard_bytes": self.shard_bytes, "chunk_bytes": self.chunk_bytes}
        return plan_files(self.items, incarnation=incarnation, rank=rank, **sizes)

    def to_bytes(self) -> bytes:
        """JSON, the same for equal layouts."""
        return encode_record({"shard_bytes": self.shard_bytes, "chunk_bytes": self.chunk_bytes, "items": self.items})


def layout_from_bytes(data: bytes, *, where: str) -> RankLayout:
    """The inverse of `RankLayout.to_bytes`. Raises: InvalidCheckpointError naming `where`."""
    try:
        layout = parse_record(data, RankLayout, limits=DOCUMENT)
    except MalformedJsonError as error:
        raise InvalidCheckpointError(f"{where}: is no layout of a snapshot: {error}") from error
    for item in layout.items:
        boxed = len(item.shape) == len(item.offsets) == len(item.sizes) and math.prod(item.sizes) <= 2**60
        if item.dtype not in BY_NAME or not boxed:
            raise InvalidCheckpointError(f"{where}: is no layout of a snapshot: {item!r} is no tensor")
    if layout.to_bytes() != data:
        raise InvalidCheckpointError(f"{where}: is not as it was written")
    return layout


class RankDigests(msgspec.Struct, frozen=True, omit_defaults=True):
    """Digests of one rank's snapshot: of each file, of its header, and of each chunk, in the order of the layout."""

    files: tuple[str, ...]
    headers: tuple[str, ...]
    chunks: tuple[str, ...]
    sha256: tuple[str, ...] = ()  # of the headers, then of the chunks, if the save is to be signed


def joined(files: Sequence[RankDigests]) -> RankDigests:
    """The digests of a rank, from those of each of its files."""
    return RankDigests(
        tuple(chain.from_iterable(file.files for file in files)),
        tuple(chain.from_iterable(file.headers for file in files)),
        tuple(chain.from_iterable(file.chunks for file in files)),
        (*chain.from_iterable(file.sha256[:1] for file in files), *chain.from_iterable(file.sha256[1:] for file in files)),
    )


@dataclass(frozen=True, slots=True)
class RankPart:
    """One rank's files: their layout, and the digests of what was written."""

    rank: int
    layout: RankLayout
    digests: RankDigests

    @property
    def ranks(self) -> tuple[int, ...]:
        return (self.rank,)

    def written(self, incarnation: str) -> list[tuple[FileRecord, Item, list[ChunkRecord]]]:
        """Each item as the manifest has it. Raises: InvalidCheckpointError if the digests are of another layout."""
        digests, files = self.digests, self.layout.files(incarnation=incarnation, rank=self.rank)
        count = sum(len(placed.chunks) for file in files for placed in file.items)
        if (len(digests.files), len(digests.headers), len(digests.chunks)) != (len(files), len(files), count):
            raise InvalidCheckpointError(f"the digests of rank {self.rank}'s snapshot do not belong to its layout")
        if digests.sha256 and len(digests.sha256) != len(files) + count:
            raise InvalidCheckpointError(f"the SHA-256 of rank {self.rank}'s files do not belong to their layout")
        strong = iter(digests.sha256 or ("",) * (len(files) + count))
        records = [
            FileRecord(file.name, file.size_bytes, whole, len(file.header), header, next(strong))
            for file, whole, header in zip(files, digests.files, digests.headers, strict=True)
        ]
        chunks = iter(digests.chunks)
        return [
            (record, placed.item, [replace(one, digest=next(chunks), sha256=next(strong)) for one in placed.chunks])
            for file, record in zip(files, records, strict=True)
            for placed in file.items
        ]
