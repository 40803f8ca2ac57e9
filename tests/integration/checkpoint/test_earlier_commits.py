"""A run folder that lost its checkpoints: whatever else knows of them keeps a start from beginning again."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch.distributed as dist

from elastictrain.checkpoint.candidate_search import IN_MEMORY, CandidateSearch
from elastictrain.checkpoint.earlier_commits import InMemory, JobMemory, find_traces, of_memory, read_log, step_of_mark
from elastictrain.checkpoint.folders import RUN_COMMITTED_KEY
from elastictrain.checkpoint.lineage import Lineage
from elastictrain.checkpoint.save_interval import FailureCounts
from elastictrain.errors import NoValidCheckpointError
from elastictrain.identity import Identity, Launcher, RecoveryPlan
from elastictrain.lease.merge import FINISHED_S, merge_finished
from elastictrain.train.job_notes import JobNotes
from tests.integration.checkpoint.test_checkpointer import restored_step, save
from tests.unit.checkpoint.fakes import Bench, FakeStore

RESUMED_0 = {"event": "resume", "step": 0}
RESUMED_40 = {"event": "resume", "step": 40}
SAVED_40 = {"event": "checkpoint_saved", "step": 40}
STEP = {"event": "step", "step": 90}


def log(*rows: dict[str, object]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def lose_checkpoints(bench: Bench) -> None:
    """`rm -rf RUN/checkpoints`."""
    for key in [key for key in bench.store.objects if key.startswith("checkpoints/")]:
        del bench.store.objects[key]


def steps(store: FakeStore) -> list[int]:
    return [trace.step for trace in find_traces(store, Lineage(store), incarnation="000099-me")]


def test_a_deleted_folder_of_checkpoints_is_no_new_run() -> None:
    bench = Bench()
    save(bench, 1)
    save(bench, 2)
    lose_checkpoints(bench)
    for _ in range(3):
        with pytest.raises(NoValidCheckpointError) as caught:
            restored_step(bench)
        assert caught.value.exit_code == 74
        assert "checkpoint.on_invalid=fresh" in str(caught.value)
        assert not any(key.startswith("checkpoints/") for key in bench.store.objects)
    assert restored_step(bench, on_invalid="fresh") is None
    # Killed before its first commit, it begins again without being told.
    assert restored_step(bench) is None
    save(bench, 1)
    assert restored_step(bench) == 1


def test_an_older_snapshot_in_memory_is_no_way_around_lost_checkpoints() -> None:
    """As where the disk with the checkpoints is mounted late, and one host has kept its memory of an earlier step."""
    bench = Bench()
    save(bench, 2)
    save(bench, 4)
    bench.store.objects["events/000001-aa-r00000.jsonl"] = b'{"event": "checkpoint_saved", "step": 4, "rank": 0}\n'
    lose_checkpoints(bench)

    def candidate(step: int, on_invalid: Literal["stop", "fresh"] = "stop") -> bytes:
        search = CandidateSearch(
            bench.store,
            on_invalid=on_invalid,
            incarnation="000099-me",
            record=bench.events.append,
            clock=lambda: 0.0,
            job=JobMemory(),
            signing=None,
        )
        return search.next_candidate(memory=(True, step))

    with pytest.raises(NoValidCheckpointError):
        candidate(3)
    assert candidate(4) == candidate(5) == candidate(3, on_invalid="fresh") == IN_MEMORY


@pytest.mark.parametrize(
    "objects",
    [
        {"events/000001-aa-r00000.jsonl": log(RESUMED_0, STEP, SAVED_40, STEP)},
        {"events/000001-aa-k00000.jsonl": log(SAVED_40)},
        {"events/000002-bb-r00000.jsonl": log(RESUMED_40, STEP)},
        {"events/000002-bb-r00000.jsonl": log(STEP), "events/000001-aa-r00000.jsonl": log(RESUMED_0, SAVED_40)},
        {"events/000001-aa-r00000.part-0.jsonl": log(RESUMED_0), "events/000001-aa-r00000.part-1.jsonl": log(SAVED_40)},
        {"events/000001-aa-r00000.jsonl": log(RESUMED_0) + log(STEP) * 20_000 + log(SAVED_40)},
        {"lineage/000000002-000002-bb.json": log({"generation": 2, "incarnation": "000002-bb", "step": 40, "parent": "a"})},
        {"launch/hosts/host-1.json": log({"ended": 1, "committed_step": 40, "end": None})},
        {"launch/hosts/host-1.json": log({"ended": 0, "committed_step": 0, "end": {"generation": 1, "committed_step": 40}}),
         "launch/hosts/host-2.json": b"{", "launch/hosts/host-3.json": log({"ended": 1, "committed_step": 30}),
         "launch/hosts/host-4.json": b"[]", "launch/hosts/host-5.json": log({"ended": "1", "committed_step": 1e9})},
        {RUN_COMMITTED_KEY: b'{"checkpoint": "step-000000040-2"}'},
        {RUN_COMMITTED_KEY: b'{"step": 40}'},
    ],
)  # fmt: skip
def test_whatever_knows_of_a_commit_stops_a_start_again_and_again(objects: dict[str, bytes]) -> None:
    bench = Bench(FakeStore(dict(objects)))
    assert steps(bench.store) == [40]
    for number in range(30):
        with pytest.raises(NoValidCheckpointError):
            restored_step(bench)
        # A start that is refused has events, too, and they tell nothing.
        bench.store.objects[f"events/{number + 3:06d}-cc-r00000.jsonl"] = log({"event": "failure", "exit_code": 74})
    assert restored_step(bench, on_invalid="fresh") is None


@pytest.mark.parametrize(
    "objects",
    [
        {},
        {"events/000001-aa-r00000.jsonl": log({"event": "start"}, RESUMED_0, STEP)},
        {"events/000001-aa-r00000.jsonl": b'\xff{"event": "checkpoint_saved"\n[]\n{"event": "resume", "step": "x"}\n'},
        {"events/000001-aa-r00001.jsonl": log(STEP), "events/notes.txt": log(SAVED_40)},
        # Begun anew by a person, and nothing was committed since.
        {"events/000001-aa-r00000.jsonl": log(RESUMED_0, SAVED_40), "events/000002-bb-r00000.jsonl": log(RESUMED_0, STEP)},
        {"lineage/000000001-000001-aa.json": log({"generation": 1, "incarnation": "000001-aa", "step": 0, "parent": ""}),
         "launch/hosts/host-1.json": log({"ended": 1, "committed_step": 0, "end": {"generation": 1, "committed_step": 0}})},
        {"lineage/000000002-000002-bb.json": log({"generation": 2, "incarnation": "000002-bb", "step": 0, "parent": ""}),
         "launch/hosts/host-1.json": log({"ended": 1, "committed_step": 40, "end": {"generation": 1, "committed_step": 40}})},
    ],
)  # fmt: skip
def test_a_run_that_never_committed_begins(objects: dict[str, bytes]) -> None:
    bench = Bench(FakeStore(dict(objects)))
    assert steps(bench.store) == []
    assert restored_step(bench) is None


def test_looking_takes_few_reads_however_long_the_run_was() -> None:
    store = FakeStore()
    for number in range(300):
        for part in range(40):
            store.objects[f"events/{number:06d}-aa-r00000.part-{part:05d}.jsonl"] = log(STEP)
    did: list[str] = []
    store.before = lambda operation, key: did.append(operation)
    assert steps(store) == []
    assert did.count("list") <= 3
    assert did.count("read") <= 64


def test_snapshots_of_incarnations_that_the_folder_forgot() -> None:
    held = [InMemory("000001-aa", 100, "x"), InMemory("000001-aa", 120, "x"), InMemory("000002-bb", 130, "y")]
    assert [(trace.step, "x" in trace.where) for trace in of_memory(held, known=["000002-bb"])] == [(120, True)]
    assert of_memory(held, known=["000001-aa", "000002-bb"]) == []


@pytest.mark.parametrize("step", [1, 40])
def test_what_the_job_remembers_stops_a_start(step: int) -> None:
    bench = Bench()
    checkpointer = bench.checkpointer(job=JobMemory(("000001-aa",), step))
    with pytest.raises(NoValidCheckpointError):
        checkpointer.restore(tensors={}, reset=lambda: None)


@pytest.mark.parametrize(
    ("data", "step"),
    [(b"", 0), (b"[]", 0), (b"{}", 0), (b'{"step": true}', 0), (b"[" * 100_000, 0), (b'{"checkpoint": "step-000000012"}', 12)],
)
def test_marks_that_say_nothing(data: bytes, step: int) -> None:
    assert step_of_mark(data) == step


def test_a_log_that_is_cut_anywhere_tells_no_wrong_step() -> None:
    whole = log(RESUMED_0, STEP, SAVED_40)
    for start in range(0, len(whole), 3):
        for end in range(start, len(whole) + 1, 3):
            assert {row.step for row in read_log([whole[start:end]])} <= {0, 40}


def identity(folder: Path | None, *, rank: int = 0) -> Identity:
    launcher = Launcher(1, 1, False, str(folder)) if folder is not None else None
    return Identity(rank, 2, rank, 2, "here", launched=True, launcher=launcher)


def test_torchrun_remembers_what_its_workers_committed() -> None:
    store = dist.HashStore()
    first = JobNotes(store, identity(None))
    assert first.read() == JobMemory()
    first.begin("000001-aa", step=0, tier="none")
    first.committed(40)
    first.committed(20)
    second = JobNotes(store, identity(None))
    assert second.read() == JobMemory(("000001-aa",), 40)
    second.begin("000002-bb", step=30, tier="storage")
    lost = FailureCounts().failed(lost=True)
    assert JobNotes(store, identity(None)).read() == JobMemory(("000001-aa", "000002-bb"), 40, failures=lost)
    second.learned(7)
    third = JobNotes(store, identity(None))
    third.begin("000003-cc", step=30, tier="memory")
    assert (third.memory.snapshot_interval, third.read().step) == (7, 40)
    assert (third.memory.failures.losses, third.memory.failures.kept) == (1, 1)
    third.trained(FailureCounts(1, 1, 60.0))
    assert third.read().failures.trained_s == 60.0
    # Told to start over, the run forgets.
    JobNotes(store, identity(None)).begin("000004-dd", step=0, tier="none")
    assert JobNotes(store, identity(None)).read() == JobMemory(("000004-dd",), 0)


def test_under_a_launcher_an_orderly_end_is_no_failure(tmp_path: Path) -> None:
    (tmp_path / "generation-1").mkdir()
    orderly = identity(tmp_path / "generation-1")
    assert orderly.launcher is not None
    failed = replace(orderly, launcher=replace(orderly.launcher, recovery=RecoveryPlan("regroup", ("b",), "b is lost", 1.0)))
    notes = JobNotes(dist.HashStore(), orderly)
    notes.begin("000001-aa", step=0, tier="none")
    notes.begin("000002-bb", step=30, tier="storage")
    assert notes.memory.failures == FailureCounts()
    after = JobNotes(dist.HashStore(), failed)
    after.begin("000003-cc", step=30, tier="storage")
    assert after.memory.failures == FailureCounts().failed(lost=True)


def test_the_notes_of_the_host_that_took_part_longest_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Rank 0 is on a host that has just come, and a third one was away while the run began anew."""
    longest = JobMemory(("000007-aa", "000009-cc", "000010-dd"), 40, 7, 35)
    others = [JobMemory(), longest, JobMemory(("000008-bb",) * 9, 90, 5, 90)]
    monkeypatch.setattr("elastictrain.train.job_notes.gather_records", lambda own, *, group: [own, *others])
    notes = JobNotes(dist.HashStore(), identity(tmp_path / "generation-11"))
    assert notes.evaluated is None
    assert notes.gather(None) == longest
    assert notes.evaluated == 35
    (tmp_path / "generation-11").mkdir()
    notes.begin("000011-ee", step=38, tier="storage")
    notes.evaluation_done(38)
    assert notes.read() == JobMemory((*longest.incarnations, "000011-ee"), 40, 7, 38)
    assert notes.memory.snapshot_interval == 7
    # A job that begins knows nothing of evaluations before it, which may all have been done.
    (tmp_path / "job" / "generation-1").mkdir(parents=True)
    first = JobNotes(dist.HashStore(), identity(tmp_path / "job" / "generation-1"))
    first.begin("000012-ee", step=50, tier="storage")
    assert first.read().evaluated == 50
    notes.begin("000012-ff", step=0, tier="none")
    assert notes.read() == JobMemory(("000012-ff",), 0, 0)


