"""How long devices wait for data: the loader of each rank beside simulated devices, against data that is in memory already.

    python scripts/bench_data.py [--sources files,mixture,packing,tar,remote] [--ranks 4] [--steps 40] [--json FILE]

A device takes `--micro-batch` x `--seq-len` / `--tokens-per-s` seconds for a step, and is given the next one while it computes,
as in the training loop, which reads the figures of a step once the next one is launched. It is idle from the end of its work
until the next batch is there. Ranks wait for each other: a step is as late as its last rank. Defaults are those of Llama 1b,
docs/benchmarks.md. `remote` is `tar` on storage that takes `--latency-ms` for each request. Then each loader runs without a
device, which tells what it could feed.
"""

import argparse
import io
import json
import multiprocessing
import tarfile
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, repeat
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import torch
from fsspec.implementations.local import LocalFileSystem

from elastictrain.config.composed import DataGroup, SourceGroup
from elastictrain.data.assignment import Share, passes
from elastictrain.data.dataset import Batch, Dataset
from elastictrain.data.loader import Loader
from elastictrain.data.opening import OpenedData, open_datasets
from elastictrain.data.samples import SampleReader
from elastictrain.data.sources import discover
from elastictrain.data.tar_index import make_index
from elastictrain.data.tar_shards import TarShards
from elastictrain.storage.opening import open_store

_WARM_UP = 5  # steps that do not count: workers start
_SAMPLES_PER_TAR = 128
_SOURCES = ("files", "mixture", "packing", "tar", "remote")


class SlowFiles(LocalFileSystem):  # type: ignore[misc]
    """Files of this machine, each request of which takes `latency_s`."""

    protocol = "slow"
    latency_s = 0.0

    def cat_file(self, path: str, *arguments: Any, **options: Any) -> Any:
        time.sleep(SlowFiles.latency_s)
        return super().cat_file(path, *arguments, **options)

    def info(self, path: str, **options: Any) -> Any:
        time.sleep(SlowFiles.latency_s)
        return super().info(path, **options)


# Here, so that data workers know it, too.
fsspec.register_implementation("slow", SlowFiles)


@dataclass(frozen=True)
class Decode:
    """A sample of a tar file; `latency_s` travels with it to data workers."""

    latency_s: float

    def __call__(self, sample: dict[str, Any]) -> Batch:
        SlowFiles.latency_s = self.latency_s
        return {"tokens": torch.from_numpy(np.frombuffer(sample["bin"], dtype="<u2").astype(np.int64))}


@dataclass(frozen=True)
class Figures:
    """Of one rank: seconds of each step, and what its loader could feed."""

    idle_s: list[float]
    waited_s: list[float]
    tokens_per_s: float


