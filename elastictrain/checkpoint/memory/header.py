"""The first page of a slot: what the snapshot in it is, and whether it is whole. Pure.

    bytes 0-7    magic
    bytes 8-15   state: 0 empty, 1 being written, 2 complete
    bytes 16-19  length of the body
    bytes 20-35  xxh3_128 of the body
    bytes 36-    body: JSON

A writer sets the state to 1 before it changes anything, and to 2 when everything else is in place. Killed at any moment it
leaves a slot that says 1, or a body that does not have its digest: neither is ever taken for a whole snapshot.
"""

import json
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from enum import IntEnum

import xxhash

from elastictrain.bounded_json import parse_json
from elastictrain.checkpoint.manifest import JsonValue
from elastictrain.errors import CheckpointError

VERSION = 1
_MAGIC = b"ETSNAP01"
_HEAD = struct.Struct("<8sQI16s")
_STATE_AT = 8


class SlotState(IntEnum):
    """What a slot holds."""

    EMPTY = 0
    WRITING = 1
    COMPLETE = 2


@dataclass(frozen=True, slots=True)
class SnapshotFacts:
    """What is known of one rank's snapshot besides its bytes."""

    version: int
    run: str
    """Name of the run in host memory."""

    incarnation: str
    step: int
    world_size: int
    rank: int
    layout: str
    """Digest of its layout."""

    config_digest: str
    created: float
    reason: str
    """Why it is to become durable, such as `interval`; empty if it stays in memory."""

    state: Mapping[str, JsonValue]
    """What the manifest says of the state."""

    @property
    def durable(self) -> bool:
        """Whether it is on its way to storage."""
        return bool(self.reason)


def mark(page: memoryview, state: SlotState) -> None:
    """Set the state: one aligned word, so that no reader ever sees half of it."""
    page[:_STATE_AT] = _MAGIC
    struct.pack_into("<Q", page, _STATE_AT, state)


def write_body(page: memoryview, facts: SnapshotFacts) -> None:
    """Put the facts in place. Raises: CheckpointError if they do not fit."""
    body = json.dumps(asdict(facts), separators=(",", ":"), allow_nan=False).encode()
    if _HEAD.size + len(body) > len(page):
        raise CheckpointError(f"the state of step {facts.step} must fit into {len(page)} bytes, but has {len(body)}")
    page[_HEAD.size : _HEAD.size + len(body)] = body
    struct.pack_into("<I16s", page, 16, len(body), xxhash.xxh3_128_digest(body))


def read_header(page: bytes | memoryview) -> SnapshotFacts | None:
    """The facts of a whole snapshot; None for anything else, however garbled."""
    if len(page) < _HEAD.size:
        return None
    magic, state, length, digest = _HEAD.unpack_from(page, 0)
    body = bytes(page[_HEAD.size : _HEAD.size + length])
    if magic != _MAGIC or state != SlotState.COMPLETE or len(body) != length or xxhash.xxh3_128_digest(body) != digest:
        return None
    try:
        return facts_from_json(parse_json(body))
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def facts_from_json(value: object) -> SnapshotFacts:
    """Raises: TypeError or ValueError for anything that `asdict` of facts would not give."""
    if not isinstance(value, dict) or value.keys() != {field.name for field in fields(SnapshotFacts)}:
        raise TypeError("the facts of a snapshot must have exactly the fields of SnapshotFacts")
    for name in ("version", "step", "world_size", "rank"):
        if isinstance(value[name], bool) or not isinstance(value[name], int) or value[name] < 0:
            raise TypeError(f"{name} must be a count, but is {value[name]!r}")
    for name in ("run", "incarnation", "layout", "config_digest", "reason"):
        if not isinstance(value[name], str):
            raise TypeError(f"{name} must be a text, but is {value[name]!r}")
    if value["version"] != VERSION:
        raise ValueError(f"the snapshot has format version {value['version']}, but this release reads {VERSION}")
    if not isinstance(value["created"], int | float) or not isinstance(value["state"], dict):
        raise TypeError("created must be a number and state an object")
    if value["rank"] >= value["world_size"]:
        raise ValueError(f"rank {value['rank']} is not below the world size {value['world_size']}")
    return SnapshotFacts(**value)
