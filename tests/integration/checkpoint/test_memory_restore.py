"""Restores from the memory of one host and a store: which of the two is taken, and what damage in either leads to."""

import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from elastictrain.checkpoint import memory_restore, reader, verified_read
from elastictrain.checkpoint.copier import Arena
from elastictrain.checkpoint.layout import Item
from elastictrain.checkpoint.lineage import Lineage, ResumeOrigin
from elastictrain.checkpoint.manifest import FileRecord, JsonValue, Manifest
from elastictrain.checkpoint.memory.folder import Held, SlotName, look
from elastictrain.checkpoint.memory.layout import HEADER_BYTES, RankDigests, RankLayout, RankPart
from elastictrain.checkpoint.memory.records import compute_digests, load_digests, load_layout, store_digests, store_layout
from elastictrain.checkpoint.memory.slot import VERSION, ReadSnapshot, Slot, SnapshotFacts
from elastictrain.checkpoint.memory_restore import MemoryRestore, RemoteReader, teller
from elastictrain.checkpoint.saver.commit_protocol import encode_parts
from elastictrain.checkpoint.verified_read import CheckpointFolder
from elastictrain.errors import StorageError, TransientStorageError
from elastictrain.events import CheckpointRejected
from tests.unit.checkpoint.fakes import Bench
from tests.unit.checkpoint.memory.madeslots import RUN, facts_of, flip

MEMORY = "snapshot of step {}"
"""A snapshot, as events name it."""

ROWS = 8
FIRST, SECOND, THIRD = "000001-aa", "000002-bb", "000003-cc"


def tensors_of(step: int) -> dict[str, Tensor]:
    return {"model.w": torch.full((ROWS, 64), float(step))}


@pytest.fixture
def bench() -> Bench:
    made = Bench()
    for name in (FIRST, SECOND):
        made.store.write(f"events/{name}-r00000.jsonl", b"{}\n")
    return made


def save(bench: Bench, *steps: int, incarnation: str = FIRST) -> None:
    checkpointer = bench.checkpointer(incarnation)
    for step in steps:
        checkpointer.save(step, tensors=tensors_of(step), state={"step": step}, reason="step")


def damage(bench: Bench, step: int, *, end: str = "safetensors") -> None:
    key = next(key for key in sorted(bench.store.objects) if f"step-{step:09d}/" in key and key.endswith(end))
    data = bytearray(bench.store.objects[key])
    data[-3] ^= 4
    bench.store.objects[key] = bytes(data)


def keep(
    folder: Path,
    step: int,
    *,
    rank: int = 0,
    world_size: int = 1,
    incarnation: str = FIRST,
    kind: str = "own",
    index: int = 0,
    digests: bool = True,
) -> SnapshotFacts:
    """One rank's share of the rows in a slot, as if it and its saver were gone."""
    rows = ROWS // world_size
    layout = RankLayout((Item("model.w", "float32", (ROWS, 64), (rank * rows, 0), (rows, 64)),), shard_bytes=1 << 20)
    facts = SnapshotFacts(
        VERSION, RUN, incarnation, step, world_size, rank, layout.digest, "digest of the config", 12.5, "", {"step": step}
    )
    store_layout(str(folder), layout)
    slot = Slot.make(f"{folder}/{SlotName(kind, rank, index)}", size_bytes=layout.size_bytes)
    slot.begin()
    view = memoryview(slot.map)[HEADER_BYTES:]
    for file, base in zip(layout.template, layout.starts, strict=True):
        view[base : base + len(file.header)] = file.header
        for placed in file.items:
            data = torch.full((rows, 64), float(step)).numpy().tobytes()
            view[base + placed.start : base + placed.start + len(data)] = data
    view.release()
    slot.complete(facts)
    if digests:
        store_digests(slot.path, facts, compute_digests(slot, layout, threads=1))
    slot.close()
    return facts


def recall_of(folder: Path, *, remote: RemoteReader | None = None, arena: Arena | None = None) -> MemoryRestore:
    return MemoryRestore(str(folder), run=RUN, host=0, lists_host_memory=True, group=None, remote=remote, arena=arena)


