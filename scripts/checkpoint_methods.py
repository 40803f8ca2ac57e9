"""The ways to save a checkpoint that `bench_checkpoint.py` compares: ours, and those of stock torch.distributed.checkpoint."""

import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from elastictrain.checkpoint.checkpointer import Checkpointer
from elastictrain.checkpoint.memory.folder import run_folder, run_name
from elastictrain.checkpoint.memory_restore import MemoryRestore
from elastictrain.config.composed import RunConfig
from elastictrain.config.digest import config_digest
from elastictrain.identity import Identity
from elastictrain.storage.opening import open_store
from elastictrain.train.context import TrainContext
from elastictrain.train.loop import Loop
from elastictrain.train.snapshot_saving import SnapshotSaving

WATCH_S = 0.002


class FailedError(Exception):
    """A method cannot save or load any more; the others go on."""


@dataclass(slots=True)
class Bench:
    """What the methods work with."""

    context: TrainContext
    loop: Loop
    folder: Path
    limit_s: float

    @property
    def config(self) -> RunConfig:
        return self.context.config

    @property
    def identity(self) -> Identity:
        return self.context.identity

    @property
    def group(self) -> dist.ProcessGroup:
        return self.context.group.control

    @property
    def cuda(self) -> bool:
        return self.context.group.device.type == "cuda"

    def checkpointer(self, folder: Path) -> Checkpointer:
        return Checkpointer(
            open_store(str(folder)),
            options=self.config.checkpoint,
            group=self.group,
            rank=self.identity.rank,
            world_size=self.identity.world_size,
            incarnation=self.context.generation.name,
            config_digest=config_digest(self.config),
            record=lambda _: None,
        )

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()


class Method(Protocol):
    """One way to save."""

    name: str
    remark: str

    def begin(self, step: int) -> None:
        """Save the state of a step; it may go on in the background."""

    def durable_at(self) -> float | None:
        """When this rank's clock saw the save complete; None if it is not. Raises: what went wrong."""

    def path(self) -> Path:
        """The folder with the files of the last save."""

    def loads(self) -> Mapping[str, Callable[[], None]]:
        """Ways to load it, by name."""

    def clear(self) -> None:
        """Called on rank 0 when it has been loaded."""


class Ours:
    """A snapshot in host memory, which the saver writes out."""

    name = "ours: snapshot, saver"
    remark = ""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._known: set[str] = set()
        self._seen: list[float] = []
        self._newest = Path()

    def begin(self, step: int) -> None:
        saving = self._bench.loop.saving
        if not isinstance(saving, SnapshotSaving) or saving.requires_finished_step:
            raise FailedError("there is no saver, or no host memory for snapshots")
        self._known, self._seen = self._manifests(), []
        if self._bench.identity.is_log_rank:
            threading.Thread(target=self._watch, daemon=True).start()
        saving.snapshot(step, reason="interval")

    def durable_at(self) -> float | None:
        # The others do not look: what counts is when all ranks are through, and rank 0 is then.
        return (self._seen or [None])[0] if self._bench.identity.is_log_rank else 0.0

    def path(self) -> Path:
        return self._newest

    def loads(self) -> Mapping[str, Callable[[], None]]:
        return {"ours, from memory": self._from_memory, "ours, from storage": self._from_storage}

    def clear(self) -> None:
        """Its own pruning keeps one."""

    def _manifests(self) -> set[str]:
        return set(map(str, self._bench.folder.glob("run/checkpoints/*/manifest.json")))

    def _watch(self) -> None:
        deadline = time.monotonic() + self._bench.limit_s
        while time.monotonic() < deadline:
            if new := self._manifests() - self._known:
                self._newest = Path(max(new)).parent
                self._seen.append(time.monotonic())
                return
            time.sleep(WATCH_S)

    def _from_memory(self) -> None:
        bench = self._bench
        # Snapshots count if their incarnation has left events.
        bench.context.journal.flush()
        dist.barrier(group=bench.group)
        recall = MemoryRestore(
            run_folder(bench.config.checkpoint.memory_dir, bench.config.run.dir),
            run=run_name(bench.config.run.dir),
            host=bench.identity.rank - bench.identity.local_rank,
            lists_host_memory=bench.identity.local_rank == 0,
            group=bench.group,
            remote=None,
        )
        self._restore(recall, tier="memory")

    def _from_storage(self) -> None:
        self._restore(None, tier="storage")

    def _restore(self, recall: MemoryRestore | None, *, tier: str) -> None:
        bench = self._bench
        tensors = bench.loop.state.tensors()
        result = bench.checkpointer(bench.folder / "run").restore(tensors=tensors, reset=lambda: None, recall=recall)
        if result is None or result.tier != tier:
            raise FailedError(f"nothing was loaded from {tier}: {result}")


