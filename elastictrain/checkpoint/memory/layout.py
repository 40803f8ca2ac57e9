"""How the snapshot of one rank lies in memory: its shard files, one after another, as they will lie in storage. Pure."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from elastictrain.bounded_json import DOCUMENT, parse_json
from elastictrain.checkpoint.layout import CHUNK_BYTES, Item, ShardFile, plan_files
from elastictrain.checkpoint.manifest import ChunkRecord, FileRecord, digest_of
from elastictrain.checkpoint.safetensors_format import BY_NAME
from elastictrain.checkpoint.writer import WrittenItem
from elastictrain.errors import InvalidCheckpointError

PAGE_BYTES = 4096
HEADER_BYTES = 4 * PAGE_BYTES
"""Of a slot, before the snapshot's bytes."""

_METADATA = {"format": "pt"}


@dataclass(frozen=True)
class RankLayout:
    """What one rank writes at each snapshot; the same in every incarnation that shares the state out alike."""

    items: tuple[Item, ...]
    shard_bytes: int
    chunk_bytes: int = CHUNK_BYTES

    @cached_property
    def digest(self) -> str:
        """Names the layout."""
        return digest_of(self.to_bytes())

    @cached_property
    def template(self) -> tuple[ShardFile, ...]:
        """The files under names that belong to no incarnation."""
        return self.files(incarnation="layout", rank=0)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Offset of each file in the snapshot's bytes, at a multiple of the page size."""
        starts = [0]
        for file in self.template:
            starts.append(-(-(starts[-1] + file.size_bytes) // PAGE_BYTES) * PAGE_BYTES)
        return tuple(starts[:-1])

    @cached_property
    def size_bytes(self) -> int:
        """Bytes of the whole snapshot, padding between files included."""
        if not self.template:
            return 0
        return -(-(self.starts[-1] + self.template[-1].size_bytes) // PAGE_BYTES) * PAGE_BYTES

    @property
    def file_bytes(self) -> int:
        """Size of a slot for it, its header included."""
        return HEADER_BYTES + self.size_bytes

    def files(self, *, incarnation: str, rank: int) -> tuple[ShardFile, ...]:
        """The shard files under their names."""
        return plan_files(
            self.items,
            incarnation=incarnation,
            rank=rank,
            shard_bytes=self.shard_bytes,
            chunk_bytes=self.chunk_bytes,
            metadata=_METADATA,
        )

    def to_bytes(self) -> bytes:
        """JSON, the same for equal layouts."""
        items = [[item.name, item.dtype, item.shape, item.offsets, item.sizes] for item in self.items]
        document = {"shard_bytes": self.shard_bytes, "chunk_bytes": self.chunk_bytes, "items": items}
        return json.dumps(document, separators=(",", ":")).encode()


def layout_from_bytes(data: bytes, *, where: str) -> RankLayout:
    """The inverse of `RankLayout.to_bytes`. Raises: InvalidCheckpointError naming `where`."""
    try:
        document = parse_json(data, limits=DOCUMENT)
        layout = RankLayout(
            tuple(_item(*values) for values in document["items"]),
            _positive(document["shard_bytes"]),
            _positive(document["chunk_bytes"]),
        )
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise InvalidCheckpointError(f"{where}: is no layout of a snapshot ({type(error).__name__}: {error})") from error
    if layout.to_bytes() != data:
        raise InvalidCheckpointError(f"{where}: is not as it was written")
    return layout


@dataclass(frozen=True, slots=True)
class RankDigests:
    """Digests of one rank's snapshot: of each file, of its header, and of each chunk, in the order of the layout."""

    files: tuple[str, ...]
    headers: tuple[str, ...]
    chunks: tuple[str, ...]

    sha256: tuple[str, ...] = ()
    """Of the headers and then of the chunks, where the save is to be signed."""


def written_items(layout: RankLayout, digests: RankDigests, *, incarnation: str, rank: int) -> tuple[WrittenItem, ...]:
    """What a manifest says of this rank's files. Raises: InvalidCheckpointError if the digests are of another layout."""
    files = layout.files(incarnation=incarnation, rank=rank)
    count = sum(len(placed.chunks) for file in files for placed in file.items)
    if (len(digests.files), len(digests.headers), len(digests.chunks)) != (len(files), len(files), count):
        raise InvalidCheckpointError(f"the digests of rank {rank}'s snapshot do not belong to its layout")
    if digests.sha256 and len(digests.sha256) != len(files) + count:
        raise InvalidCheckpointError(f"the SHA-256 of rank {rank}'s files do not belong to their layout")
    strong = digests.sha256 or ("",) * (len(files) + count)
    chunk_digests, chunk_strong = iter(digests.chunks), iter(strong[len(files) :])
    written = []
    for file, whole, header, header_strong in zip(files, digests.files, digests.headers, strong, strict=False):
        record = FileRecord(file.name, file.size_bytes, whole, len(file.header), header, header_strong)
        for placed in file.items:
            chunks = tuple(
                ChunkRecord(
                    chunk.offsets,
                    chunk.sizes,
                    file.name,
                    placed.start + chunk.begin,
                    chunk.size_bytes,
                    next(chunk_digests),
                    next(chunk_strong),
                )
                for chunk in placed.chunks
            )
            written.append(WrittenItem(placed.item, record, chunks))
    return tuple(written)


def digests_of(written: Sequence[WrittenItem]) -> RankDigests:
    """The digests in what was written, in the order of `written_items`."""
    files: dict[str, FileRecord] = {}
    for one in written:
        files.setdefault(one.file.name, one.file)
    return RankDigests(
        tuple(file.digest for file in files.values()),
        tuple(file.header_digest for file in files.values()),
        tuple(chunk.digest for one in written for chunk in one.chunks),
        tuple(
            strong
            for strong in (
                *(file.header_sha256 for file in files.values()),
                *(chunk.sha256 for one in written for chunk in one.chunks),
            )
            if strong
        ),
    )


def digests_to_json(digests: RankDigests) -> dict[str, list[str]]:
    """For the record beside a snapshot, and for peers."""
    document = {"files": list(digests.files), "headers": list(digests.headers), "chunks": list(digests.chunks)}
    return document | ({"sha256": list(digests.sha256)} if digests.sha256 else {})


def digests_from_json(value: object) -> RankDigests:
    """The inverse. Raises: TypeError, KeyError."""
    if not isinstance(value, Mapping):
        raise TypeError(f"digests must be an object, but are {type(value).__name__}")
    return RankDigests(
        _texts(value["files"]), _texts(value["headers"]), _texts(value["chunks"]), _texts(value.get("sha256", []))
    )


def _item(name: object, dtype: object, shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]) -> Item:
    if not isinstance(name, str) or not isinstance(dtype, str) or dtype not in BY_NAME:
        raise TypeError(f"{name!r} of element type {dtype!r} is no tensor")
    item = Item(name, dtype, tuple(shape), tuple(offsets), tuple(sizes))
    numbers = (*item.shape, *item.offsets, *item.sizes)
    if any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in numbers) or math.prod(item.sizes) > 2**60:
        raise TypeError(f"{name!r} has the shape {shape!r}, {offsets!r}, {sizes!r}")
    if not len(item.shape) == len(item.offsets) == len(item.sizes):
        raise TypeError(f"{name!r} has the shape {shape!r}, {offsets!r}, {sizes!r}")
    return item


def _positive(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise TypeError(f"{value!r} is no positive number")
    return value


def _texts(value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise TypeError(f"must be a list of texts, but is {type(value).__name__}")
    return tuple(value)
