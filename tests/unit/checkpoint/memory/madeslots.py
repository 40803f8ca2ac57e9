"""Small snapshots in real slots."""

import random
from pathlib import Path

from elastictrain.checkpoint.layout import Item
from elastictrain.checkpoint.memory.folder import SlotName
from elastictrain.checkpoint.memory.layout import HEADER_BYTES, RankLayout
from elastictrain.checkpoint.memory.records import compute_digests, store_digests, store_layout
from elastictrain.checkpoint.memory.slot import VERSION, Slot, SnapshotFacts

RUN = "a-run"


def layout_of(rank: int = 0, *, world_size: int = 1, rows: int = 300) -> RankLayout:
    """Two files, several chunks, and a scalar that rank 0 alone has."""
    share = rows // world_size
    items = [
        Item("w", "float32", (rows, 10), (rank * share, 0), (share, 10)),
        Item("x", "float32", (rows, 2), (rank * share, 0), (share, 2)),
    ]
    if rank == 0:
        items.append(Item("step", "int64", (), (), ()))
    return RankLayout(tuple(items), shard_bytes=5000, chunk_bytes=900)


def facts_of(
    step: int, *, rank: int = 0, world_size: int = 1, incarnation: str = "000001-aa", reason: str = "", run: str = RUN
) -> SnapshotFacts:
    layout = layout_of(rank, world_size=world_size)
    return SnapshotFacts(
        VERSION, run, incarnation, step, world_size, rank, layout.digest, "digest of the config", 12.5, reason, {"step": step}
    )


def fill(slot: Slot, facts: SnapshotFacts, layout: RankLayout) -> None:
    """As a worker does: bytes that depend on rank and step, and the headers of the files."""
    slot.begin()
    view = memoryview(slot.map)[HEADER_BYTES:]
    view[:] = random.Random(f"{facts.rank} {facts.step}").randbytes(len(view))
    for file, base in zip(layout.template, layout.starts, strict=True):
        view[base : base + len(file.header)] = file.header
    view.release()
    slot.complete(facts)


def put(folder: Path, facts: SnapshotFacts, *, kind: str = "own", index: int = 0, digests: bool = True) -> str:
    """A whole snapshot in a slot of its own, nobody holding it; returns the slot's name."""
    layout = layout_of(facts.rank, world_size=facts.world_size)
    store_layout(str(folder), layout)
    name = str(SlotName(kind, facts.rank, index))
    slot = Slot.make(f"{folder}/{name}", size_bytes=layout.size_bytes)
    fill(slot, facts, layout)
    if digests:
        store_digests(slot.path, facts, compute_digests(slot, layout, threads=1))
    slot.close()
    return name


def flip(folder: Path, name: str, *, at: int = HEADER_BYTES + 4096 + 1500) -> None:
    """One bit of a slot changes behind everybody's back."""
    with (folder / name).open("r+b") as file:
        file.seek(at)
        (value,) = file.read(1)
        file.seek(at)
        file.write(bytes([value ^ 4]))