class Synchronous:
    """The same files, written while training waits."""

    name = "ours: synchronous"
    remark = ""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._root = bench.folder / "synchronous"
        self._done_s: float | None = None

    def begin(self, step: int) -> None:
        state, batch = self._bench.loop.state, self._bench.config.train.global_batch
        checkpointer = self._bench.checkpointer(self._root)
        scalars = state.scalars(step, global_batch=batch)
        checkpointer.save(step, tensors=state.tensors(), state=scalars, reason="interval")
        self._done_s = time.monotonic()

    def durable_at(self) -> float | None:
        return self._done_s

    def path(self) -> Path:
        return self._root

    def loads(self) -> Mapping[str, Callable[[], None]]:
        return {}

    def clear(self) -> None:
        shutil.rmtree(self._root)


def stages_twice() -> bool:
    """Whether a stager can be used for a second save; that of torch 2.11 forgets after the first how it is done."""
    stager = DefaultStager(StagingOptions(False, False, False, False))
    try:
        for _ in range(2):
            stager.stage({"probe": torch.zeros(1)})
    except KeyError:
        return False
    return True


@dataclass(slots=True)
class Stock:
    """DCP's own: `save`, or `async_save` in a thread or a process."""

    name: str
    bench: Bench
    kind: AsyncCheckpointerType | None
    group: dist.ProcessGroup
    stager: DefaultStager | None = None
    one_stager: bool = True
    staging: Future[None] | None = None
    upload: Future[object] | None = None
    done: list[float] = field(default_factory=list)

    @classmethod
    def make(cls, bench: Bench, kind: AsyncCheckpointerType | None) -> "Stock":
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=bench.limit_s))
        if kind is None:
            return cls("dcp.save", bench, kind, group)
        made = cls(f"dcp.async_save, {kind.value}", bench, kind, group, one_stager=stages_twice())
        bench.loop.state.optimizer.members[0].register_step_pre_hook(lambda *_: made.before_update())
        return made

    @property
    def remark(self) -> str:
        return "" if self.one_stager else "a new stager for each save: in this torch, one stages only once"

    def before_update(self) -> None:
        """What is being copied must not change."""
        if self.staging is not None:
            self.staging.exception()
            self.staging = None

    def begin(self, step: int) -> None:
        shutil.rmtree(self.path(), ignore_errors=True)
        dist.barrier(group=self.group)
        self.done = []
        state: dict[str, object] = dict(self.bench.loop.state.tensors())
        if self.kind is None:
            dcp.save(state, checkpoint_id=self.path(), process_group=self.group)
            self.done.append(time.monotonic())
            return
        if self.stager is None or not self.one_stager:
            self._renew_stager()
        answer = dcp.async_save(
            state,
            checkpoint_id=self.path(),
            process_group=self.group,
            async_checkpointer_type=self.kind,
            async_stager=self.stager,
        )
        self.staging = getattr(answer, "staging_completion", None)
        self.upload = getattr(answer, "upload_completion", answer)
        self.upload.add_done_callback(lambda _: self.done.append(time.monotonic()))

    def durable_at(self) -> float | None:
        if self.kind is not None and self.upload is not None and self.upload.done():
            self.upload.result()
        return self.done[0] if self.done else None

    def path(self) -> Path:
        return self.bench.folder / self.name.replace(", ", "-")

    def loads(self) -> Mapping[str, Callable[[], None]]:
        return {"dcp.load": self._load} if self.kind is None else {}

    def clear(self) -> None:
        shutil.rmtree(self.path())

    def _renew_stager(self) -> None:
        if self.stager is not None:
            self.stager.close()
        options = StagingOptions(
            use_pinned_memory=self.bench.cuda,
            use_shared_memory=self.kind == AsyncCheckpointerType.PROCESS,
            use_async_staging=True,
            use_non_blocking_copy=self.bench.cuda,
        )
        self.stager = DefaultStager(options)

    def _load(self) -> None:
        dcp.load(dict(self.bench.loop.state.tensors()), checkpoint_id=self.path(), process_group=self.group)


def methods_of(bench: Bench) -> Iterator[Method]:
    yield Ours(bench)
    yield Synchronous(bench)
    for kind in (None, AsyncCheckpointerType.THREAD, AsyncCheckpointerType.PROCESS):
        yield Stock.make(bench, kind)
