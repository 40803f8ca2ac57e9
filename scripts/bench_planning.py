"""How the work around the bytes of a save grows with the world: plan, metadata, commit, and reading the manifest back.

    python scripts/bench_planning.py        (8, 128, 1024 and 4096 ranks; about 2 minutes on an idle machine, 1 GB of memory)
    python scripts/bench_planning.py --ranks 8 128 --sharding fsdp

One process plays all ranks of a Llama 8b with AdamW, 8 to a host: what they say of their boxes goes through the functions of
a saver. A few ranks plan on DTensors of a process group that only pretends; the outcome for the others is computed, in a way
that is checked against those few. So is what hosts say with FSDP, but for 16 of them. Times are CPU seconds of one thread, so
that a busy machine does not count.

plan     what a rank does once: which boxes it writes, and where they lie in its files
say      what the savers of all hosts do at each save to tell the leader, with their parts of the manifest if these are not for
         the manifest itself; `said` is how much they tell
commit   what the leader does at each save: decode what was said, build the manifest and check it, encode it
restore  what each rank does before it reads: parse the manifest and the parts that it needs, and match them with its own boxes;
         `read` is how many parts that are, and `half` how many in a world of half as many ranks

Columns "per rank" are divided by the ranks of the world: one that stays as it is means linear growth, one that falls less. Not
counted is the store, which gets one or two objects per host and save.
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
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
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
from elastictrain.checkpoint.manifest import Manifest, PartRecord, digest_of
from elastictrain.checkpoint.manifest_format import check_manifest, encode_manifest, parse_manifest
from elastictrain.checkpoint.manifest_parts import TensorGroup, WrittenPart
from elastictrain.checkpoint.memory.layout import RankDigests, RankLayout, RankPart
from elastictrain.checkpoint.reader import ManifestReader, parts_of
from elastictrain.checkpoint.saver.commit_protocol import decode_parts, encode_parts, missing_ranks
from elastictrain.checkpoint.tensor_bytes import Box, choose_own, own_items
from elastictrain.checkpoint.verified_read import CheckpointFolder, read_parts
from elastictrain.checkpoint.writer import Written, build_manifest, write_part
from elastictrain.config.composed import CheckpointGroup
from elastictrain.config.load import load
from elastictrain.storage.opening import open_store
from elastictrain.storage.store import Bytes
from recipes.llama.config import LlamaConfig
from recipes.llama.huggingface import parameter_shapes

RANKS_PER_HOST = 8
SAMPLED_RANKS = 5
SAMPLED_HOSTS = 16
SHARD_BYTES = 4 << 30
INCARNATION = "i00001-0123456789ab"
MANIFEST_BYTES = int(CheckpointGroup().manifest_mb * 2**20)
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
    plan_ms: float
    said_kb: float
    say_ms: float
    decode_ms: float
    build_ms: float
    encode_ms: float
    commit_s: float
    manifest_mb: float
    parts: int
    part_kb: float
    read: int
    read_half: int
    parse_s: float
    match_s: float
    restore_s: float
    peak_gb: float


class PartStore:
    """Holds parts of manifests in memory."""

    url = "memory:"

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}

    def create(self, key: str, data: Bytes) -> None:
        """As a store does."""
        self.objects[key] = bytes(data)

    def read(self, key: str, *, start: int = 0, end: int | None = None) -> bytes:
        """As a store does."""
        return self.objects[key][start:end]

    def read_into(self, key: str, buffer: memoryview, *, start: int = 0) -> int:
        """As a store does."""
        data = self.read(key, start=start, end=start + len(buffer))
        buffer[: len(data)] = data
        return len(data)


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


def said_by(layouts: Mapping[int, RankLayout], world: World, store: PartStore) -> tuple[bytes, float]:
    """What a host's saver says, and the time that it took to say it. The digests are of nothing, but all different."""
    parts = []
    for rank, layout in layouts.items():
        num_chunks = sum(len(split_item(item, chunk_bytes=layout.chunk_bytes)) for item in layout.items)
        digests = tuple(digest_of(f"{rank} {number}".encode()) for number in range(num_chunks))
        small = sum(item.size_bytes for item in layout.items) <= layout.shard_bytes
        num_files = 1 if small else len(layout.template)
        parts.append(RankPart(rank, layout, RankDigests(digests[:1] * num_files, digests[:1] * num_files, digests)))

    def say() -> bytes:
        write = partial(write_part, store, folder="f", incarnation=INCARNATION)  # type: ignore[arg-type]
        return encode_parts(write(parts, world_size=world.size, manifest_bytes=MANIFEST_BYTES))

    return timed(say)


