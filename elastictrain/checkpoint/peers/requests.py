"""Requests between peers, and the checks of received ones. Pure."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import msgspec

from elastictrain.bounded_json import MalformedJsonError, as_record, encode_record
from elastictrain.checkpoint.manifest import Count, JsonValue
from elastictrain.checkpoint.memory.layout import RankDigests, RankLayout, layout_from_bytes
from elastictrain.checkpoint.memory.slot import SnapshotFacts, SnapshotId
from elastictrain.errors import CheckpointError
from elastictrain.net.channel import Handshake

HANDSHAKE = Handshake(magic=b"ETPEER01", nonce_bytes=32)

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,254}")


@dataclass(frozen=True, slots=True)
class Limits:
    """How long one side waits for the other, in seconds; each limit holds for the whole operation."""

    connect_s: float = 5.0
    handshake_s: float = 5.0  # of the requesting side; the listening side gives it two seconds at most
    io_s: float = 30.0  # one frame, or the answer to a request
    prepare_s: float = 180.0  # room for a replica, which the kernel zeroes first, or the digests of one that has arrived
    idle_s: float = 60.0  # a connection without a request


class RefusedError(Exception):
    """A refused request; message and code go to the other side."""

    def __init__(self, message: str, *, code: Literal["refused", "malformed", "missing"] = "refused") -> None:
        super().__init__(message)
        self.code = code


class Get(msgspec.Struct, frozen=True, tag_field="op", tag="get"):
    """Bytes [start, start + length) of a snapshot, in the order of its layout."""

    run: str
    incarnation: str
    step: Count
    rank: Count
    start: Count
    length: Count

    def __str__(self) -> str:
        return f"the snapshot of rank {self.rank} at step {self.step} (incarnation {self.incarnation})"


class _PutRecord(msgspec.Struct, frozen=True, tag_field="op", tag="put"):
    facts: SnapshotFacts
    layout: str
    digests: RankDigests
    size_bytes: Count
    safe: SnapshotId | None = None


@dataclass(frozen=True, slots=True)
class Put:
    """A replica; its bytes follow once the peer asks for them. It overwrites none of `safe`."""

    facts: SnapshotFacts
    layout: RankLayout
    digests: RankDigests
    safe: SnapshotId | None = None


def request_to_json(request: Get | Put) -> dict[str, JsonValue]:
    """What `parse_request` reads on the other side; of a replica without its bytes, whose number it announces."""
    record: Get | _PutRecord
    if isinstance(request, Put):
        layout = request.layout
        record = _PutRecord(request.facts, layout.to_bytes().decode(), request.digests, layout.size_bytes, request.safe)
    else:
        record = request
    message: dict[str, JsonValue] = msgspec.to_builtins(record)
    return message


def parse_request(message: Mapping[str, JsonValue]) -> Get | Put:
    """A request whose parts fit together. Raises: RefusedError."""
    try:
        record: Get | _PutRecord = as_record(message, Get | _PutRecord)  # type: ignore[arg-type]
    except MalformedJsonError as error:
        raise RefusedError(f"the request {error}", code="malformed") from error
    if isinstance(record, Get):
        return record
    try:
        layout = layout_from_bytes(record.layout.encode(), where="the layout")
        # Infinite numbers can be parsed, but not encoded.
        encode_record(record.facts)
        problem = _mismatch(record, layout)
    except (ValueError, CheckpointError) as error:
        problem = f"it is no replica: {error}"
    if problem:
        raise RefusedError(problem, code="malformed")
    return Put(record.facts, layout, record.digests, record.safe)


def _mismatch(record: _PutRecord, layout: RankLayout) -> str:
    """Why the parts do not fit together; empty if they do. Raises: CheckpointError."""
    facts, digests = record.facts, record.digests
    if not _NAME.fullmatch(facts.incarnation):
        return f"`incarnation` must be a name, but is {facts.incarnation!r:.200}"
    if layout.digest != facts.layout:
        return f"the layout has digest {layout.digest}, but the facts say {facts.layout!r:.200}"
    # Counted before it is expanded: a layout of a few bytes can have more chunks than there is memory for.
    chunks = sum(_num_chunks(item.sizes, item.size_bytes, layout.chunk_bytes) for item in layout.items)
    if chunks != len(digests.chunks):
        return f"the layout has {chunks} chunks, but {len(digests.chunks)} digests of chunks came"
    files = len(layout.template)
    if not files == len(digests.files) == len(digests.headers):
        return f"the layout has {files} files, but {len(digests.files)} digests of files came"
    if layout.size_bytes != record.size_bytes:
        return f"the layout has {layout.size_bytes} bytes, but {record.size_bytes} are announced"
    return ""


def _num_chunks(sizes: tuple[int, ...], size_bytes: int, chunk_bytes: int) -> int:
    """The number of chunks that `split_item` would make."""
    if size_bytes <= chunk_bytes or not sizes:
        return 1
    rows_per_chunk = max(1, chunk_bytes // (size_bytes // sizes[0]))
    return -(-sizes[0] // rows_per_chunk)