def test_a_launcher_remembers_across_the_stores_of_its_torchruns(tmp_path: Path) -> None:
    first = JobNotes(dist.HashStore(), identity(tmp_path))
    first.begin("000001-aa", step=0, tier="none")
    first.committed(40)
    assert JobNotes(dist.HashStore(), identity(tmp_path)).read() == JobMemory(("000001-aa",), 40)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"incarnations": 3, "step": "x"}', '{"incarnations": [1], "step": -4}'])
def test_notes_that_say_nothing(text: str, tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text(text)
    assert JobNotes(dist.HashStore(), identity(tmp_path)).read() == JobMemory()


def merged(store: FakeStore) -> list[str]:
    """Merge all events of a store; the names of what holds them."""
    merge_finished(store, newest=1000, now_s=FINISHED_S, goes_on=lambda: True)
    return [key for key in store.objects if key.startswith("events/")]


def by(name: str, *rows: dict[str, object], rank: int = 0) -> bytes:
    return log(*({"incarnation": name, "rank": rank, **row} for row in rows))


@pytest.mark.parametrize(
    ("logs", "found"),
    [
        ({"000001-aa-r00000": by("000001-aa", RESUMED_0, SAVED_40), "000002-bb-r00000": by("000002-bb", STEP)}, [40]),
        ({"000001-aa-k00000": by("000001-aa", SAVED_40), "000002-bb-k00000": by("000002-bb")}, [40]),
        ({"000001-aa-r00000": by("000001-aa", RESUMED_40), "000002-bb-r00000": by("000002-bb", RESUMED_0)}, []),
        ({"000001-aa-r00000": by("000001-aa", RESUMED_0), "000002-bb-r00000": by("000002-bb", RESUMED_40)}, [40]),
        # Of another rank: it tells nothing of the group.
        ({"000001-aa-r00001": by("000001-aa", SAVED_40, rank=1), "000002-bb-r00001": by("000002-bb", STEP, rank=1)}, []),
    ],
)  # fmt: skip
def test_merged_events_know_of_commits_as_journals_do(logs: dict[str, bytes], found: list[int]) -> None:
    store = FakeStore({f"events/{name}.jsonl": data for name, data in logs.items()})
    assert steps(store) == found
    assert len(merged(store)) == 1
    assert steps(store) == found


def test_a_commit_long_ago_is_found_in_merged_events() -> None:
    store = FakeStore({"events/000001-aa-r00000.jsonl": by("000001-aa", RESUMED_0, SAVED_40)})
    for number in range(2, 600):
        store.objects[f"events/{number:06d}-bb-r00000.jsonl"] = by(f"{number:06d}-bb", STEP)
    assert len(merged(store)) < 30
    did: list[str] = []
    store.before = lambda operation, key: did.append(operation)
    assert steps(store) == [40]
    assert did.count("read") <= 16
