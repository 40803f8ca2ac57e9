"""Where the samples of webdataset's tar files lie, so that any of them can be read alone.

The folder of an index holds `samples.bin`, the bytes [begin, end) of each sample in its tar file as little-endian uint64
[num_samples, 2], and `index.json`, which is written last. Tar files below the folder are named relative to it.
"""

import io
import json
import re
import tarfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Annotated, Any

import msgspec
import numpy as np
import xxhash

from elastictrain.bounded_json import DOCUMENT, as_record, parse_json
from elastictrain.data.sources import SourceFile, StoredFile
from elastictrain.errors import DataError, ObjectNotFoundError
from elastictrain.storage.bounded_read import DOCUMENT_BYTES, read_bounded
from elastictrain.storage.opening import absolute_url, open_store
from elastictrain.storage.store import Store

INDEX_FILE, SAMPLES_FILE = "index.json", "samples.bin"
FORMAT = "elastictrain.tar"
VERSION = 1
_READ_AHEAD_BYTES = 1 << 20
_BLOCK_BYTES = 512  # of which a tar file consists
# Source: webdataset, `tariterators.base_plus_ext`: the key of a sample ends at the first dot of the file's own name.
_MEMBER = re.compile(r"((?:.*/)?[^./][^/.]*)\.([^/]+)")

_Count = Annotated[int, msgspec.Meta(ge=0)]


@dataclass(frozen=True, slots=True)
class TarShard:
    url: str  # relative to the index's folder, where it lies below it
    size_bytes: _Count
    num_samples: _Count


@dataclass(frozen=True, slots=True)
class TarIndex:
    shards: tuple[TarShard, ...]
    samples_xxh3_128: str

    @property
    def num_samples(self) -> int:
        return sum(shard.num_samples for shard in self.shards)


def members(tar: tarfile.TarFile) -> Iterator[tuple[str, str, tarfile.TarInfo]]:
    """(key, extension, member) of the files that belong to a sample; extensions are in lower case."""
    for member in tar:
        name = _MEMBER.fullmatch(member.name)
        if member.isreg() and name is not None:
            yield name[1], name[2].lower(), member


def end_of(member: tarfile.TarInfo) -> int:
    """Where the blocks of a member end."""
    return member.offset_data + -(-member.size // _BLOCK_BYTES) * _BLOCK_BYTES


def scan(source: SourceFile) -> list[tuple[int, int]]:
    """The bytes [begin, end) of each sample of a tar file: consecutive files with one key. Raises: DataError; StorageError."""
    found: list[tuple[int, int]] = []
    last, extensions = None, set[str]()
    folder, _, name = source.url.rpartition("/")
    stored = StoredFile(open_store(folder or "/", follow_links=True), name, size_bytes=source.size_bytes)
    try:
        with (
            io.BufferedReader(stored, _READ_AHEAD_BYTES) as file,
            tarfile.open(fileobj=file, mode="r:") as tar,
        ):
            for key, extension, member in members(tar):
                end = end_of(member)
                if key != last:
                    found.append((member.offset, end))
                    last, extensions = key, set()
                if extension in extensions:
                    raise DataError(f"{source.url} must have each file of a sample once, but has {member.name} twice")
                extensions.add(extension)
                found[-1] = (found[-1][0], end)
            # A block of zeros ends the archive.
            whole = tar.offset + _BLOCK_BYTES <= source.size_bytes
    except tarfile.TarError as error:
        message = f"{source.url} must be a tar file without compression, but is not, or is damaged: {error}"
        raise DataError(message) from None
    if not whole:
        raise DataError(f"{source.url} must be a whole tar file, but lacks its end; copy it again")
    if not found:
        raise DataError(f"{source.url} must have files with names like KEY.EXTENSION, but has none")
    return found


def make_index(
    sources: Sequence[SourceFile], store: Store, *, workers: int, on_bytes: Callable[[int], object] = lambda _: None
) -> TarIndex:
    """Write the index of the tar files `sources` to `store`. `workers`: processes, 0 for this one. Raises: as `scan`."""
    folder = f"{absolute_url(store.url).rstrip('/')}/"
    shards, ranges = list[TarShard](), list[Any]()

    def take(scanned: Iterator[list[tuple[int, int]]]) -> None:
        for source, found in zip(sources, scanned, strict=True):
            url = absolute_url(source.url).removeprefix(folder)
            shards.append(TarShard(url, source.size_bytes, len(found)))
            ranges.append(np.array(found, dtype="<u8"))
            on_bytes(source.size_bytes)

    if workers:
        with get_context("spawn").Pool(workers) as pool:
            take(pool.imap(scan, sources))
    else:
        take(map(scan, sources))
    content = np.concatenate(ranges).tobytes()
    index = TarIndex(tuple(shards), xxhash.xxh3_128_hexdigest(content))
    store.write(SAMPLES_FILE, content)
    record = {"format": FORMAT, "version": VERSION, **msgspec.to_builtins(index)}
    store.write(INDEX_FILE, json.dumps(record, indent=1).encode() + b"\n")
    return index


def read_index(store: Store) -> tuple[TarIndex, "np.ndarray[Any, np.dtype[np.uint64]]"]:
    """The index at the store's root, and the bytes of samples [num_samples, 2]. Raises: DataError; StorageError."""
    make = f"make it with: python -m elastictrain.data index TAR... --out {store.url}"
    url = f"{store.url}/{INDEX_FILE}"
    try:
        record = parse_json(read_bounded(store, INDEX_FILE, max_bytes=DOCUMENT_BYTES), limits=DOCUMENT)
    except ObjectNotFoundError:
        raise DataError(f"{store.url} must be an index of tar files, but has no {INDEX_FILE}; {make}") from None
    except ValueError as error:
        raise DataError(f"{url} must be an index of tar files, but {error}; {make}") from None
    if not isinstance(record, dict) or (record.get("format"), record.get("version")) != (FORMAT, VERSION):
        raise DataError(f"{url} must be an index of tar files, version {VERSION}, but is something else; {make}")
    try:
        index = as_record(record, TarIndex)
    except ValueError as error:
        raise DataError(f"{url} is damaged: it {error}; {make}") from None
    content = store.read(SAMPLES_FILE, end=16 * index.num_samples + 1)
    if xxhash.xxh3_128_hexdigest(content) != index.samples_xxh3_128 or len(content) != 16 * index.num_samples:
        raise DataError(f"{store.url}/{SAMPLES_FILE} must be that of {INDEX_FILE} beside it, but is another one; {make}")
    return index, np.frombuffer(content, dtype="<u8").reshape(-1, 2).astype(np.uint64)
