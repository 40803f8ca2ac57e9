import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastictrain.cgroup import MemoryGroup
from elastictrain.checkpoint.memory import budget
from elastictrain.checkpoint.memory.budget import Buffers, HostMemory, decide_buffers, describe, least, memory_of
from tests.unit.examples import examples

GB = 10**9


def decide(free_gb: float, *, wanted: int = 2, replicate: bool = True, held_gb: float = 0) -> Buffers:
    memory = HostMemory(100 * GB, int((free_gb + 10) * GB), 1000 * GB, int(held_gb * GB))
    return decide_buffers(memory, wanted=wanted, replicate=replicate, snapshot_bytes=10 * GB, replica_bytes=5 * GB)


def test_less_and_less_memory() -> None:
    # Replicas take a third buffer.
    assert decide(40) == Buffers(3, True)
    assert (decide(39.9).per_rank, decide(39.9).replicate) == (2, False)
    assert (decide(19.9).per_rank, decide(19.9).replicate) == (1, False)
    assert (decide(9.9).per_rank, decide(9.9).replicate) == (0, False)
    assert decide(20, replicate=False) == Buffers(2, False)
    assert decide(9.9, held_gb=30.1) == Buffers(3, True)
    assert decide(0, wanted=0, replicate=False) == Buffers(0, False)
    assert [decide(free, wanted=3).per_rank for free in (30, 29.9, 19.9, 9.9)] == [3, 2, 1, 0]


def test_replicas_that_are_there_are_of_use_to_replicas_alone() -> None:
    memory = HostMemory(100 * GB, 10 * GB, 1000 * GB, held_bytes=20 * GB, held_replica_bytes=20 * GB)
    kept = decide_buffers(memory, wanted=2, replicate=True, snapshot_bytes=10 * GB, replica_bytes=5 * GB)
    assert kept == Buffers(3, True)
    assert decide_buffers(memory, wanted=3, replicate=False, snapshot_bytes=10 * GB, replica_bytes=0).per_rank == 2


def test_the_folder_counts_as_well() -> None:
    memory = HostMemory(100 * GB, 90 * GB, 15 * GB)
    found = decide_buffers(memory, wanted=2, replicate=False, snapshot_bytes=10 * GB, replica_bytes=0)
    assert found.per_rank == 1
    for figure in ("20.00 GB", "2 buffers", "10.00 GB", "15.00 GB"):
        assert figure in found.shortage


@settings(max_examples=examples(200))
@given(st.integers(0, 200), st.integers(0, 200), st.integers(0, 3), st.booleans(), st.integers(1, 50), st.integers(0, 50))
def test_what_is_promised_fits_and_less_is_said(
    available: int, folder: int, wanted: int, replicate: bool, snapshot: int, replica: int
) -> None:
    memory = HostMemory(100, available, folder)
    found = decide_buffers(memory, wanted=wanted, replicate=replicate, snapshot_bytes=snapshot, replica_bytes=replica)
    needed = found.per_rank * snapshot + 2 * replica * found.replicate
    assert not found.per_rank or needed <= min(available - 10, folder)
    most = max(wanted, 3) if wanted and replicate else wanted
    assert found.per_rank <= most
    assert bool(found.shortage) == ((found.per_rank, found.replicate) != (most, replicate and wanted > 0))


def test_all_hosts_do_what_the_least_can() -> None:
    assert least([Buffers(2, True), Buffers(1, True, "a"), Buffers(2, False, "b"), Buffers(1, True, "a")]) == Buffers(
        1, False, "a; b"
    )
    assert least([Buffers(0, True, "x"), Buffers(2, True)]) == Buffers(0, False, "x")


def test_a_person_is_told_what_follows() -> None:
    assert "checkpoints are synchronous" in describe(Buffers(0, False, "why"), replicate=True)
    assert "one buffer per rank" in describe(Buffers(1, True, "why"), replicate=True)
    assert "third step" in describe(Buffers(2, False, "why"), replicate=False)
    assert describe(Buffers(3, False, "why"), replicate=True) == "why; no replicas on other hosts"
    told = [describe(Buffers(*kept, "why"), replicate=True) for kept in ((0, False), (1, True), (1, False), (2, False))]
    assert ["replicas" in text for text in told] == [False, False, True, True]
    assert "replicas" not in describe(Buffers(1, False, "why"), replicate=False)
    assert ["one buffer" in text for text in told] == [False, True, True, False]


def test_a_folder_that_is_not_there_yet_lies_where_it_will() -> None:
    assert memory_of("/tmp/not/there/at/all", held_bytes=7).folder_free_bytes > 0


def test_the_least_room_of_all_groups_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "memory_groups", lambda: [MemoryGroup(1000, 700), MemoryGroup(700, 200)])
    found = memory_of("/")
    assert (found.total_bytes, found.available_bytes) == (700, 300)
