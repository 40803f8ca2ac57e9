"""Reads and writes folders of Hugging Face weights, one tensor at a time."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from elastictrain.checkpoint.safetensors_format import BY_CODE, MAX_HEADER_BYTES, HeaderEntry, decode_header, encode_header
from elastictrain.checkpoint.tensor_bytes import dtype_name, tensor_over
from elastictrain.errors import ConfigError, DataError, InvalidCheckpointError, ObjectNotFoundError
from elastictrain.storage.store import Store

from .config import LlamaConfig
from .huggingface import (
    config_problems,
    huggingface_config,
    huggingface_name,
    parameter_shapes,
    plan_shards,
    weight_index,
)

_CONFIG = "config.json"
_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


def export_weights(
    parameter: Callable[[str], Tensor],
    *,
    config: LlamaConfig,
    store: Store,
    dtype: torch.dtype = torch.bfloat16,
    shard_bytes: int = 5 * 10**9,
) -> None:
    """Write a folder that `transformers.AutoModelForCausalLM.from_pretrained` reads.

    Args:
        parameter: the whole tensor of one of our names; asked once for each, in the model's order, so that no more than one
            has to be in memory.

    Raises: DataError if a tensor has not the shape that `config` says.
    """
    shapes = parameter_shapes(config)
    ours = {huggingface_name(name): name for name in shapes}
    plan = plan_shards(
        {theirs: shapes[name] for theirs, name in ours.items()}, element_bytes=dtype.itemsize, shard_bytes=shard_bytes
    )
    for file, entries in plan.items():
        with store.open_writer(file) as writer:
            writer.write(_header(entries, dtype=dtype))
            for theirs, shape in entries.items():
                tensor = parameter(ours[theirs])
                if tuple(tensor.shape) != shape:
                    raise DataError(f"{ours[theirs]} must have the shape {shape} of the model, but has {tuple(tensor.shape)}")
                writer.write(_raw_bytes(tensor.to(dtype)))
    if len(plan) > 1:
        total_bytes = sum(math.prod(shape) for shape in shapes.values()) * dtype.itemsize
        store.write(_INDEX, _json(weight_index(plan, total_bytes=total_bytes)))
    store.write(_CONFIG, _json(huggingface_config(config, dtype=dtype)))


@dataclass(frozen=True, slots=True)
class _Header:
    entries: Mapping[str, HeaderEntry]
    size_bytes: int
    """Of the header with its length: where the tensors begin."""


class HuggingFaceWeights:
    """The weights in a folder, read one tensor at a time; headers are read once."""

    def __init__(self, store: Store, *, config: LlamaConfig) -> None:
        self._store = store
        self._shapes = parameter_shapes(config)
        self._config = config
        self._files: dict[str, str] | None = None
        self._headers: dict[str, _Header] = {}

    def read(self, name: str) -> Tensor:
        """The tensor of our parameter `name`, on the CPU in the file's dtype.

        Raises: ConfigError if config.json describes another model; DataError, naming file and tensor, if the tensor is missing,
            has another shape or is cut short; StorageError.
        """
        if self._files is None:
            self._check_config()
            self._files = self._locate()
        theirs = huggingface_name(name)
        file = self._files.get(theirs, _SINGLE)
        if file not in self._headers:
            self._headers[file] = self._read_header(file)
        url = f"{self._store.url}/{file}"
        header = self._headers[file]
        entry = header.entries.get(theirs)
        if entry is None:
            hint = "; set model.tie_embeddings=true if the head is the embedding" if name == "head.weight" else ""
            raise DataError(f"{url} must hold the tensor {theirs}, but does not{hint}")
        if entry.shape != self._shapes[name]:
            raise DataError(f"{url}: {theirs} must have the shape {self._shapes[name]} of the model, but has {entry.shape}")
        data = self._store.read(file, start=header.size_bytes + entry.span[0], end=header.size_bytes + entry.span[1])
        element = BY_CODE[entry.code]
        expected = math.prod(entry.shape) * element.size_bytes
        if len(data) != expected:
            raise DataError(f"{url}: {theirs} must have {expected} bytes, but has {len(data)}; fetch the file again")
        return tensor_over(memoryview(bytearray(data)), dtype=element.name, sizes=entry.shape)

    def _check_config(self) -> None:
        source = f"{self._store.url}/{_CONFIG}"
        stored = self._read_json(_CONFIG)
        if stored is None:
            raise DataError(f"{source} must exist, but does not; `task.init_from` takes a folder of Hugging Face weights")
        problems = config_problems(stored, self._config, source=source)
        if problems:
            raise ConfigError(problems)

    def _locate(self) -> dict[str, str]:
        """Tensor -> file for sharded weights; empty if there is a single file."""
        index = self._read_json(_INDEX)
        if index is None:
            return {}
        files = index.get("weight_map")
        if not isinstance(files, dict):
            raise DataError(f"{self._store.url}/{_INDEX} must have a `weight_map`, but has none; fetch it again")
        return {str(name): str(file) for name, file in files.items()}

    def _read_header(self, file: str) -> _Header:
        url = f"{self._store.url}/{file}"
        try:
            length = min(int.from_bytes(self._store.read(file, end=8), "little"), MAX_HEADER_BYTES)
            head = self._store.read(file, end=8 + length)
            entries = decode_header(head, where=url)
        except ObjectNotFoundError as error:
            raise DataError(f"{url} must exist, but does not; `task.init_from` needs weights as safetensors") from error
        except InvalidCheckpointError as error:
            raise DataError(f"{error}; fetch it again") from error
        return _Header(entries, len(head))

    def _read_json(self, key: str) -> dict[str, object] | None:
        """None if there is no such file."""
        try:
            text = self._store.read(key)
        except ObjectNotFoundError:
            return None
        try:
            content = json.loads(text)
        except ValueError as error:
            raise DataError(f"{self._store.url}/{key} must be JSON, but is not: {error}; fetch it again") from error
        if not isinstance(content, dict):
            raise DataError(f"{self._store.url}/{key} must be a JSON object, but is not; fetch it again")
        return content


def _header(shapes: Mapping[str, tuple[int, ...]], *, dtype: torch.dtype) -> bytes:
    return encode_header([(name, dtype_name(dtype), shape) for name, shape in shapes.items()], metadata={"format": "pt"})


def _raw_bytes(tensor: Tensor) -> memoryview:
    view: memoryview = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
    return view


def _json(content: object) -> bytes:
    return json.dumps(content, indent=2).encode() + b"\n"
