"""`elastictrain.PerRank`: state that each rank has for itself, such as the place of a stream that it reads."""

import base64
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from elastictrain.bounded_json import encode_record, parse_json
from elastictrain.checkpoint.tensor_bytes import dtype_name, tensor_over
from elastictrain.errors import ConfigError, Problem
from elastictrain.own_loop.nest import UnknownValueError, put_together, take_apart
from elastictrain.train.parameters import local

_MOST_BYTES = 1 << 18


@runtime_checkable
class HasStateDict(Protocol):
    """A scheduler, an average of weights, a data loader with a position: what torch calls stateful."""

    def state_dict(self) -> Mapping[str, object]: ...

    def load_state_dict(self, state: Mapping[str, object], /) -> object: ...


@runtime_checkable
class HasGetState(Protocol):
    """An iterator of grain."""

    def get_state(self) -> Mapping[str, object]: ...

    def set_state(self, state: Mapping[str, object], /) -> object: ...


class PerRank:
    """For `extra` of `attach`: the state of `source` is saved and restored on each rank for itself. A run that has it goes on
    with the number of ranks that it began with.

        loader = StatefulDataLoader(stream, batch_size=8, num_workers=2)
        with elastictrain.attach("runs/mine", ..., extra={"loader": elastictrain.PerRank(loader)}) as run:
    """

    def __init__(self, source: object) -> None:
        """`source` has `state_dict` and `load_state_dict`, or `get_state` and `set_state`. Its state consists of tensors,
        numbers, texts, lists and mappings, and is the place before what it gives next. Raises: ConfigError."""
        if not isinstance(source, HasStateDict | HasGetState):
            methods = "`state_dict` and `load_state_dict`, or `get_state` and `set_state`"
            message = f"must be given an object with {methods}, but is given a {type(source).__name__}"
            raise ConfigError([Problem("elastictrain.PerRank", message)])
        self._source = source

    def tensor(self, name: str, mesh: DeviceMesh | None) -> Tensor:
        """The states of all ranks as JSON with spaces after it, [ranks, 262144] uint8, of which this rank has its row.
        Collective: no. Raises: ConfigError naming the extra `name`."""
        state = self._source.state_dict() if isinstance(self._source, HasStateDict) else self._source.get_state()
        tensors: dict[str, Tensor] = {}
        try:
            document = take_apart(state, name, tensors)
        except UnknownValueError as error:
            message = f"must have a state of tensors, numbers, texts, lists and mappings, not of pickles, but {error}"
            raise ConfigError([Problem(name, message)]) from error
        text = encode_record({"state": document, "tensors": {key: _packed(one) for key, one in tensors.items()}})
        if len(text) > _MOST_BYTES:
            message = f"must have a state of at most {_MOST_BYTES} bytes as JSON, but it has {len(text)}"
            raise ConfigError([Problem(name, message)])
        row = torch.frombuffer(bytearray(text.ljust(_MOST_BYTES)), dtype=torch.uint8).unsqueeze(0)
        return row if mesh is None else DTensor.from_local(row, mesh, [Shard(0)], run_check=False)

    def load(self, stored: Tensor) -> None:
        """Give the source what `tensor` has returned."""
        record: Any = parse_json(bytes(local(stored).numpy().tobytes()))
        state = put_together(record["state"], {key: _unpacked(one) for key, one in record["tensors"].items()})
        if isinstance(self._source, HasStateDict):
            self._source.load_state_dict(state)
        else:
            self._source.set_state(state)


def _packed(tensor: Tensor) -> list[object]:
    content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return [dtype_name(tensor.dtype), list(tensor.shape), base64.b64encode(content).decode()]


def _unpacked(packed: Any) -> Tensor:
    dtype, shape, content = packed
    return tensor_over(memoryview(bytearray(base64.b64decode(content))), dtype=dtype, sizes=tuple(shape))