def restored(bench: Bench, memory: MemoryRestore, **options: object) -> tuple[int, str]:
    """Step and tier of what a start restores, checked against every tensor; step 0 is a fresh start."""
    tensors = tensors_of(0)

    def reset() -> None:
        for name, value in tensors_of(0).items():
            tensors[name].copy_(value)

    result = bench.checkpointer(THIRD, **options).restore(tensors=tensors, reset=reset, recall=memory)
    step, tier = (0, "none") if result is None else (result.step, result.tier)
    assert torch.equal(tensors["model.w"], tensors_of(step)["model.w"])
    return step, tier


def rejected(bench: Bench) -> list[str]:
    return [event.checkpoint for event in bench.events if isinstance(event, CheckpointRejected)]


@pytest.mark.parametrize(
    ("stored", "kept", "expected"),
    [
        ((), (), (0, "none")),
        ((), (5,), (5, "memory")),
        ((100,), (), (100, "storage")),
        ((100,), (90,), (100, "storage")),
        ((100,), (100,), (100, "memory")),
        ((100,), (90, 110), (110, "memory")),
    ],
)
def test_the_newest_of_memory_and_storage_is_taken(
    stored: tuple[int, ...], kept: tuple[int, ...], expected: tuple[int, str], bench: Bench, tmp_path: Path
) -> None:
    save(bench, *stored)
    for index, step in enumerate(kept):
        keep(tmp_path, step, index=index)
    assert restored(bench, recall_of(tmp_path)) == expected
    assert rejected(bench) == []


@pytest.mark.parametrize("end", ["safetensors", "manifest.json"])
def test_memory_is_looked_at_again_when_the_newest_in_storage_is_damaged(bench: Bench, tmp_path: Path, end: str) -> None:
    save(bench, 100, 400)
    damage(bench, 400, end=end)
    keep(tmp_path, 390)
    assert restored(bench, recall_of(tmp_path)) == (390, "memory")
    assert rejected(bench) == ["step-000000400"]


def test_storage_is_looked_at_again_when_the_newest_in_memory_is_damaged(bench: Bench, tmp_path: Path) -> None:
    save(bench, 100, 300)
    for index, step in enumerate((50, 200, 400)):
        keep(tmp_path, step, index=index)
    flip(tmp_path, "own-r00000-s2", at=HEADER_BYTES + 1000)
    damage(bench, 300)
    assert restored(bench, recall_of(tmp_path)) == (200, "memory")
    assert rejected(bench) == [MEMORY.format(400), "step-000000300"]


def test_memory_is_what_is_left_when_nothing_in_storage_is_valid(bench: Bench, tmp_path: Path) -> None:
    save(bench, 100)
    damage(bench, 100)
    keep(tmp_path, 40)
    assert restored(bench, recall_of(tmp_path)) == (40, "memory")


@pytest.mark.parametrize("on_invalid", ["stop", "fresh"])
def test_damage_in_memory_alone_leaves_a_fresh_start_its_first_values(bench: Bench, tmp_path: Path, on_invalid: str) -> None:
    for rank in range(2):
        keep(tmp_path, 40, rank=rank, world_size=2)
    flip(tmp_path, "own-r00001-s0", at=HEADER_BYTES + 1000)
    assert restored(bench, recall_of(tmp_path), on_invalid=on_invalid) == (0, "none")


def overtaken(bench: Bench) -> None:
    """The second generation went on from step 100 of the first, without the host that was frozen with a later one."""
    save(bench, 100)
    for origin in (ResumeOrigin(1, FIRST, 0, ""), ResumeOrigin(2, SECOND, 100, FIRST)):
        Lineage(bench.store).write(origin)


def test_a_snapshot_that_the_run_went_on_without_counts_last(bench: Bench, tmp_path: Path) -> None:
    overtaken(bench)
    save(bench, 150, incarnation=SECOND)
    keep(tmp_path, 200)
    keep(tmp_path, 120, incarnation=SECOND, index=1)
    assert restored(bench, recall_of(tmp_path)) == (150, "storage")
    damage(bench, 150)
    assert restored(bench, recall_of(tmp_path)) == (120, "memory")
    (tmp_path / "own-r00000-s1").unlink()
    assert restored(bench, recall_of(tmp_path)) == (100, "storage")
    damage(bench, 100)
    assert restored(bench, recall_of(tmp_path)) == (200, "memory")


def test_a_snapshot_on_the_line_goes_before_a_checkpoint_that_is_not(bench: Bench, tmp_path: Path) -> None:
    overtaken(bench)
    save(bench, 180)
    keep(tmp_path, 120, incarnation=SECOND)
    keep(tmp_path, 200, index=1)
    assert restored(bench, recall_of(tmp_path)) == (120, "memory")