def say_all(
    state: Mapping[str, tuple[tuple[int, ...], bool]], world: World, store: PartStore
) -> tuple[list[bytes], float, int]:
    """What all hosts say, the seconds of all of them together, and how many parts they write."""
    told, seconds = [], []
    hosts = [range(first, min(world.size, first + RANKS_PER_HOST)) for first in range(0, world.size, RANKS_PER_HOST)]
    every = world.sharding != "fsdp" or len(hosts) <= SAMPLED_HOSTS
    sampled = {len(hosts) * place // SAMPLED_HOSTS for place in range(SAMPLED_HOSTS)}
    # A saver has its own host's objects to look through, and not those of all hosts.
    gc.disable()
    try:
        for number, ranks in enumerate(hosts):
            if not every and number not in sampled:
                told.append(encode_parts([computed_part(state, world, ranks)]))
                continue
            layouts = {rank: RankLayout(computed_items(state, world, rank), shard_bytes=SHARD_BYTES) for rank in ranks}
            text, took = said_by(layouts, world, store)
            told.append(text)
            seconds.append(took)
            if not every:
                (written,) = decode_parts(text, where="a host")
                computed = computed_part(state, world, ranks)
                if not isinstance(written, WrittenPart) or written.groups != computed.groups:
                    sys.exit(f"the host of ranks {ranks} says something else than this benchmark thinks")
    finally:
        gc.enable()
    return told, sum(seconds) / len(seconds) * len(hosts), len(store.objects) if every else len(hosts)


def computed_part(state: Mapping[str, tuple[tuple[int, ...], bool]], world: World, ranks: range) -> WrittenPart:
    """What a host says of its part with FSDP, without layouts. Sizes of files and digests are of nothing."""
    names = defaultdict(list)
    for name, (shape, sharded) in sorted(state.items()):
        offsets, sizes = (0,) * len(shape), shape
        if sharded:
            held = [rows_of(shape[0], rank, world.shards) for rank in ranks]
            rows = sum(count for _, count in held)
            offsets, sizes = (held[0][0], *offsets[1:]), (rows, *shape[1:])
        # The first rank has the step counters.
        if math.prod(sizes) and (sharded or ranks[0] == 0):
            names["float32", shape, ((offsets, sizes),)].append(name)
    files = {f"{INCARNATION}-r{rank:05d}-000.safetensors": 123_456_789 for rank in ranks}
    record = PartRecord(f"{INCARNATION}-r{ranks[0]:05d}-part.json", 1_234_567, digest_of(str(ranks).encode()), files)
    return WrittenPart(tuple(ranks), record, tuple(TensorGroup(*about, tuple(alike)) for about, alike in names.items()))


def commit_seconds(told: list[bytes], world: World) -> tuple[bytes, dict[str, float]]:
    """The leader's work once all hosts have spoken: the manifest, and the seconds of each part."""
    facts = Manifest(1, world.size, INCARNATION, 1.0, "0" * 32, {"torch": torch.__version__}, {"step": 1})

    def decode() -> list[Written]:
        written = [one for text in told for one in decode_parts(text, where="a host")]
        if missing_ranks(written, world_size=world.size):
            sys.exit("some ranks said nothing")
        return written

    def build() -> Manifest:
        manifest = build_manifest(written, facts=facts)
        check_manifest(manifest)
        return manifest

    written, decode_s = timed(decode)
    manifest, build_s = timed(build)
    raw, encode_s = timed(lambda: encode_manifest(manifest))
    return raw, {"decode": decode_s, "build": build_s, "encode": encode_s}


def restore_seconds(
    raw: bytes, state: Mapping[str, tuple[tuple[int, ...], bool]], world: World, store: PartStore
) -> tuple[int, float, float]:
    """What each rank does at a restore before it reads: parse what it needs of the manifest, and find its chunks."""
    folder = CheckpointFolder(store, "checkpoints/f/")  # type: ignore[arg-type]
    with pretend_to_be(world.size // 2, world):
        tensors = pretend_tensors(state, world)

        def parse() -> tuple[int, Manifest]:
            manifest = parse_manifest(raw, where="the manifest")
            numbers = parts_of(manifest, tensors)
            return len(numbers), read_parts(folder, manifest, numbers=numbers)

        (num_parts, manifest), parse_s = timed(parse)
        _, match_s = timed(lambda: match(manifest, tensors))
    return num_parts, parse_s, match_s


def half_as_many(raw: bytes, state: Mapping[str, tuple[tuple[int, ...], bool]], world: World) -> int:
    """How many parts a rank reads in a world of half as many."""
    half = World(world.sharding, world.size // 2, max(1, world.shards // 2 if world.copies == 1 else world.shards))
    with pretend_to_be(half.size // 2, half):
        return len(parts_of(parse_manifest(raw, where="the manifest"), pretend_tensors(state, half)))


def match(manifest: Manifest, tensors: Mapping[str, Tensor]) -> None:
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    reader = ManifestReader(CheckpointFolder(open_store("."), ""), manifest=manifest)
    planner.set_up_planner(dict(tensors), reader.read_metadata(), is_coordinator=False)
    planner.finish_plan(planner.create_local_plan())


def measure(state: Mapping[str, tuple[tuple[int, ...], bool]], world: World) -> Row:
    store = PartStore()
    plan_s = plan_seconds(state, world)
    told, say_s, num_parts = say_all(state, world, store)
    said_bytes = sum(map(len, told))
    raw, seconds = commit_seconds(told, world)
    del told
    read, parse_s, match_s = restore_seconds(raw, state, world, store)

    def ms(total_s: float) -> float:
        return 1e3 * total_s / world.size

    return Row(
        sharding=world.sharding,
        ranks=world.size,
        plan_ms=1e3 * plan_s,
        said_kb=said_bytes / 1e3 / world.size,
        say_ms=ms(say_s),
        decode_ms=ms(seconds["decode"]),
        build_ms=ms(seconds["build"]),
        encode_ms=ms(seconds["encode"]),
        commit_s=sum(seconds.values()),
        manifest_mb=len(raw) / 1e6,
        parts=num_parts,
        part_kb=max(map(len, store.objects.values()), default=0) / 1e3,
        read=read,
        read_half=half_as_many(raw, state, world),
        parse_s=parse_s,
        match_s=match_s,
        restore_s=parse_s + match_s,
        peak_gb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
    )


HEADINGS = (
    ("sharding", "sharding", "", "s"),
    ("ranks", "ranks", "", "d"),
    ("plan_ms", "plan", "ms/rank", ".1f"),
    ("said_kb", "said", "kB/rank", ".1f"),
    ("say_ms", "say", "ms/rank", ".2f"),
    ("decode_ms", "decode", "ms/rank", ".2f"),
    ("build_ms", "build", "ms/rank", ".2f"),
    ("encode_ms", "encode", "ms/rank", ".2f"),
    ("commit_s", "commit", "s", ".2f"),
    ("manifest_mb", "manifest", "MB", ".1f"),
    ("parts", "parts", "", "d"),
    ("part_kb", "largest", "kB", ".0f"),
    ("read", "read", "parts", "d"),
    ("read_half", "half", "parts", "d"),
    ("parse_s", "parse", "s", ".2f"),
    ("match_s", "match", "s", ".2f"),
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
            told("manifest", lambda row: 1e3 * row.manifest_mb / row.ranks, "kB"),
            told("commit", lambda row: 1e3 * row.commit_s / row.ranks, "ms"),
        )
        lines.append(f"{sharding}: per rank at {last.ranks} ranks (against {first.ranks}): {', '.join(figures)}")
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
