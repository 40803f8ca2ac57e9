"""The manifest: the one object that makes a folder of files a checkpoint. Free of torch."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import xxhash

MANIFEST_NAME = "manifest.json"

JsonValue = None | bool | int | float | str | list["JsonValue"] | dict[str, "JsonValue"]


@dataclass(frozen=True, slots=True)
class ChunkRecord:
    """A box of a tensor: where it lies in the tensor, and which bytes of which file it is. The unit of verified reading."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    size_bytes: int
    digest: str
    sha256: str = ""
    """Only where the manifest is signed, and its signature was checked."""


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """One tensor; its chunks fill it exactly."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[ChunkRecord, ...]


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One shard file. `header_bytes` counts its length field, too."""

    name: str
    size_bytes: int
    digest: str
    header_bytes: int
    header_digest: str
    header_sha256: str = ""
    """As a chunk's: header and chunks are all of a file."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """All that is known of one checkpoint."""

    step: int
    world_size: int
    incarnation: str
    created: float
    config_digest: str
    versions: Mapping[str, str]
    state: Mapping[str, JsonValue]
    files: tuple[FileRecord, ...] = ()
    tensors: Mapping[str, TensorRecord] = field(default_factory=dict)
    """Files and tensors are empty as long as not all ranks have told theirs; `commit.build_manifest` puts them in."""

    signature: str = ""
    """Empty if it is not signed."""

    @property
    def size_bytes(self) -> int:
        """Bytes of all shard files."""
        return sum(file.size_bytes for file in self.files)


def digest_of(data: bytes | bytearray | memoryview) -> str:
    """The digest that the format uses, in hexadecimal."""
    return xxhash.xxh3_128_hexdigest(data)


def sha256_of(data: bytes | bytearray | memoryview) -> str:
    """The digest that nobody can make other bytes for, in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def has_digest(data: bytes | memoryview, digest: str, *, sha256: str) -> bool:
    """Whether these are the bytes that the manifest has; `sha256` outweighs the fast digest where it is known."""
    return sha256_of(data) == sha256 if sha256 else digest_of(data) == digest