class Neighbour:
    """Rank 1 on another host: it tells what it holds, and cannot be read."""

    def __init__(self, folder: Path, *, headers: bool) -> None:
        """`headers`: those can be read."""
        folder.mkdir()
        self._headers = headers
        self.folder = folder

    def gather(self, value: JsonValue, *, group: None) -> list[JsonValue]:
        """What both ranks say: the records of their snapshots, or nothing of interest."""
        answer: JsonValue = None
        if isinstance(value, str):
            answer = encode_parts([self._part(one) for one in look(str(self.folder), host=1)]).decode()
        return [value, answer]

    def gather_records(self, own: Any, *, group: None) -> list[Any]:
        """Which snapshots both hosts hold."""
        return [own, replace(own, host=1, held=tuple(look(str(self.folder), host=1)))]

    def _part(self, held: Held) -> RankPart:
        digests = load_digests(f"{self.folder}/{held.slot}", held.facts)
        assert digests is not None
        return RankPart(held.facts.rank, load_layout(str(self.folder), held.facts.layout), digests)

    def __call__(self, held: Held) -> ReadSnapshot:
        layout = load_layout(str(self.folder), held.facts.layout)
        files = layout.files(incarnation=held.facts.incarnation, rank=held.facts.rank)
        headers = {base: file.header for file, base in zip(files, layout.starts, strict=True)} if self._headers else {}

        def read(buffer: memoryview, start: int) -> None:
            """After the headers, if those can be read, no answer comes through."""
            if start not in headers:
                raise TransientStorageError("host b does not answer")
            buffer[:] = headers[start]

        return read


@pytest.mark.parametrize("headers", [True, False])
def test_a_host_that_cannot_be_read_condemns_only_what_it_holds(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, headers: bool
) -> None:
    """Of rank 1 there is a replica on this host."""
    save(bench, 100)
    neighbour = Neighbour(tmp_path / "b", headers=headers)
    monkeypatch.setattr(memory_restore, "gather_json", neighbour.gather)
    monkeypatch.setattr(memory_restore, "gather_records", neighbour.gather_records)
    keep(tmp_path, 200)
    keep(tmp_path, 300, rank=0, world_size=2, index=1)
    keep(tmp_path, 300, rank=1, world_size=2, kind="replica")
    keep(neighbour.folder, 300, rank=1, world_size=2)
    assert restored(bench, recall_of(tmp_path, remote=neighbour)) == (300, "peer")
    (event,) = (event for event in bench.events if isinstance(event, CheckpointRejected))
    assert (event.checkpoint, event.file) == (MEMORY.format(300), "own-r00001-s0")


