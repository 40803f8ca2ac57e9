"""What a standby builds, and where it builds nothing."""

import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from elastictrain.data.loader import MicroBatch
from elastictrain.distributed.group import leave, lone_group, make_group
from elastictrain.identity import Identity
from elastictrain.train import standby as module
from elastictrain.train.build import BuiltState
from elastictrain.train.standby import forget, has_room, prepare
from tests.unit.train.parts import context_of
from tests.unit.train.test_loop import config

GB = 1 << 30


class Stage:
    """A host with much memory, and a device, on which building does what a test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.available, self.free = 100 * GB, 20 * GB
        self.fractions: list[float] = []
        self.needs = GB
        self.tensor = torch.ones(4)
        self.arena_priorities: list[int] = []
        monkeypatch.setattr(module, "_build", self._build)
        monkeypatch.setattr(module, "share_arena", self._share_arena)
        monkeypatch.setattr(
            module, "measure_state", lambda task, optim, averaged: SimpleNamespace(of_rank=lambda *, shards: GB)
        )
        monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=self.available))
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (self.free, 80 * GB))
        monkeypatch.setattr(module, "warm_backward", lambda: None)
        monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: self.needs)
        monkeypatch.setattr(
            torch.cuda, "set_per_process_memory_fraction", lambda fraction, device: self.fractions.append(fraction)
        )

    def prepare(self, *, kind: str = "ddp", backend: str = "gloo", exact: bool = False) -> BuiltState | None:
        plain = config(steps=3)
        context = context_of(
            config=replace(plain, parallel=replace(plain.parallel, kind=cast(Any, kind))),
            identity=Identity(1, 2, 1, 2, "here", launched=True),
            backend=backend,
            on_gpu=backend == "nccl",
            task=None,
        )
        return prepare(context, exact=exact)

    def _share_arena(self, context: object, state: object) -> None:
        self.arena_priorities.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    def _build(self, context: object) -> BuiltState:
        if self.fractions and self.needs > self.fractions[-1] * 80 * GB:
            raise torch.OutOfMemoryError
        state = SimpleNamespace(tensors=lambda: {"w": self.tensor}, changed_by_forward=frozenset)
        return BuiltState(cast(Any, None), cast(Any, state))


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    return Stage(monkeypatch)


@pytest.mark.parametrize(
    ("kind", "backend", "exact", "built"),
    [
        ("ddp", "gloo", False, True),
        ("fsdp", "gloo", False, False),
        ("hsdp", "gloo", False, False),
        ("fsdp", "gloo", True, True),
        ("ddp", "nccl", False, False),
        ("ddp", "nccl", True, True),
        ("fsdp", "nccl", True, True),
    ],
)
def test_what_depends_on_the_rank_is_built_for_one_rank(
    kind: str, backend: str, exact: bool, built: bool, stage: Stage
) -> None:
    assert (stage.prepare(kind=kind, backend=backend, exact=exact) is not None) is built


def test_without_memory_to_spare_nothing_is_built(stage: Stage) -> None:
    stage.available = 2 * GB
    assert stage.prepare() is None


def test_on_a_device_it_gives_the_memory_back(stage: Stage) -> None:
    stage.available = 0
    built = stage.prepare(backend="nccl", exact=True)
    assert built is not None
    assert built.parked is not None
    assert built.parked.peak_bytes == GB
    assert stage.tensor.untyped_storage().nbytes() == 0
    assert stage.arena_priorities == [os.getpriority(os.PRIO_PROCESS, 0)], "the successor keeps its thread"
    assert stage.fractions == [pytest.approx(0.7 * 20 / 80), 1.0], "it may take a part of what is free, and all of it later"


@pytest.mark.parametrize(
    ("backend", "on_gpu", "free", "room"),
    [("nccl", True, 9, True), ("nccl", True, 7, False), ("gloo", False, 7, True), ("gloo", True, 7, False)],
)
def test_where_training_may_need_the_rest_of_a_device_there_is_no_room(
    backend: str, on_gpu: bool, free: int, room: bool, stage: Stage
) -> None:
    stage.free = free * GB
    assert has_room(context_of(config=config(steps=3), backend=backend, on_gpu=on_gpu, task=None)) is room


def test_a_device_with_little_memory_stays_free(stage: Stage) -> None:
    stage.needs = 15 * GB
    assert stage.prepare(backend="nccl", exact=True) is None
    assert stage.fractions[-1] == 1.0
    assert stage.tensor.untyped_storage().nbytes()


def test_after_a_preparation_that_failed_the_process_can_take_part_in_a_group() -> None:
    alone = Identity(0, 1, 0, 1, "here", launched=True)
    lone_group(alone, backend="gloo", on_gpu=False)
    forget()
    group = make_group(dist.HashStore(), alone, backend="gloo", init_timeout_s=30.0, save_timeout_s=60.0)
    leave(group)


@pytest.mark.parametrize(("global_batch", "passes"), [(4, 1), (8, 2), (64, 2)])
def test_of_a_step_it_runs_what_has_to_be_compiled(global_batch: int, passes: int) -> None:
    ran: list[int] = []

    class FakeStepper:
        def run(self, step: int, micro_batches: Iterator[MicroBatch], *, passes: int, **_: object) -> SimpleNamespace:
            ran.extend([passes, len(list(micro_batches))])
            return SimpleNamespace(result=lambda: None)

    class Numbers:
        def __len__(self) -> int:
            return 100

        def read(self, sample_ids: Sequence[int], *, first: int) -> list[int]:
            return list(sample_ids)

    plain = config(steps=3)
    samples = SimpleNamespace(train=Numbers(), mixture=None)
    train = replace(plain.train, global_batch=global_batch, micro_batch=4)
    module._run_step(context_of(config=replace(plain, train=train), samples=samples), cast(Any, FakeStepper()))
    assert ran == [passes, passes]
