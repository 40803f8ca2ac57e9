"""Flips bits in snapshots and checkpoints, where a digest protects them."""

import json
import os
import re
from pathlib import Path

from elastictrain.checkpoint.manifest import MANIFEST_NAME
from elastictrain.checkpoint.memory.folder import SlotName, look, slot_names
from elastictrain.checkpoint.memory.layout import HEADER_BYTES
from elastictrain.checkpoint.memory.records import load_digests, load_layout
from elastictrain.errors import ElasticTrainError

_BIT = 0x20


def flip_bit(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        (value,) = file.read(1)
        file.seek(at)
        file.write(bytes([value ^ _BIT]))


def flip_in_memory(memory: Path, *, kind: str, rank: int, share: float) -> int | None:
    """Flip a bit of the newest snapshot of a rank in a host's memory, `kind` `own` or `replica`. Returns the step; None if
    there is no such snapshot. One that the saver has not digested yet is passed over: nothing would notice."""
    for folder in sorted(memory.glob("*/*/")):
        names = {str(name) for name in slot_names(str(folder)) if (name.kind, name.rank) == (kind, rank)}
        held = [one for one in look(str(folder), host=0) if one.slot in names]
        for one in sorted(held, key=lambda found: -found.facts.step):
            path = folder / one.slot
            if load_digests(str(path), one.facts) is None:
                continue
            layout = load_layout(str(folder), one.facts.layout)
            parts = [
                (start + chunk.start, chunk.size_bytes)
                for file, start in zip(layout.template, layout.starts, strict=True)
                for placed in file.items
                for chunk in placed.chunks
            ]
            place = int(share * (sum(size for _, size in parts) - 1))
            for begin, size in parts:
                if place < size:
                    flip_bit(path, HEADER_BYTES + begin + place)
                    return one.facts.step
                place -= size
    return None


def replica_ranks(memory: Path) -> set[int]:
    """Ranks of whose snapshots a host keeps replicas."""
    names: list[SlotName] = [name for folder in memory.glob("*/*/") for name in slot_names(str(folder))]
    return {name.rank for name in names if name.kind == "replica"}


def committed(run_dir: Path) -> list[tuple[float, int, int, Path]]:
    """When each checkpoint in storage was committed, by the kernel's clock; its generation, step, folder. Newest last."""
    found = []
    for manifest in (run_dir / "checkpoints").glob(f"step-*/{MANIFEST_NAME}"):
        try:
            head = json.loads(manifest.read_bytes())
            found.append((manifest.stat().st_mtime, generation_of(head["incarnation"]), head["step"], manifest.parent))
        except (OSError, ValueError, KeyError):
            # It is being pruned.
            continue
    return sorted(found, key=lambda one: (one[2], one[0]))


def generation_of(incarnation: str) -> int:
    """The number in the name of a generation."""
    match = re.search(r"\d+", incarnation)
    return int(match[0]) if match else 0


def flip_in_storage(run_dir: Path, *, share: float) -> int | None:
    """Flip a bit of the newest checkpoint. Returns its step; None unless another one is left."""
    there = committed(run_dir)
    if len({step for _, _, step, _ in there}) < 2:
        return None
    _, _, step, folder = there[-1]
    shards = sorted(folder.glob("*.safetensors"))
    if not shards:
        raise ElasticTrainError(f"{folder} must have shard files, but has {os.listdir(folder)}")  # noqa: PTH208
    shard = shards[int(share * (len(shards) - 1))]
    # The header is digested, too, but is also checked in other ways.
    size = shard.stat().st_size
    flip_bit(shard, int(size * (0.5 + 0.49 * share)))
    return step
