"""Exchange of bytes and JSON between ranks over a gloo group, never pickles."""

import json
from collections.abc import Callable
from dataclasses import asdict
from typing import TypeVar, cast

import torch
import torch.distributed as dist

from elastictrain import errors
from elastictrain.bounded_json import as_record
from elastictrain.checkpoint.manifest import JsonValue
from elastictrain.errors import CheckpointError, ElasticTrainError

T = TypeVar("T")


def broadcast_bytes(data: bytes, *, group: dist.ProcessGroup | None) -> bytes:
    """The bytes of rank 0 of the group. Collective: yes."""
    if group is None:
        return data
    first = dist.get_rank(group) == 0
    size = torch.tensor([len(data)], dtype=torch.int64)
    dist.broadcast(size, group=group, group_src=0)
    content = _tensor_of(data) if first else torch.empty(int(size), dtype=torch.uint8)
    if content.numel():
        dist.broadcast(content, group=group, group_src=0)
    return content.numpy().tobytes()


def gather_json(value: JsonValue, *, group: dist.ProcessGroup | None) -> list[JsonValue]:
    """The values of all ranks, in rank order, on all ranks. Collective: yes."""
    return [json.loads(data) for data in gather_bytes(json.dumps(value).encode(), group=group)]


def gather_bytes(data: bytes, *, group: dist.ProcessGroup | None, to_first: bool = False) -> list[bytes]:
    """The bytes (one at least) of all ranks, in rank order; with `to_first` on rank 0 alone. Collective: yes."""
    if group is None:
        return [data]
    world_size = dist.get_world_size(group)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(world_size)]
    dist.all_gather(sizes, torch.tensor([len(data)], dtype=torch.int64), group=group)
    longest = max(int(size) for size in sizes)
    padded = _tensor_of(data + bytes(longest - len(data)))
    receives = not to_first or dist.get_rank(group) == 0
    contents = [torch.empty(longest, dtype=torch.uint8) for _ in range(world_size)] if receives else []
    if to_first:
        dist.gather(padded, contents or None, group=group, group_dst=0)
    else:
        dist.all_gather(contents, padded, group=group)
    return [content.numpy().tobytes()[: int(size)] for content, size in zip(contents, sizes, strict=False)]


def gather_records(record: T, *, group: dist.ProcessGroup | None) -> list[T]:
    """`gather_json` for a dataclass of JSON values. Collective: yes."""
    return [as_record(row, type(record)) for row in gather_json(asdict(record), group=group)]  # type: ignore[call-overload]


def from_first(act: Callable[[], T], *, group: dist.ProcessGroup | None) -> T:
    """Rank 0 of the group acts; all ranks return its result, bytes or JSON, or raise its error. Collective: yes."""
    if group is None:
        return act()
    if dist.get_rank(group) != 0:
        answer = broadcast_bytes(b"", group=group)
        kind, content = answer[:1], answer[1:]
        if kind == b"!":
            raise revive(json.loads(content))
        return cast(T, content if kind == b"=" else json.loads(content))
    try:
        result = act()
    except BaseException as error:
        # Whatever the error is, the other ranks wait for an answer.
        broadcast_bytes(b"!" + json.dumps(describe(error)).encode(), group=group)
        raise
    broadcast_bytes(b"=" + result if isinstance(result, bytes) else b":" + json.dumps(result).encode(), group=group)
    return result


def describe(error: BaseException) -> dict[str, JsonValue]:
    """An error as JSON, for `revive` on another rank."""
    if not isinstance(error, ElasticTrainError):
        return {"type": CheckpointError.__name__, "message": f"{type(error).__name__}: {error}"}
    # An error that is private to its module is sent as its public base class.
    public = next(kind for kind in type(error).__mro__ if getattr(errors, kind.__name__, None) is kind)
    return {"type": public.__name__, "message": str(error)}


def revive(described: dict[str, JsonValue]) -> ElasticTrainError:
    """The described error; a CheckpointError if its class is not in `errors`."""
    kind = getattr(errors, str(described["type"]), None)
    if not isinstance(kind, type) or not issubclass(kind, ElasticTrainError):
        kind = CheckpointError
    return kind(str(described["message"]))


def _tensor_of(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