def test_where_no_file_is_to_blame_another_step_is_taken(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(tmp_path, 200)
    for rank in range(2):
        keep(tmp_path, 300, rank=rank, world_size=2, index=1)
    verify, asked = reader.verify_headers, []

    def fail_once(folder: CheckpointFolder, manifest: Manifest, *, files: Sequence[FileRecord]) -> None:
        asked.append(files)
        if len(asked) == 1:
            raise StorageError("nobody knows why")
        verify(folder, manifest, files=files)

    monkeypatch.setattr(reader, "verify_headers", fail_once)
    assert restored(bench, recall_of(tmp_path)) == (200, "memory")
    assert len(rejected(bench)) == 2


@pytest.mark.parametrize("digests", [True, False])
@pytest.mark.parametrize(("lets_go", "expected"), [(True, (300, "memory")), (False, (200, "memory"))])
def test_a_worker_that_is_being_killed_is_given_the_time_to_let_go(
    bench: Bench,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    digests: bool,
    lets_go: bool,
    expected: tuple[int, str],
) -> None:
    monkeypatch.setattr(memory_restore, "_LETTING_GO_S", 5.0 if lets_go else 0.1)
    keep(tmp_path, 200)
    keep(tmp_path, 300, index=1, digests=digests)
    writer = Slot.open(f"{tmp_path}/own-r00000-s1")
    assert writer.lock(shared=False)
    killed = threading.Timer(0.2, writer.unlock)
    if lets_go:
        killed.start()
    assert restored(bench, recall_of(tmp_path)) == expected
    writer.close()


@pytest.mark.parametrize("several", [True, False])
def test_digests_are_computed_where_others_may_read_a_snapshot_through_a_network(
    bench: Bench, several: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(tmp_path, 300, digests=False)
    asked = []
    if several:
        gather = memory_restore.gather_records
        other = memory_restore._HostSnapshots(1, ())
        monkeypatch.setattr(memory_restore, "gather_records", lambda own, group: [*gather(own, group=group), other])

    def digest(slot: Slot, layout: RankLayout, *, threads: int, whole_files: bool, mapped: None) -> RankDigests:
        writer = Slot.open(slot.path)
        asked.append(writer.lock(shared=False))
        writer.close()
        return compute_digests(slot, layout, threads=threads, whole_files=whole_files)

    monkeypatch.setattr(memory_restore, "compute_digests", digest)
    assert restored(bench, recall_of(tmp_path)) == (300, "memory")
    # Nothing is written to it meanwhile.
    assert asked == [False] * several


def test_digests_of_one_set_do_not_count_for_the_next(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where another host may read it, what this process has digested it does not digest again: but only that."""
    for step, index, digests in ((300, 0, True), (400, 1, False)):
        for rank in (0, 1):
            keep(tmp_path, step, rank=rank, world_size=2, index=index, digests=digests or rank == 1)
    gather, other = memory_restore.gather_records, memory_restore._HostSnapshots(1, ())
    monkeypatch.setattr(memory_restore, "gather_records", lambda own, group: [*gather(own, group=group), other])
    flip(tmp_path, "own-r00001-s1", at=HEADER_BYTES + 1000)
    assert restored(bench, recall_of(tmp_path)) == (300, "memory")
    flip(tmp_path, "own-r00000-s0", at=HEADER_BYTES + 1000)
    assert restored(bench, recall_of(tmp_path)) == (0, "none")


@pytest.mark.parametrize("digests", [True, False])
def test_slots_that_this_process_has_mapped_are_read_in_place(
    bench: Bench, digests: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for index, step in enumerate((300, 400)):
        keep(tmp_path, step, index=index, digests=True if index else digests)
    layout = RankLayout((Item("model.w", "float32", (ROWS, 64), (0, 0), (ROWS, 64)),), shard_bytes=1 << 20)
    arena = Arena(str(tmp_path), layout, rank=0, indices=[0, 1], device=torch.device("cpu"))
    arena.start()
    until_s = time.monotonic() + 10
    while None in arena.slots:
        assert time.monotonic() < until_s
        time.sleep(0.01)
    copied: list[int] = []
    really_read = Slot.read_into

    def read_into(slot: Slot, buffer: memoryview, *, start: int) -> None:
        copied.append(len(buffer))
        really_read(slot, buffer, start=start)

    checked: list[int] = []
    really_check = verified_read.has_digest

    def check(data: memoryview, digest: str, *, sha256: str) -> bool:
        checked.extend([len(data)] * (len(data) == ROWS * 64 * 4))
        return really_check(data, digest, sha256=sha256)

    monkeypatch.setattr(Slot, "read_into", read_into)
    monkeypatch.setattr(verified_read, "has_digest", check)
    assert restored(bench, recall_of(tmp_path, arena=arena)) == (400, "memory")
    assert len(checked) == 1
    # Found there, too.
    flip(tmp_path, "own-r00000-s1", at=HEADER_BYTES + 1000)
    assert restored(bench, recall_of(tmp_path, arena=arena)) == (300, "memory")
    assert len(checked) == 2 + digests, "bytes without digests are read as they are"
    assert max(copied) < ROWS * 64 * 4, "only headers are copied"
    arena.close()
    assert restored(bench, recall_of(tmp_path, arena=arena)) == (300, "memory")
    assert max(copied) == ROWS * 64 * 4


def test_each_rank_tells_of_its_own_snapshot_and_the_first_of_a_host_of_the_rest() -> None:
    facts = [facts_of(5, rank=rank, world_size=6) for rank in range(6)]

    def tellers(*hosts: int, held: list[int]) -> list[int]:
        return [teller(Held(host, "slot", facts[rank]), hosts=hosts) for rank, host in enumerate(held)]

    assert tellers(0, 0, 0, 3, 3, 3, held=[0, 0, 0, 3, 3, 3]) == [0, 1, 2, 3, 4, 5]
    # The second host has come back as the first one; the third is gone, and its snapshots are replicas.
    assert tellers(0, 0, 2, 2, held=[2, 2, 0, 0, 0, 0]) == [2, 2, 0, 0, 0, 0]
