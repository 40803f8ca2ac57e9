"""Writes laid-out shard files through a store, digesting what it writes. Free of torch: bytes come from a `ByteSource`."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import xxhash

from elastictrain.checkpoint.layout import Item, ShardFile
from elastictrain.checkpoint.manifest import ChunkRecord, FileRecord, digest_of, sha256_of
from elastictrain.storage.store import Store

FILES_AT_ONCE = 4

ByteReader = Callable[[int, int], memoryview]
"""Bytes [begin, end) of one item, valid until the next call."""

ByteSource = Callable[[Item], ByteReader]
"""Opens the bytes of an item; called when its turn comes, so that only what is being written needs memory."""


@dataclass(frozen=True, slots=True)
class WrittenItem:
    """One item as it now lies in storage."""

    item: Item
    file: FileRecord
    chunks: tuple[ChunkRecord, ...]


def write_files(
    store: Store, files: Sequence[ShardFile], *, prefix: str, source: ByteSource, sha256: bool = False
) -> tuple[WrittenItem, ...]:
    """Writes all files below the key `prefix`, some at once; on return they are durable.

    With `sha256` the records have that, too, for a manifest that will be signed.

    Raises: the first StorageError of any of them, after all have ended.
    """
    if len(files) <= 1:
        return tuple(
            written for file in files for written in write_file(store, file, prefix=prefix, source=source, sha256=sha256)
        )
    with ThreadPoolExecutor(min(FILES_AT_ONCE, len(files)), thread_name_prefix="save") as pool:
        futures = [pool.submit(write_file, store, file, prefix=prefix, source=source, sha256=sha256) for file in files]
        return tuple(written for future in futures for written in future.result())


def write_file(
    store: Store, file: ShardFile, *, prefix: str, source: ByteSource, sha256: bool = False
) -> tuple[WrittenItem, ...]:
    """Writes one file chunk by chunk."""
    whole = xxhash.xxh3_128(file.header)
    chunks: list[tuple[ChunkRecord, ...]] = []
    with store.open_writer(f"{prefix}/{file.name}") as writer:
        writer.write(file.header)
        for placed in file.items:
            read = source(placed.item)
            records = []
            for chunk in placed.chunks:
                data = read(chunk.begin, chunk.begin + chunk.size_bytes)
                whole.update(data)
                digest, strong = digest_of(data), sha256_of(data) if sha256 else ""
                writer.write(data)
                records.append(
                    ChunkRecord(
                        chunk.offsets, chunk.sizes, file.name, placed.start + chunk.begin, chunk.size_bytes, digest, strong
                    )
                )
            chunks.append(tuple(records))
    strong = sha256_of(file.header) if sha256 else ""
    record = FileRecord(file.name, file.size_bytes, whole.hexdigest(), len(file.header), digest_of(file.header), strong)
    return tuple(WrittenItem(placed.item, record, of_item) for placed, of_item in zip(file.items, chunks, strict=True))
