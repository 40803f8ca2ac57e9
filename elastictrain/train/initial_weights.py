"""First values of a model from a checkpoint of another run, or from safetensors files such as Hugging Face's."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from elastictrain.checkpoint.manifest import MANIFEST_NAME
from elastictrain.checkpoint.reader import NAMED_AT_MOST, ManifestReader, load_tensors
from elastictrain.checkpoint.safetensors_format import BY_CODE, LENGTH_BYTES, MAX_HEADER_BYTES, HeaderEntry, decode_header
from elastictrain.checkpoint.tensor_bytes import tensor_over
from elastictrain.checkpoint.verified_read import CheckpointFolder
from elastictrain.errors import ConfigError, InvalidCheckpointError, ObjectNotFoundError, Problem, StorageError
from elastictrain.storage.opening import open_store
from elastictrain.storage.store import Store
from elastictrain.train.parameters import keep_shard, saved_tensors
from elastictrain.train.task import NamesInitialWeights, Task

_KEY = "train.init_from"
_SUFFIX = ".safetensors"
_MODEL = "model."  # before the names of a model's tensors in a checkpoint

Fetch = Callable[[Mapping[str, Tensor]], None]  # reads into live tensors, by their stored names


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """What a folder holds; each rank reads for itself."""

    shapes: Mapping[str, tuple[int, ...]]
    fetch: Fetch


def load_initial_weights(url: str, model: nn.Module, task: Task) -> int:
    """Read the parameters and persistent buffers of `model`, sharded or not, from the folder `url`; returns how many of the
    stored tensors are not used. Collective: no. Raises: ConfigError naming the tensors that are missing or have another shape.
    """
    try:
        stored = _open(url)
        wanted = match_names(model, task, stored.shapes, url=url)
        with torch.no_grad():
            stored.fetch(wanted)
    except (InvalidCheckpointError, StorageError) as error:
        raise ConfigError([Problem(_KEY, f"cannot be read: {error}")]) from error
    return len(stored.shapes) - len(wanted)


def match_names(model: nn.Module, task: Task, shapes: Mapping[str, tuple[int, ...]], *, url: str) -> dict[str, Tensor]:
    """The live tensors of `model` by their names among the stored `shapes`. Raises: ConfigError."""
    names, found, wrong = frozenset(shapes), dict[str, Tensor](), list[str]()
    for name, tensor in saved_tensors(model).items():
        theirs = task.initial_name(name, names) if isinstance(task, NamesInitialWeights) else name
        if theirs is None:
            continue
        if theirs not in shapes:
            wrong.append(f"{theirs} is not there" + (f" (for {name})" if theirs != name else ""))
        elif shapes[theirs] != tuple(tensor.shape):
            wrong.append(f"{theirs} has the shape {list(shapes[theirs])}, but the model's {name} has {list(tensor.shape)}")
        elif theirs in found:
            wrong.append(f"{theirs} is taken for {name} and for another one")
        found[theirs] = tensor
    if wrong:
        rest = f"; and {len(wrong) - NAMED_AT_MOST} more" if len(wrong) > NAMED_AT_MOST else ""
        advice = "; a method `initial_name` of the task can map names, and return None for what keeps its own first values"
        raise ConfigError(
            [Problem(_KEY, f"must hold the model, but in {url} {'; '.join(wrong[:NAMED_AT_MOST])}{rest}{advice}")]
        )
    return found


def _open(url: str) -> StoredWeights:
    store = open_store(url, follow_links=True)
    files = [one.key for one in store.list() if "/" not in one.key]
    if MANIFEST_NAME in files:
        return _checkpoint(CheckpointFolder(store, ""))
    files = [file for file in files if file.endswith(_SUFFIX)]
    if not files:
        message = (
            f"must be the folder of one checkpoint, or of *{_SUFFIX} files, but {url} has neither {MANIFEST_NAME} nor those"
        )
        raise ConfigError([Problem(_KEY, message)])
    return _safetensors(store, files)


def _checkpoint(folder: CheckpointFolder) -> StoredWeights:
    manifest = ManifestReader(folder).root
    shapes = {name.removeprefix(_MODEL): tensor.shape for name, tensor in manifest.tensors.items() if name.startswith(_MODEL)}

    def fetch(wanted: Mapping[str, Tensor]) -> None:
        load_tensors(folder, manifest, tensors={f"{_MODEL}{name}": tensor for name, tensor in wanted.items()})

    return StoredWeights(shapes, fetch)


@dataclass(frozen=True, slots=True)
class _Place:
    file: str
    start: int  # byte of the file
    entry: HeaderEntry


def _safetensors(store: Store, files: Sequence[str]) -> StoredWeights:
    places: dict[str, _Place] = {}
    for file in files:
        length = min(int.from_bytes(store.read(file, end=LENGTH_BYTES), "little"), MAX_HEADER_BYTES)
        head = store.read(file, end=LENGTH_BYTES + length)
        for name, entry in decode_header(head, where=f"{store.url}/{file}").items():
            places[name] = _Place(file, len(head) + entry.span[0], entry)
    return StoredWeights({name: place.entry.shape for name, place in places.items()}, partial(_fetch, store, places))


def _fetch(store: Store, places: Mapping[str, _Place], wanted: Mapping[str, Tensor]) -> None:
    for name, tensor in wanted.items():
        place = places[name]
        element, shape = BY_CODE[place.entry.code], place.entry.shape
        size_bytes = math.prod(shape) * element.size_bytes
        data = store.read(place.file, start=place.start, end=place.start + size_bytes)
        if len(data) != size_bytes:
            url = f"{store.url}/{place.file}"
            raise ObjectNotFoundError(f"{url}: {name} must have {size_bytes} bytes, but {len(data)} are there")
        whole = tensor_over(memoryview(bytearray(data)), dtype=element.name, sizes=shape)
        keep_shard(tensor, whole.to(device=tensor.device, dtype=tensor.dtype))