def write_tar_files(folder: Path, *, num_samples: int, seq_len: int) -> None:
    folder.mkdir()
    generator = np.random.default_rng(0)
    for first in range(0, num_samples, _SAMPLES_PER_TAR):
        with tarfile.open(folder / f"{first:06d}.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
            for number in range(first, min(first + _SAMPLES_PER_TAR, num_samples)):
                content = generator.integers(0, 256, seq_len + 1, dtype=np.uint16).tobytes()
                member = tarfile.TarInfo(f"{number:06d}.bin")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    make_index(discover([str(folder)], patterns=("*.tar",)), open_store(str(folder)), workers=0)


def open_source(name: str, options: argparse.Namespace, *, folder: str) -> tuple[Dataset, OpenedData | None]:
    if name in ("tar", "remote"):
        # Its index is read without delay.
        transform = Decode(options.latency_ms / 1000 if name == "remote" else 0.0)
        return TarShards(f"slow://{folder}" if name == "remote" else folder, transform=transform), None
    sources = (SourceGroup(path=options.data, weight=3.0), SourceGroup(path=options.data)) if name == "mixture" else None
    group = DataGroup(path=options.data, sources=sources, packing=name == "packing", holdout_samples=1)
    opened = open_datasets(group, seq_len=options.seq_len, global_batch=options.ranks * options.micro_batch)
    return opened.train, opened


def make_loader(source: str, options: argparse.Namespace, *, rank: int, folder: str) -> Loader:
    dataset, opened = open_source(source, options, folder=folder)
    share = Share(options.ranks * options.micro_batch, options.micro_batch, options.ranks, rank)
    mixture = opened.mixture if opened is not None else None
    planned = passes(0, last_step=10**9, share=share, num_samples=len(dataset), seed=0, shuffle=True, mixture=mixture)
    # As in training: token files need no worker, and a task's own samples are read under generators of their own.
    workers, seed = (0, None) if opened is not None else (options.workers, 0)
    return Loader(SampleReader(dataset, seed=seed), planned, workers=workers, prefetch=options.prefetch)


def train(batches: Iterator[object], *, steps: int, step_s: float) -> tuple[list[float], list[float]]:
    """Seconds that the device was idle before each step, and that the host waited for its batch."""
    idle, waited = [], []
    ends = time.monotonic()  # of what the device has been given
    for _ in range(steps):
        began = time.monotonic()
        next(batches)
        now = time.monotonic()
        waited.append(now - began)
        idle.append(max(0.0, now - ends))
        before, ends = ends, max(now, ends) + step_s
        # The figures of the step before.
        time.sleep(max(0.0, before - time.monotonic()))
    return idle, waited


def run_rank(source: str, options: argparse.Namespace, rank: int, folder: str, together: Any, results: Any) -> None:
    torch.set_num_threads(1)
    step_s = options.micro_batch * options.seq_len / options.tokens_per_s
    if source == "memory":
        batch = {"tokens": torch.zeros(options.micro_batch, options.seq_len + 1, dtype=torch.int64)}
        together.wait()
        idle, waited = train(repeat(batch), steps=options.steps + _WARM_UP, step_s=step_s)
        results.put(Figures(idle[_WARM_UP:], waited[_WARM_UP:], 0.0))
        return
    with make_loader(source, options, rank=rank, folder=folder) as loader:
        next(loader)
        together.wait()
        idle, waited = train(loader, steps=options.steps + _WARM_UP, step_s=step_s)
        together.wait()
        began, count = time.monotonic(), max(10, options.steps)
        for _ in islice(loader, count):
            pass
        tokens_per_s = count * options.micro_batch * options.seq_len / (time.monotonic() - began)
    results.put(Figures(idle[_WARM_UP:], waited[_WARM_UP:], tokens_per_s))


def measure(source: str, options: argparse.Namespace, *, folder: str) -> dict[str, Any]:
    context = multiprocessing.get_context("fork")
    together, results = context.Barrier(options.ranks), context.SimpleQueue()
    ranks = [
        context.Process(target=run_rank, args=(source, options, rank, folder, together, results))
        for rank in range(options.ranks)
    ]
    for process in ranks:
        process.start()
    found: list[Figures] = [results.get() for _ in ranks]
    for process in ranks:
        process.join()
    step_s = options.micro_batch * options.seq_len / options.tokens_per_s
    idle = [max(late) for late in zip(*(one.idle_s for one in found), strict=True)]
    waited = [one for figures in found for one in figures.waited_s]
    return {
        "source": source,
        "step_s": sum(idle) / len(idle) + step_s,
        "late_steps": sum(one > options.late_ms / 1000 for one in idle),
        "steps": len(idle),
        "waited_ms": float(np.median(waited)) * 1000,
        "longest_ms": max(waited) * 1000,
        "feeds_tokens_per_s": min(one.tokens_per_s for one in found) if source != "memory" else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sources", default=",".join(_SOURCES))
    parser.add_argument("--data", default="stdlib", help="token files, as data.path")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--tokens-per-s", type=float, default=58_374.0, help="of one device")
    parser.add_argument("--workers", type=int, default=1, help="data.workers, for tar files")
    parser.add_argument("--prefetch", type=int, default=4, help="data.prefetch")
    parser.add_argument("--latency-ms", type=float, default=30.0)
    parser.add_argument("--late-ms", type=float, default=1.0, help="a step is late if its device was idle for longer")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = f"{temporary}/tar"
        num_samples = 2 * options.ranks * options.micro_batch * options.steps
        write_tar_files(Path(folder), num_samples=num_samples, seq_len=options.seq_len)
        for source in ("memory", *options.sources.split(",")):
            row = measure(source, options, folder=folder)
            rows.append(row | {"ratio": (rows[0] if rows else row)["step_s"] / row["step_s"]})
            feeds = f"; feeds {row['feeds_tokens_per_s']:,.0f} tokens/s" if source != "memory" else ""
            print(
                f"{source:8} ratio {rows[-1]['ratio']:.4f}, {row['late_steps']} of {row['steps']} steps late; waited "
                f"{row['waited_ms']:.2f} ms, {row['longest_ms']:.1f} at most{feeds}"
            )
    if options.json is not None:
        options.json.write_text(json.dumps({"options": vars(options) | {"json": None}, "rows": rows}))


if __name__ == "__main__":
    main()
