"""The manifest: the one object that makes a folder of files a checkpoint. Free of torch."""

from collections.abc import Mapping
from dataclasses import dataclass

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
    files: tuple[FileRecord, ...]
    tensors: Mapping[str, TensorRecord]

    @property
    def size_bytes(self) -> int:
        """Bytes of all shard files."""
        return sum(file.size_bytes for file in self.files)


def digest_of(data: bytes | bytearray | memoryview) -> str:
    """The digest that the format uses, in hexadecimal."""
    return xxhash.xxh3_128_hexdigest(data)
