"""How the work around the bytes of a save grows with the world: plan, metadata, commit, and reading the manifest back.

    python scripts/bench_planning.py        (8, 128, 1024 and 4096 ranks; about 8 minutes on an idle machine, 10 GB of memory)
    python scripts/bench_planning.py --ranks 8 128 --sharding fsdp

One process plays all ranks of a Llama 8b with AdamW, 8 to a host: what they say of their boxes goes through the functions of
a saver. A few ranks plan on DTensors of a process group that only pretends; the outcome for the others is computed, in a way
that is checked against those few. Times are CPU seconds of one thread, so that a busy machine does not count.

plan     what a rank does once: which boxes it writes, and where they lie in its files
say      what the savers of all hosts do at each save to tell the leader; `said` is how much that is
commit   what the leader does at each save: decode what was said, build the manifest, encode it
restore  what each rank does before it reads: parse the manifest, and match it with its own boxes

Columns "per rank" are divided by the ranks of the world: one that stays as it is means linear growth, one that falls less. Not
counted is the store, which gets one object per host and save.
"""

import argparse
import gc
import json
import math
import resource
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from elastictrain.checkpoint.layout import Item, split_item
from elastictrain.checkpoint.manifest import Manifest, digest_of
from elastictrain.checkpoint.manifest_format import encode_manifest, parse_manifest
from elastictrain.checkpoint.memory.layout import RankDigests, RankLayout, RankPart
from elastictrain.checkpoint.reader import ManifestReader
from elastictrain.checkpoint.saver.commit_protocol import decode_parts, encode_parts, missing_ranks
from elastictrain.checkpoint.tensor_bytes import Box, choose_own, own_items
from elastictrain.checkpoint.verified_read import CheckpointFolder
from elastictrain.checkpoint.writer import build_manifest
from elastictrain.config.load import load
from elastictrain.storage.opening import open_store
from recipes.llama.config import LlamaConfig
from recipes.llama.huggingface import parameter_shapes

RANKS_PER_HOST = 8
SAMPLED_RANKS = 5
SHARD_BYTES = 4 << 30
INCARNATION = "i00001-0123456789ab"
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class World:
    """How the state is spread: each matrix over `shards` ranks, and that `copies` times."""

    sharding: str
    size: int
    shards: int

    @property
    def copies(self) -> int:
        return self.size // self.shards


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table. `_ms` and `_kb` are per rank of the world."""

    sharding: str
    ranks: int
    chunks: int
    plan_ms: float
    said_kb: float
    say_ms: float
    decode_ms: float
    build_ms: float
    encode_ms: float
    commit_s: float
    manifest_mb: float
    manifest_kb: float
    parse_ms: float
    match_ms: float
    restore_s: float
    peak_gb: float


def tensor_shapes(model: str) -> dict[str, tuple[tuple[int, ...], bool]]:
    """Names of the state's tensors, their shapes, and whether they are sharded (the step counters are not)."""
    config = LlamaConfig(**load(["recipe=llama_fsdp", f"model={model}"]).model)  # type: ignore[arg-type]
    shapes = parameter_shapes(config)
    found = {f"model.{name}": (shape, True) for name, shape in shapes.items()}
    for name, shape in shapes.items():
        found[f"optim.step.{name}"] = ((), False)
        found |= {f"optim.{moment}.{name}": (shape, True) for moment in ("exp_avg", "exp_avg_sq")}
    return found


def pretend_tensors(state: Mapping[str, tuple[tuple[int, ...], bool]], world: World) -> dict[str, Tensor]:
    """The tensors of one rank, without memory."""
    if world.shards == 1:
        return {name: torch.empty(shape, device="meta") for name, (shape, _) in state.items()}
    mesh = init_device_mesh("cpu", (world.copies, world.shards) if world.copies > 1 else (world.shards,))
    placements = [Replicate(), Shard(0)] if world.copies > 1 else [Shard(0)]
    index = dist.get_rank() % world.shards
    tensors: dict[str, Tensor] = {}
    for name, (shape, sharded) in state.items():
        whole = torch.empty(shape, device="meta")
        tensors[name] = whole
        if sharded:
            first, rows = rows_of(shape[0], index, world.shards)
            local = whole[first : first + rows]
            tensors[name] = DTensor.from_local(
                local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
            )
    return tensors


