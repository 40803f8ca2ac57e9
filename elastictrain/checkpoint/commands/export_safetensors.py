"""Plain safetensors files of whole tensors, written one tensor at a time."""

import json
import math
from collections.abc import Mapping, Sequence

import torch

from elastictrain.checkpoint.commands.export_source import Source
from elastictrain.checkpoint.commands.export_target import ExportTarget
from elastictrain.checkpoint.dtypes import BY_NAME
from elastictrain.checkpoint.safetensors_format import HeaderEntry, encode_header

INDEX = "model.safetensors.index.json"
SHARD_BYTES = 5 * 10**9
"""Another file begins where this would be passed; a tensor is never cut."""


def write_safetensors(source: Source, target: ExportTarget, *, shard_bytes: int = SHARD_BYTES) -> None:
    """`model.safetensors`, or several files and, last, their index.

    Raises: DamagedFileError; StorageError.
    """
    sizes = {name: source.size_bytes_of(name) for name in source.manifest.tensors}
    plan = plan_shards(sizes, shard_bytes=shard_bytes)
    for file, names in plan.items():
        # Wide elements first: then all are aligned.
        ordered = sorted(names, key=lambda name: (-BY_NAME[source.dtype_of(name)].size_bytes, name))
        with target.store.open_writer(file) as writer:
            writer.write(_header(source, ordered))
            for name in ordered:
                writer.write(source.read(name).contiguous().reshape(-1).view(torch.uint8).numpy().data)
    if len(plan) > 1:
        weight_map = {name: file for file, names in plan.items() for name in names}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        target.store.write(INDEX, json.dumps(index, indent=2).encode() + b"\n")


def plan_shards(sizes: Mapping[str, int], *, shard_bytes: int) -> dict[str, list[str]]:
    """File -> names of its tensors, from the bytes of each tensor. Pure."""
    groups: list[list[str]] = [[]]
    filled = 0
    for name, size_bytes in sizes.items():
        if groups[-1] and filled + size_bytes > shard_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += size_bytes
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {f"model-{number:05d}-of-{len(groups):05d}.safetensors": group for number, group in enumerate(groups, 1)}


def _header(source: Source, names: Sequence[str]) -> bytes:
    entries, begin = [], 0
    for name in names:
        shape, element = source.manifest.tensors[name].shape, BY_NAME[source.dtype_of(name)]
        end = begin + math.prod(shape) * element.size_bytes
        entries.append(HeaderEntry(name, element.code, shape, begin, end))
        begin = end
    return encode_header(entries, metadata={"format": "pt", "step": str(source.manifest.step)})
