"""One rank of a test in which one rank's store fails: all ranks must see the same error, and the next save must succeed.

Usage: faults_worker.py RUN_DIR
"""

import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import torch
import torch.distributed as dist

from elastictrain.checkpoint.checkpointer import Checkpointer
from elastictrain.config.composed import CheckpointGroup
from elastictrain.errors import (
    CheckpointError,
    ElasticTrainError,
    NoValidCheckpointError,
    StorageFullError,
    TransientStorageError,
)
from elastictrain.events import CheckpointRejected, Event
from elastictrain.storage.opening import open_store
from elastictrain.storage.store import ObjectWriter, Store


class FaultyStore:
    """A store, but `open_writer` and `read_into` call `fault` first."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.fault: Callable[[], None] = lambda: None

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)

    def open_writer(self, key: str) -> AbstractContextManager[ObjectWriter]:
        self.fault()
        return self._store.open_writer(key)

    def read_into(self, key: str, buffer: memoryview, *, start: int = 0) -> int:
        self.fault()
        return self._store.read_into(key, buffer, start=start)


def expect(kind: type[ElasticTrainError], act: Callable[[], object], *, mention: str) -> None:
    caught: ElasticTrainError | None = None
    try:
        act()
    except ElasticTrainError as error:
        caught = error
    assert type(caught) is kind, caught
    assert mention in str(caught), caught


def main(run_dir: str) -> None:
    dist.init_process_group("gloo")
    group = dist.new_group(backend="gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    store = FaultyStore(open_store(run_dir))
    events: list[Event] = []
    checkpointer = Checkpointer(
        store,  # type: ignore[arg-type]
        options=CheckpointGroup(),
        group=group,
        rank=rank,
        world_size=world_size,
        incarnation="inc",
        config_digest="c",
        record=events.append,
    )
    tensors = {f"model.{name}": torch.full((64, 8), float(name)) for name in range(6)}

    def save(step: int) -> None:
        checkpointer.save(step, tensors=tensors, state={"step": step}, reason="step")

    def restored_step() -> int:
        loaded = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
        result = checkpointer.restore(tensors=loaded, reset=lambda: None)
        assert result is not None
        assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)
        return result.step

    def raising(error: Exception, *, on: int) -> Callable[[], None]:
        def fault() -> None:
            if rank == on:
                raise error

        return fault

    assert not list(open_store(run_dir).list("checkpoints"))
    save(1)
    store.fault = raising(StorageFullError("disk full"), on=1)
    expect(StorageFullError, lambda: save(2), mention="disk full")
    store.fault = raising(KeyError("a bug"), on=2)
    expect(CheckpointError, lambda: save(2), mention="a bug")
    store.fault = lambda: None
    assert restored_step() == 1
    save(2)
    store.fault = raising(TransientStorageError("503"), on=1)
    expect(TransientStorageError, restored_step, mention="rank 1: 503")
    store.fault = lambda: None
    assert restored_step() == 2
    assert not [event for event in events if isinstance(event, CheckpointRejected)]

    folder = Path(run_dir) / "checkpoints"
    if rank == 0:
        damaged = next(iter(sorted((folder / "step-000000002").glob("*r00001*"))))
        damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    dist.barrier()
    assert restored_step() == 1
    rejected = [event.checkpoint for event in events if isinstance(event, CheckpointRejected)]
    assert rejected == (["step-000000002"] if rank == 0 else [])
    assert (folder / "step-000000002" / "quarantine.json").exists()
    dist.barrier()
    if rank == 0:
        (folder / "step-000000001" / "manifest.json").write_bytes(b"{")
    dist.barrier()
    expect(NoValidCheckpointError, restored_step, mention="checkpoint.on_invalid=fresh")


if __name__ == "__main__":
    main(sys.argv[1])
    dist.barrier()
    dist.destroy_process_group()
    # gloo may abort when the interpreter ends.
    sys.stdout.flush()
    os._exit(0)
