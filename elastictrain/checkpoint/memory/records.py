"""The files beside the slots: layouts, by their digest, and the digests of each snapshot's bytes."""

import json
import os
import secrets
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import local

import xxhash

from elastictrain.bounded_json import DOCUMENT, parse_json
from elastictrain.checkpoint.layout import ShardFile
from elastictrain.checkpoint.manifest import digest_of
from elastictrain.checkpoint.memory.header import SnapshotFacts
from elastictrain.checkpoint.memory.layout import (
    RankDigests,
    RankLayout,
    digests_from_json,
    digests_to_json,
    layout_from_bytes,
)
from elastictrain.checkpoint.memory.slot import Slot
from elastictrain.errors import InvalidCheckpointError

_MOST_BYTES = 1 << 30
DIGEST_THREADS = max(1, min(8, (os.cpu_count() or 2) // 4))
"""Training needs the other cores."""


def write_file(path: str, data: bytes) -> None:
    """Replaces the file at once. Raises: OSError."""
    unfinished = f"{path}.{os.getpid()}-{secrets.token_hex(4)}.tmp"
    try:
        descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        os.rename(unfinished, path)  # noqa: PTH104
    except BaseException:
        with suppress(OSError):
            os.unlink(unfinished)  # noqa: PTH108
        raise


def read_file(path: str, *, most_bytes: int = _MOST_BYTES) -> bytes:
    """Raises: OSError, also if the file is larger than any that we write."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    with os.fdopen(descriptor, "rb") as file:
        if os.fstat(descriptor).st_size > most_bytes:
            raise OSError(0, "it is too large", path)
        return file.read(most_bytes)


def layout_path(folder: str, digest: str) -> str:
    """Where the layout of that digest lies."""
    return f"{folder}/layout-{digest}.json"


def store_layout(folder: str, layout: RankLayout) -> None:
    """Make the layout known to others on this host. Raises: OSError."""
    path = layout_path(folder, layout.digest)
    if not os.path.exists(path):  # noqa: PTH110
        write_file(path, layout.to_bytes())


def load_layout(folder: str, digest: str) -> RankLayout:
    """Raises: InvalidCheckpointError if it is not there, or is not the one of that digest."""
    path = layout_path(folder, digest)
    try:
        layout = layout_from_bytes(read_file(path), where=path)
    except OSError as error:
        raise InvalidCheckpointError(f"{path} cannot be read: {error}") from error
    if layout.digest != digest:
        raise InvalidCheckpointError(f"{path} is another layout than its name says")
    return layout


def store_digests(slot_path: str, facts: SnapshotFacts, digests: RankDigests) -> None:
    """Note the digests of what is in a slot. Raises: OSError."""
    document = {"incarnation": facts.incarnation, "step": facts.step, "layout": facts.layout, **digests_to_json(digests)}
    text = json.dumps(document, separators=(",", ":")).encode()
    write_file(f"{slot_path}.digests", digest_of(text).encode() + b"\n" + text)


def load_digests(slot_path: str, facts: SnapshotFacts) -> RankDigests | None:
    """The noted digests, if they are of this very snapshot."""
    try:
        stated, _, text = read_file(f"{slot_path}.digests").partition(b"\n")
        if stated.decode() != digest_of(text):
            return None
        document = parse_json(text, limits=DOCUMENT)
        if (document["incarnation"], document["step"], document["layout"]) != (facts.incarnation, facts.step, facts.layout):
            return None
        return digests_from_json(document)
    except (OSError, ValueError, TypeError, KeyError):
        return None


def compute_digests(slot: Slot, layout: RankLayout, *, threads: int = DIGEST_THREADS) -> RankDigests:
    """Digests of all bytes of a snapshot, files side by side, in the memory of one chunk per thread. Raises: OSError."""
    starts = layout.starts

    def of_file(index: int) -> tuple[str, str, list[str]]:
        file: ShardFile = layout.template[index]
        longest = max((chunk.size_bytes for placed in file.items for chunk in placed.chunks), default=0)
        buffer = memoryview(bytearray(max(longest, len(file.header))))

        def read(begin: int, size_bytes: int) -> memoryview:
            piece = buffer[:size_bytes]
            slot.read_into(piece, start=starts[index] + begin)
            return piece

        header = read(0, len(file.header))
        whole, header_digest = xxhash.xxh3_128(header), digest_of(header)
        chunks = []
        for placed in file.items:
            for chunk in placed.chunks:
                piece = read(placed.start + chunk.begin, chunk.size_bytes)
                whole.update(piece)
                chunks.append(digest_of(piece))
        return whole.hexdigest(), header_digest, chunks

    with ThreadPoolExecutor(max(1, min(threads, len(starts))), thread_name_prefix="digest") as pool:
        results = list(pool.map(of_file, range(len(starts))))
    return RankDigests(
        tuple(whole for whole, _, _ in results),
        tuple(header for _, header, _ in results),
        tuple(chunk for _, _, chunks in results for chunk in chunks),
    )


def compute_chunk_digests(slot: Slot, layout: RankLayout, *, threads: int) -> RankDigests:
    """The same but for those of whole files, which take a file's length to compute, and are left empty: enough to read by.

    Raises: OSError.
    """
    headers = [(start, len(file.header)) for file, start in zip(layout.template, layout.starts, strict=True)]
    chunks = [
        (start + placed.start + chunk.begin, chunk.size_bytes)
        for file, start in zip(layout.template, layout.starts, strict=True)
        for placed in file.items
        for chunk in placed.chunks
    ]
    longest = max((size_bytes for _, size_bytes in (*headers, *chunks)), default=0)
    buffers = local()

    def of_range(begin_and_size: tuple[int, int]) -> str:
        begin, size_bytes = begin_and_size
        if not hasattr(buffers, "buffer"):
            buffers.buffer = memoryview(bytearray(longest))
        piece: memoryview = buffers.buffer[:size_bytes]
        slot.read_into(piece, start=begin)
        return digest_of(piece)

    with ThreadPoolExecutor(threads, thread_name_prefix="digest") as pool:
        return RankDigests(("",) * len(headers), tuple(pool.map(of_range, headers)), tuple(pool.map(of_range, chunks)))
