"""What peers ask each other for, and the checks of what comes in. Pure."""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from elastictrain.checkpoint.manifest import JsonValue
from elastictrain.checkpoint.memory.header import SnapshotFacts, facts_from_json
from elastictrain.checkpoint.memory.layout import (
    RankDigests,
    RankLayout,
    digests_from_json,
    digests_to_json,
    layout_from_bytes,
)
from elastictrain.errors import CheckpointError
from elastictrain.net.channel import Handshake

HANDSHAKE = Handshake(magic=b"ETPEER01", nonce_bytes=32)

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,254}")


@dataclass(frozen=True, slots=True)
class Limits:
    """How long one side waits for the other, in seconds; all of what is waited for must have come by then."""

    connect_s: float = 5.0

    handshake_s: float = 5.0
    """Of the side that asks; the other one gives it two seconds at most."""

    io_s: float = 30.0
    """One frame, or the answer to a request."""

    prepare_s: float = 180.0
    """Making room for a replica: the system clears the memory first."""

    idle_s: float = 60.0
    """A connection without a request."""


class RequestError(ValueError):
    """A request that makes no sense; the message is for the other side."""


@dataclass(frozen=True, slots=True)
class SnapshotKey:
    """Which snapshot of which rank."""

    run: str
    incarnation: str
    step: int
    rank: int

    def __str__(self) -> str:
        return f"the snapshot of rank {self.rank} at step {self.step} (incarnation {self.incarnation})"


def key_of(facts: SnapshotFacts) -> SnapshotKey:
    """The snapshot that the facts are of."""
    return SnapshotKey(facts.run, facts.incarnation, facts.step, facts.rank)


@dataclass(frozen=True, slots=True)
class Get:
    """Bytes [start, start + length) of a snapshot, counted as its layout does."""

    key: SnapshotKey
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class Put:
    """A replica; its bytes follow when the answer says so."""

    facts: SnapshotFacts
    layout: RankLayout
    digests: RankDigests


def get_to_json(get: Get) -> dict[str, JsonValue]:
    """The request."""
    key: dict[str, JsonValue] = asdict(get.key)
    return {"op": "get", **key, "start": get.start, "length": get.length}


def get_from_json(message: Mapping[str, JsonValue]) -> Get:
    """Raises: RequestError."""
    key = SnapshotKey(_text(message, "run"), _text(message, "incarnation"), _count(message, "step"), _count(message, "rank"))
    return Get(key, _count(message, "start"), _count(message, "length"))


def put_to_json(put: Put) -> dict[str, JsonValue]:
    """The request."""
    facts: dict[str, JsonValue] = asdict(put.facts)
    digests: dict[str, JsonValue] = {name: list(texts) for name, texts in digests_to_json(put.digests).items()}
    return {
        "op": "put",
        "facts": facts,
        "layout": put.layout.to_bytes().decode(),
        "digests": digests,
        "size_bytes": put.layout.size_bytes,
    }


def put_from_json(message: Mapping[str, JsonValue]) -> Put:
    """Facts, layout, digests and size that belong to each other. Raises: RequestError."""
    try:
        facts = facts_from_json(message.get("facts"))
        digests = digests_from_json(message.get("digests"))
        layout = layout_from_bytes(_text(message, "layout").encode(), where="the layout")
        if not _NAME.fullmatch(facts.incarnation):
            raise RequestError(f"`incarnation` must be a name, but is {facts.incarnation!r:.200}")
        # Infinite numbers can be read, but not written.
        json.dumps(asdict(facts), allow_nan=False)
        if layout.digest != facts.layout:
            raise RequestError(f"the layout has digest {layout.digest}, but the facts say {facts.layout!r:.200}")
        # Counted before it is laid out: a layout of a few bytes can have more chunks than there is memory for.
        chunks = sum(_num_chunks(item.sizes, item.size_bytes, layout.chunk_bytes) for item in layout.items)
        if chunks != len(digests.chunks):
            raise RequestError(f"the layout has {chunks} chunks, but {len(digests.chunks)} digests of chunks came")
        files = len(layout.template)
        if not files == len(digests.files) == len(digests.headers):
            raise RequestError(f"the layout has {files} files, but {len(digests.files)} digests of files came")
        size_bytes = _count(message, "size_bytes")
        if layout.size_bytes != size_bytes:
            raise RequestError(f"the layout has {layout.size_bytes} bytes, but {size_bytes} are announced")
    except RequestError:
        raise
    except (ValueError, TypeError, KeyError, CheckpointError) as error:
        raise RequestError(f"it is no replica: {error}") from error
    return Put(facts, layout, digests)


def _num_chunks(sizes: tuple[int, ...], size_bytes: int, chunk_bytes: int) -> int:
    """How many `split_item` would make."""
    if size_bytes <= chunk_bytes or not sizes:
        return 1
    rows_per_chunk = max(1, chunk_bytes // (size_bytes // sizes[0]))
    return -(-sizes[0] // rows_per_chunk)


def _text(message: Mapping[str, JsonValue], name: str) -> str:
    value = message.get(name)
    if not isinstance(value, str):
        raise RequestError(f"`{name}` must be a text, but is {value!r:.200}")
    return value


def _count(message: Mapping[str, JsonValue], name: str) -> int:
    value = message.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
        raise RequestError(f"`{name}` must be a count, but is {value!r:.200}")
    return value
