"""The files beside the slots: layouts, named by their digest, and the digests of each snapshot's bytes."""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import local

import msgspec
import xxhash

from elastictrain.bounded_json import DOCUMENT, as_record, encode_record, parse_json
from elastictrain.checkpoint.manifest import digest_of
from elastictrain.checkpoint.memory.layout import RankDigests, RankLayout, layout_from_bytes
from elastictrain.checkpoint.memory.slot import Slot, SnapshotFacts
from elastictrain.errors import InvalidCheckpointError
from elastictrain.storage.private import write_file

_MOST_BYTES = 1 << 30
DIGEST_THREADS = max(1, min(8, (os.cpu_count() or 2) // 4))  # training needs the other cores


def read_file(path: str, *, max_bytes: int = _MOST_BYTES) -> bytes:
    """Raises: OSError, also if the file is larger than `max_bytes`."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    with os.fdopen(descriptor, "rb") as file:
        if os.fstat(descriptor).st_size > max_bytes:
            raise OSError(0, "it is too large", path)
        return file.read(max_bytes)


def store_layout(folder: str, layout: RankLayout) -> None:
    """Write the layout for the other processes of this host. Raises: OSError."""
    path = f"{folder}/layout-{layout.digest}.json"
    if not os.path.exists(path):  # noqa: PTH110
        write_file(path, layout.to_bytes())


def load_layout(folder: str, digest: str) -> RankLayout:
    """Raises: InvalidCheckpointError if it does not exist, or has another digest."""
    path = f"{folder}/layout-{digest}.json"
    try:
        layout = layout_from_bytes(read_file(path), where=path)
    except OSError as error:
        raise InvalidCheckpointError(f"{path} cannot be read: {error}") from error
    if layout.digest != digest:
        raise InvalidCheckpointError(f"{path} is another layout than its name says")
    return layout


def store_digests(slot_path: str, facts: SnapshotFacts, digests: RankDigests) -> None:
    """Write the digests of the snapshot in a slot. Raises: OSError."""
    named = {"incarnation": facts.incarnation, "step": facts.step, "layout": facts.layout}
    text = encode_record(named | msgspec.to_builtins(digests))
    write_file(f"{slot_path}.digests", digest_of(text).encode() + b"\n" + text)


def load_digests(slot_path: str, facts: SnapshotFacts) -> RankDigests | None:
    """The stored digests, if they are of exactly this snapshot."""
    try:
        stated, _, text = read_file(f"{slot_path}.digests").partition(b"\n")
        if stated.decode() != digest_of(text):
            return None
        document = parse_json(text, limits=DOCUMENT)
        if (document["incarnation"], document["step"], document["layout"]) != (facts.incarnation, facts.step, facts.layout):
            return None
        return as_record(document, RankDigests)
    except (OSError, ValueError, TypeError, KeyError):
        return None


def compute_digests(
    slot: Slot,
    layout: RankLayout,
    *,
    threads: int = DIGEST_THREADS,
    whole_files: bool = True,
    mapped: memoryview | None = None,
) -> RankDigests:
    """Digests of all bytes of a snapshot, files in parallel, in the memory of one chunk per thread. `mapped`: these bytes, if
    they are mapped in this process. Raises: OSError.

    Without `whole_files` the digests of files stay empty: a file's digest takes one thread, and reads need only the others.
    """
    files = [
        [(start, len(file.header))]
        + [(start + chunk.start, chunk.size_bytes) for placed in file.items for chunk in placed.chunks]
        for file, start in zip(layout.template, layout.starts, strict=True)
    ]
    buffers = local()

    def digest(ranges: Sequence[tuple[int, int]]) -> tuple[str, list[str]]:
        """The digest of all `ranges` as one, empty unless wanted, and one of each; a thread keeps its buffer."""
        longest = max(size_bytes for _, size_bytes in ranges)
        if mapped is None and len(getattr(buffers, "buffer", b"")) < longest:
            buffers.buffer = memoryview(bytearray(longest))
        whole, each = xxhash.xxh3_128(), []
        for begin, size_bytes in ranges:
            if mapped is not None:
                piece = mapped[begin : begin + size_bytes]
            else:
                piece = buffers.buffer[:size_bytes]
                slot.read_into(piece, start=begin)
            each.append(digest_of(piece))
            if whole_files:
                whole.update(piece)
        return whole.hexdigest() if whole_files else "", each

    tasks = files if whole_files else [[one] for ranges in files for one in ranges]
    with ThreadPoolExecutor(max(1, min(threads, len(tasks))), thread_name_prefix="digest") as pool:
        results = list(pool.map(digest, tasks))
    digests = (one for _, each in results for one in each)
    of_files = [[next(digests) for _ in ranges] for ranges in files]
    return RankDigests(
        tuple(whole for whole, _ in results) if whole_files else ("",) * len(files),
        tuple(header for header, *_ in of_files),
        tuple(chunk for _, *chunks in of_files for chunk in chunks),
    )