@contextmanager
def pretend_to_be(rank: int, world: World) -> Iterator[None]:
    """A process group in which nobody answers, and nobody has to."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world.size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def rows_of(length: int, index: int, shards: int) -> tuple[int, int]:
    """First row and number of rows of one shard, as Shard(0) has them."""
    each = -(-length // shards)
    first = min(length, each * index)
    return first, min(length, first + each) - first


def computed_items(state: Mapping[str, tuple[tuple[int, ...], bool]], world: World, rank: int) -> tuple[Item, ...]:
    """What `own_items` gives for a rank, without its tensors."""
    held: list[Box] = []
    for name, (shape, sharded) in state.items():
        offsets, sizes, copies, copy = (0,) * len(shape), shape, world.size, rank
        if sharded and world.shards > 1:
            first, rows = rows_of(shape[0], rank % world.shards, world.shards)
            offsets, sizes = (first, *offsets[1:]), (rows, *shape[1:])
            copies, copy = world.copies, rank // world.shards
        if math.prod(sizes):
            held.append(Box(Item(name, "float32", shape, offsets, sizes), copies, copy))
    return choose_own(held)


def timed(act: Callable[[], T]) -> tuple[T, float]:
    began = time.process_time()
    result = act()
    return result, time.process_time() - began


def plan_seconds(state: Mapping[str, tuple[tuple[int, ...], bool]], world: World) -> float:
    """Median over some ranks of the time until a rank knows its layout, its first save; all others reuse it."""
    taken = []
    for rank in sorted({world.size * place // SAMPLED_RANKS for place in range(SAMPLED_RANKS)}):
        with pretend_to_be(rank, world):
            tensors = pretend_tensors(state, world)

            def plan(rank: int = rank, tensors: Mapping[str, Tensor] = tensors) -> RankLayout:
                layout = RankLayout(own_items(tensors, rank=rank, world_size=world.size), shard_bytes=SHARD_BYTES)
                # Both are computed at first use.
                assert layout.digest
                assert layout.template or not layout.items
                return layout

            layout, seconds = timed(plan)
        taken.append(seconds)
        if layout.items != computed_items(state, world, rank):
            sys.exit(f"rank {rank} of {world} plans something else than this benchmark thinks")
    return statistics.median(taken)


def said_by(layouts: Mapping[int, RankLayout]) -> tuple[bytes, float]:
    """What a host's saver says, and the time that it took to say it. The digests are of nothing, but all different."""
    parts = []
    for rank, layout in layouts.items():
        num_chunks = sum(len(split_item(item, chunk_bytes=layout.chunk_bytes)) for item in layout.items)
        digests = tuple(digest_of(f"{rank} {number}".encode()) for number in range(num_chunks))
        small = sum(item.size_bytes for item in layout.items) <= layout.shard_bytes
        num_files = 1 if small else len(layout.template)
        parts.append(RankPart(rank, layout, RankDigests(digests[:1] * num_files, digests[:1] * num_files, digests)))
    return timed(lambda: encode_parts(parts))


def say_all(state: Mapping[str, tuple[tuple[int, ...], bool]], world: World) -> tuple[list[bytes], float]:
    """What all hosts say, and the seconds of all of them together."""
    told, seconds = [], 0.0
    # A saver has its own host's objects to look through, and not those of all hosts.
    gc.disable()
    try:
        for first in range(0, world.size, RANKS_PER_HOST):
            ranks = range(first, min(world.size, first + RANKS_PER_HOST))
            layouts = {rank: RankLayout(computed_items(state, world, rank), shard_bytes=SHARD_BYTES) for rank in ranks}
            text, took = said_by(layouts)
            told.append(text)
            seconds += took
    finally:
        gc.enable()
    return told, seconds


def commit_seconds(told: list[bytes], world: World) -> tuple[bytes, int, dict[str, float]]:
    """The leader's work once all hosts have spoken: the manifest, how many chunks it has, and the seconds of each part."""
    facts = Manifest(1, world.size, INCARNATION, 1.0, "0" * 32, {"torch": torch.__version__}, {"step": 1})

    def decode() -> list[RankPart]:
        parts = [part for text in told for part in decode_parts(text, where="a host")]
        if missing_ranks(parts, world_size=world.size):
            sys.exit("some ranks said nothing")
        return parts

    parts, decode_s = timed(decode)
    manifest, build_s = timed(lambda: build_manifest(parts, facts=facts))
    raw, encode_s = timed(lambda: encode_manifest(manifest))
    num_chunks = sum(len(tensor.chunks) for tensor in manifest.tensors.values())
    return raw, num_chunks, {"decode": decode_s, "build": build_s, "encode": encode_s}


