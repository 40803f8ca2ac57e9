"""Checkpoints as ranks of a world of any size would write them, without a process group; and damage done to them."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from elastictrain.checkpoint.folders import ROOT, folder_name
from elastictrain.checkpoint.layout import CHUNK_BYTES, Item
from elastictrain.checkpoint.manifest import JsonValue, Manifest, digest_of
from elastictrain.checkpoint.memory.layout import RankLayout, RankPart
from elastictrain.checkpoint.reader import ManifestReader
from elastictrain.checkpoint.tensor_bytes import dtype_name, reader_of
from elastictrain.checkpoint.writer import build_manifest, commit, write_files, write_part
from elastictrain.storage.opening import open_store

CREATED = 1_000_000.0
Document = dict[str, Any]


def state_of(value: float) -> dict[str, Tensor]:
    """A model and an optimizer of a few tensors."""
    ramp = torch.arange(24, dtype=torch.float32).reshape(6, 4)
    return {
        "model.weight": ramp + value,
        "model.bias": torch.full((5,), value, dtype=torch.bfloat16),
        "optim.exp_avg.weight": -ramp - value,
        "optim.step": torch.tensor(value),
        "optim.count": torch.arange(3, dtype=torch.int64) + int(value),
    }


def save(
    run: Path,
    step: int,
    *,
    tensors: Mapping[str, Tensor] | None = None,
    state: Mapping[str, JsonValue] | None = None,
    world_size: int = 1,
    dim: int = 0,
    chunk_bytes: int = CHUNK_BYTES,
    attempt: int = 1,
    uncommitted: bool = False,
    incarnation: str = "000001-aa",
    ranks_per_part: int = 0,
) -> Path:
    """Saves as `world_size` ranks, each of which has its part of the dimension `dim` of every tensor that has so many rows. The
    manifest has parts, each of so many ranks, unless that is 0."""
    store, name = open_store(str(run)), folder_name(step, attempt=attempt)
    values = state_of(step) if tensors is None else tensors
    facts = Manifest(
        step=step,
        world_size=world_size,
        incarnation=incarnation,
        created=CREATED + step,
        config_digest="digest",
        versions={"elastictrain": "0"},
        state={"step": step, "data_digest": "d"} if state is None else state,
    )
    parts: list[RankPart] = []
    for rank in range(world_size):
        items = [
            item for key, tensor in values.items() for item in items_of(key, tensor, rank=rank, world_size=world_size, dim=dim)
        ]
        layout = RankLayout(tuple(items), 1 << 30, chunk_bytes)
        files = layout.files(incarnation=incarnation, rank=rank)
        digests = write_files(
            store, files, prefix=f"{ROOT}/{name}", source=lambda item: reader_of(part(values[item.name], item), item)
        )
        parts.append(RankPart(rank, layout, digests))
    hosts = [parts[first : first + ranks_per_part] for first in range(0, world_size, ranks_per_part)] if ranks_per_part else []
    where = {"folder": name, "incarnation": incarnation}
    written = [one for host in hosts for one in write_part(store, host, world_size=world_size, manifest_bytes=0, **where)]
    if not uncommitted:
        commit(store, build_manifest(written or parts, facts=facts), folder=name)
    return run / ROOT / name


def items_of(name: str, tensor: Tensor, *, rank: int, world_size: int, dim: int) -> list[Item]:
    """What one rank writes of a tensor."""
    shape = tuple(tensor.shape)
    if tensor.ndim <= dim or shape[dim] < world_size:
        return [Item(name, dtype_name(tensor.dtype), shape, (0,) * len(shape), shape)] if rank == 0 else []
    begin, end = shape[dim] * rank // world_size, shape[dim] * (rank + 1) // world_size
    offsets = tuple(begin if one == dim else 0 for one in range(tensor.ndim))
    sizes = tuple(end - begin if one == dim else size for one, size in enumerate(shape))
    return [Item(name, dtype_name(tensor.dtype), shape, offsets, sizes)]


def part(tensor: Tensor, item: Item) -> Tensor:
    """The box of a tensor that `item` is."""
    return tensor[tuple(slice(first, first + size) for first, size in zip(item.offsets, item.sizes, strict=True))]


def manifest_of(folder: Path) -> Manifest:
    """As it was written."""
    return ManifestReader.at(str(folder)).manifest


def shard(folder: Path, index: int = 0) -> Path:
    """One of the files, in order of rank."""
    return sorted(folder.glob("*.safetensors"))[index]


def part_file(folder: Path, index: int = 0) -> Path:
    """One of the parts of the manifest, in order of rank."""
    return sorted(folder.glob("*-part.json"))[index]


def canonical(document: object) -> bytes:
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()


def change_manifest(folder: Path, act: Callable[[Document], object], *, whole: bool = True) -> None:
    """Every digest is right afterwards. If the manifest has one part, and `whole`, `act` sees its files and tensors in their
    places."""
    path = folder / "manifest.json"
    document = json.loads(path.read_bytes())
    del document["digest"]
    if whole and "parts" in document:
        (record,) = document["parts"]
        part = json.loads((folder / record["name"]).read_bytes())
        seen = document | {"files": part["files"], "tensors": part["tensors"]}
        act(seen)
        part |= {"files": seen.pop("files"), "tensors": seen.pop("tensors")}
        (folder / record["name"]).write_bytes(raw := json.dumps(part).encode())
        files = {file["name"]: file["bytes"] for file in part["files"]}
        record |= {"bytes": len(raw), "digest": digest_of(raw), "files": files}
        document = seen | {"files": [], "tensors": document["tensors"]}
    else:
        act(document)
    path.write_bytes(canonical({**document, "digest": digest_of(canonical(document))}))


def change(file: Path, act: Callable[[bytearray], None]) -> Path:
    """Damages a file behind everybody's back."""
    data = bytearray(file.read_bytes())
    act(data)
    file.write_bytes(data)
    return file


def flip(file: Path, at: int = -1) -> Path:
    """Flips one bit."""

    def act(data: bytearray) -> None:
        data[at] ^= 4

    return change(file, act)


def truncate(file: Path) -> Path:
    """Takes the last byte off."""
    return change(file, lambda data: data.__delitem__(-1))


def as_version_3(folder: Path) -> None:
    """A manifest that a later release could have written."""
    change_manifest(folder, lambda document: document.update(version=3), whole=False)


def quarantine(folder: Path, reason: str = "a file was bad") -> None:
    """As a start marks what it rejects."""
    (folder / "quarantine.json").write_text(f'{{"reason": "{reason}"}}')


def folders(run: Path) -> list[str]:
    """Names of the checkpoint folders that are there."""
    return sorted(one.name for one in (run / ROOT).iterdir() if one.is_dir())
