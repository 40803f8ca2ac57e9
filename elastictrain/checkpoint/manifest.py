"""The manifest: the one object that makes a folder of files a checkpoint. Free of torch."""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
import xxhash

from elastictrain.bounded_json import as_record

MANIFEST_NAME = "manifest.json"
PER_RANK = ".per_rank"  # ends the names of tensors that have a row for each rank, which is of no use to another one

JsonValue = None | bool | int | float | str | list["JsonValue"] | dict[str, "JsonValue"]

MAX_COUNT = 2**63 - 1  # of steps, bytes and elements: torch and file systems count in signed 64 bits
Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)]
Digest = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32}\Z")]
Sha256 = Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{64})?\Z")]
FileName = Annotated[str, msgspec.Meta(pattern=r"^(?!manifest\.json\Z)[A-Za-z0-9_][A-Za-z0-9_.\-]{0,254}\Z")]


class ChunkRecord(msgspec.Struct, frozen=True, omit_defaults=True, rename={"size_bytes": "bytes"}):
    """A box of a tensor: its place in the tensor, and its bytes in a file. The unit of verified reads."""

    offsets: tuple[Count, ...]
    sizes: tuple[Count, ...]
    file: str
    start: Count
    size_bytes: Count
    digest: Digest
    sha256: Sha256 = ""  # only if the manifest is signed, and its signature was checked


class TensorRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """One tensor; its chunks, and those in its boxes of parts, fill it exactly."""

    dtype: str
    shape: tuple[Count, ...]
    chunks: tuple[ChunkRecord, ...]
    boxes: Count | None = None  # the place in `Manifest.boxes`; None if no part has chunks of it


class FileRecord(msgspec.Struct, frozen=True, omit_defaults=True, rename={"size_bytes": "bytes"}):
    """One shard file. `header_bytes` includes its length field."""

    name: FileName
    size_bytes: Count
    digest: Digest
    header_bytes: Count
    header_digest: Digest
    header_sha256: Sha256 = ""  # as a chunk's: header and chunks are all of a file


class PartRecord(msgspec.Struct, frozen=True, omit_defaults=True, rename={"size_bytes": "bytes"}):
    """A part of the manifest: an object of its own that describes the shard files of one host."""

    name: FileName
    size_bytes: Count
    digest: Digest
    files: dict[FileName, Count]  # the shard files that it describes, and their bytes
    sha256: Sha256 = ""  # as a chunk's


class PartBox(msgspec.Struct, frozen=True, array_like=True):
    """A box of a tensor whose chunks are in the part of that number, and fill it."""

    part: Count
    offsets: tuple[Count, ...]
    sizes: tuple[Count, ...]


@dataclass(frozen=True, slots=True)
class Manifest:
    """What `manifest.json` says. With parts, `files` and chunks are only those that no part has."""

    step: Count
    world_size: Annotated[int, msgspec.Meta(ge=1, le=MAX_COUNT)]
    incarnation: str
    created: float
    config_digest: str
    versions: Mapping[str, str]
    state: Mapping[str, Any]
    files: tuple[FileRecord, ...] = ()
    tensors: Mapping[str, TensorRecord] = field(default_factory=dict)  # `writer.build_manifest` sets files and tensors
    signature: str = ""
    parts: tuple[PartRecord, ...] = ()
    boxes: tuple[tuple[PartBox, ...], ...] = ()

    @property
    def size_bytes(self) -> int:
        """Of all shard files."""
        return sum(file.size_bytes for file in self.files) + sum(sum(part.files.values()) for part in self.parts)

    @property
    def objects(self) -> Iterator[tuple[str, int]]:
        """Name and bytes of all that the checkpoint consists of, beside the manifest itself."""
        yield from ((file.name, file.size_bytes) for file in self.files)
        for part in self.parts:
            yield from ((part.name, part.size_bytes), *part.files.items())


def digest_of(data: bytes | bytearray | memoryview) -> str:
    """xxh3_128 in hexadecimal."""
    return xxhash.xxh3_128_hexdigest(data)


def sha256_of(data: bytes | bytearray | memoryview) -> str:
    """SHA-256 in hexadecimal: no other bytes with this digest can be made."""
    return hashlib.sha256(data).hexdigest()


def has_digest(data: bytes | memoryview, digest: str, *, sha256: str) -> bool:
    """Whether the bytes have their digest: `sha256` if it is known, else the fast one."""
    return sha256_of(data) == sha256 if sha256 else digest_of(data) == digest


@dataclass(frozen=True, slots=True)
class StateCounters:
    """The counters that a run resumes with. One that `state` lacks is 0: the state was saved without it."""

    step: Count
    skipped_in_a_row: Count = 0
    skipped_total: Count = 0
    positions: Count = 0
    data_digest: str | None = None  # of the data that the run was trained on; None if the state has none


def counters_of(state: Mapping[str, JsonValue], *, step: int) -> StateCounters:
    """The counters in the state of a checkpoint of `step`. Raises: ValueError naming the one that is wrong."""
    try:
        counters = as_record({"step": step, **state}, StateCounters)
    except ValueError as error:
        raise ValueError(f"`state` {error}") from error
    if counters.step != step:
        raise ValueError(f"`state.step` must be {step}, as the checkpoint's, but is {counters.step}")
    return counters