def restore_seconds(raw: bytes, state: Mapping[str, tuple[tuple[int, ...], bool]], world: World) -> tuple[float, float]:
    """What each rank does at a restore before it reads: parse the manifest, and find the chunks that it needs."""
    manifest, parse_s = timed(lambda: parse_manifest(raw, where="the manifest"))
    with pretend_to_be(world.size // 2, world):
        tensors = pretend_tensors(state, world)
        _, match_s = timed(lambda: match(manifest, tensors))
    return parse_s, match_s


def match(manifest: Manifest, tensors: Mapping[str, Tensor]) -> None:
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    reader = ManifestReader(CheckpointFolder(open_store("."), ""), manifest=manifest)
    planner.set_up_planner(dict(tensors), reader.read_metadata(), is_coordinator=False)
    planner.finish_plan(planner.create_local_plan())


def measure(state: Mapping[str, tuple[tuple[int, ...], bool]], world: World) -> Row:
    plan_s = plan_seconds(state, world)
    told, say_s = say_all(state, world)
    said_bytes = sum(map(len, told))
    raw, num_chunks, seconds = commit_seconds(told, world)
    del told
    parse_s, match_s = restore_seconds(raw, state, world)

    def ms(total_s: float) -> float:
        return 1e3 * total_s / world.size

    return Row(
        sharding=world.sharding,
        ranks=world.size,
        chunks=num_chunks,
        plan_ms=1e3 * plan_s,
        said_kb=said_bytes / 1e3 / world.size,
        say_ms=ms(say_s),
        decode_ms=ms(seconds["decode"]),
        build_ms=ms(seconds["build"]),
        encode_ms=ms(seconds["encode"]),
        commit_s=sum(seconds.values()),
        manifest_mb=len(raw) / 1e6,
        manifest_kb=len(raw) / 1e3 / world.size,
        parse_ms=ms(parse_s),
        match_ms=ms(match_s),
        restore_s=parse_s + match_s,
        peak_gb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
    )


HEADINGS = (
    ("sharding", "sharding", "", "s"),
    ("ranks", "ranks", "", "d"),
    ("chunks", "chunks", "in all", "d"),
    ("plan_ms", "plan", "ms/rank", ".1f"),
    ("said_kb", "said", "kB/rank", ".1f"),
    ("say_ms", "say", "ms/rank", ".2f"),
    ("decode_ms", "decode", "ms/rank", ".2f"),
    ("build_ms", "build", "ms/rank", ".2f"),
    ("encode_ms", "encode", "ms/rank", ".2f"),
    ("commit_s", "commit", "s", ".2f"),
    ("manifest_mb", "manifest", "MB", ".1f"),
    ("manifest_kb", "manifest", "kB/rank", ".1f"),
    ("parse_ms", "parse", "ms/rank", ".2f"),
    ("match_ms", "match", "ms/rank", ".2f"),
    ("restore_s", "restore", "s", ".2f"),
    ("peak_gb", "memory", "GB so far", ".1f"),
)


def table(rows: Sequence[Row]) -> str:
    cells = [[format(asdict(row)[field], spec) for field, _, _, spec in HEADINGS] for row in rows]
    lines = [[name for _, name, _, _ in HEADINGS], [unit for _, _, unit, _ in HEADINGS], *cells]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADINGS))]
    return "\n".join("  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)) for line in lines)


def constants(rows: Sequence[Row]) -> list[str]:
    """What a rank costs in the largest world, and how that compares with the smallest world of the same sharding."""
    lines = []
    for sharding in dict.fromkeys(row.sharding for row in rows):
        of_kind = [row for row in rows if row.sharding == sharding]
        first, last = of_kind[0], of_kind[-1]

        def told(name: str, value: Callable[[Row], float], unit: str, first: Row = first, last: Row = last) -> str:
            return f"{name} {value(last):.4g} {unit} ({value(last) / value(first):.2f} x)"

        figures = (
            told("plan", lambda row: row.plan_ms, "ms"),
            told("metadata said", lambda row: row.said_kb, "kB"),
            told("manifest", lambda row: row.manifest_kb, "kB"),
            told("commit", lambda row: 1e3 * row.commit_s / row.ranks, "ms"),
            told("restore", lambda row: 1e3 * row.restore_s / row.ranks, "ms"),
        )
        lines.append(f"{sharding}: per rank at {last.ranks} ranks (against {first.ranks}): {', '.join(figures)}")
        per_chunk = (
            f"commit {1e6 * last.commit_s / last.chunks:.1f} µs, parse {1e3 * last.parse_ms * last.ranks / last.chunks:.1f} µs"
        )
        lines.append(
            f"{' ' * len(sharding)}  per chunk: {per_chunk}, manifest {1e6 * last.manifest_mb / last.chunks:.0f} bytes"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description="How plan, metadata and commit of a save grow with the world.")
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 128, 1024, 4096], help="sizes of the world")
    parser.add_argument("--sharding", nargs="+", choices=("fsdp", "hsdp", "ddp"), default=["ddp", "hsdp", "fsdp"])
    parser.add_argument("--model", default="8b", help="a model of conf/model for the recipe llama_fsdp")
    parser.add_argument("--json", metavar="FILE", help="write the rows there, too")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", category=UserWarning)
    state = tensor_shapes(options.model)
    # The first of each call pays for caches and imports.
    measure(state, World("fsdp", 2, 2))
    rows = []
    for sharding in options.sharding:
        for size in sorted(options.ranks):
            shards = {"fsdp": size, "hsdp": min(size, RANKS_PER_HOST), "ddp": 1}[sharding]
            rows.append(measure(state, World(sharding, size, shards)))
            print(f"{sharding} with {size} ranks is measured", file=sys.stderr, flush=True)
    print(f"Llama {options.model} with AdamW: {len(state)} tensors, {RANKS_PER_HOST} ranks per host, torch {torch.__version__}")
    print(table(rows))
    print("\n".join(constants(rows)))
    if options.json:
        Path(options.json).write_text(json.dumps([asdict(row) for row in rows]))


if __name__ == "__main__":
    main()
