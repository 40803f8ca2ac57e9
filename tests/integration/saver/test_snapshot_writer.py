import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from elastictrain.checkpoint import writer
from elastictrain.checkpoint.folders import ROOT, Listing
from elastictrain.checkpoint.manifest import Manifest, digest_of
from elastictrain.checkpoint.manifest_format import parse_manifest
from elastictrain.checkpoint.memory.records import load_digests
from elastictrain.checkpoint.saver import commit_protocol
from elastictrain.checkpoint.saver import snapshot_writer as module
from elastictrain.checkpoint.saver.commit_protocol import CommitProtocol, Deadline, RefusedSave
from elastictrain.checkpoint.saver.messages import Saved, SaveFailure, SlotsReleased
from elastictrain.checkpoint.saver.pending_snapshots import Cause, LeasedSnapshot, SaveJob, lease
from elastictrain.checkpoint.saver.process import SaverConfig, load_config, store_config
from elastictrain.checkpoint.saver.snapshot_writer import SaveOutcome, SnapshotWriter
from elastictrain.checkpoint.signing import LEAST_BYTES, SigningKey
from elastictrain.checkpoint.verified_read import CheckpointFolder, read_chunks, read_parts, verify_headers
from elastictrain.errors import CheckpointError, InvalidCheckpointError, StorageError, UntrustedCheckpointError
from elastictrain.events import CheckpointSaved, CheckpointsPruned, Event
from elastictrain.storage.opening import open_store
from elastictrain.storage.store import Store
from tests.unit.checkpoint.memory.madeslots import RUN, facts_of, flip, put

FACTS = SaverConfig(
    "unused",
    RUN,
    keep_last=2,
    keep_every=0,
    save_timeout_s=5.0,
    flush_s=1.0,
    grace_s=1.0,
    versions={"x": "1"},
    manifest_bytes=0,
)


@dataclass
class Heard:
    """What a saver told, and a wait for it."""

    events: list[Event] = field(default_factory=list)
    written: list[int] = field(default_factory=list)
    saved: list[tuple[int, str]] = field(default_factory=list)
    failed: list[tuple[int, str]] = field(default_factory=list)

    def report(self, job: SaveJob, outcome: SaveOutcome, cause: Cause) -> None:
        match outcome:
            case SlotsReleased():
                self.written.append(job.step)
            case Saved():
                self.saved.append((outcome.step, outcome.checkpoint))
            case SaveFailure():
                self.failed.append((outcome.step, outcome.error))


@contextmanager
def saving(
    store: Store, *, facts: SaverConfig = FACTS, signing: SigningKey | None = None
) -> Iterator[tuple[SnapshotWriter, Heard]]:
    heard = Heard()
    saver = SnapshotWriter(
        store, facts, record=lambda _, event: heard.events.append(event), report=heard.report, signing=signing
    )
    yield saver, heard
    saver.close()
    assert not saver.busy


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    (tmp_path / "memory").mkdir()
    return tmp_path / "memory"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    made = open_store(str(tmp_path / "run"))
    made.write("config.yaml", b"")
    return made


def leased(memory: Path, name: str) -> LeasedSnapshot:
    one = lease(str(memory), name)
    assert one is not None
    return replace(one, digests=load_digests(one.slot.path, one.facts))


def job_of(
    memory: Path,
    step: int,
    *,
    ranks: tuple[int, ...] = (0,),
    world_size: int = 1,
    index: int = 0,
    limit_s: float = FACTS.save_timeout_s,
) -> SaveJob:
    names = [put(memory, facts_of(step, rank=rank, world_size=world_size, reason="interval"), index=index) for rank in ranks]
    return SaveJob(tuple(leased(memory, name) for name in names), Deadline(limit_s))


def manifest_of(store: Store, step: int) -> Manifest:
    manifest = parse_manifest(store.read(f"{ROOT}/step-{step:09d}/manifest.json"), where="here")
    assert manifest.parts
    manifest = read_parts(CheckpointFolder(store, f"{ROOT}/step-{step:09d}/"), manifest)
    for file in manifest.files:
        assert digest_of(store.read(f"{ROOT}/step-{step:09d}/{file.name}")) == file.digest
    return manifest


def test_a_snapshot_becomes_a_checkpoint_that_verifies(memory: Path, store: Store) -> None:
    with saving(store) as (saver, heard):
        saver.begin(job_of(memory, 5, ranks=(0, 1), world_size=2))
    assert (heard.saved, heard.failed, heard.written) == ([(5, "step-000000005")], [], [5])
    manifest = manifest_of(store, 5)
    assert (manifest.step, manifest.world_size, manifest.state, manifest.versions) == (5, 2, {"step": 5}, {"x": "1"})
    assert manifest.tensors["w"].shape == (300, 10)
    (event,) = heard.events
    assert isinstance(event, CheckpointSaved)
    assert (event.reason, event.bytes) == ("interval", manifest.size_bytes)
    assert store.stat(f"{ROOT}/committed.json")


def test_older_checkpoints_are_pruned(memory: Path, store: Store) -> None:
    with saving(store) as (saver, heard):
        for index, step in enumerate((5, 6, 7, 8)):
            saver.begin(job_of(memory, step, index=index))
    assert [step for step, _ in heard.saved] == [5, 6, 7, 8]
    pruned = [event.checkpoints for event in heard.events if isinstance(event, CheckpointsPruned)]
    assert pruned == [("step-000000005",), ("step-000000006",)]
    assert {manifest_of(store, step).step for step in (7, 8)} == {7, 8}


def test_memory_that_has_changed_since_it_was_digested_is_no_checkpoint(memory: Path, store: Store) -> None:
    job = job_of(memory, 5)
    flip(memory, "own-r00000-s0")
    with saving(store) as (saver, heard):
        saver.begin(job)
    assert heard.saved == []
    ((step, error),) = heard.failed
    assert step == 5
    assert "own-r00000-s0" in error
    assert [info.key for info in store.list(ROOT)] == [], "nothing is left of it"


def test_a_saver_that_was_killed_after_the_commit_is_not_repeated(memory: Path, store: Store) -> None:
    with saving(store) as (saver, _):
        saver.begin(job_of(memory, 5))
    store.delete(f"{ROOT}/committed.json")
    before = {info.key: info for info in store.list(ROOT)}
    with saving(store) as (saver, heard):
        saver.begin(job_of(memory, 5))
    assert heard.saved == [(5, "step-000000005")]
    after = {info.key: info for info in store.list(ROOT)}
    # What its predecessor did not come to is done.
    assert after.keys() - before.keys() == {f"{ROOT}/committed.json"}
    assert {key: after[key] for key in before} == before


def test_a_save_that_fails_is_told_and_the_next_one_succeeds(
    memory: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise StorageError("EIO")

    with saving(store) as (saver, heard):
        monkeypatch.setattr(writer, "check_files", broken)
        saver.begin(job_of(memory, 5))
        while not heard.failed:
            threading.Event().wait(0.01)
        monkeypatch.undo()
        saver.begin(job_of(memory, 5))
    assert heard.failed == [(5, "EIO")]
    assert heard.saved == [(5, "step-000000005")]


def test_a_bug_is_told_by_its_name(
    memory: Path, store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(writer, "check_files", lambda *_, **__: 1 // 0)
    with saving(store) as (saver, heard):
        saver.begin(job_of(memory, 5))
    ((_, error),) = heard.failed
    assert "ZeroDivisionError" in error
    assert "step 5" in caplog.text


def test_a_run_that_was_deleted_is_not_made_again(memory: Path, tmp_path: Path) -> None:
    with saving(open_store(str(tmp_path / "gone"))) as (saver, heard):
        saver.begin(job_of(memory, 5))
    ((step, error),) = heard.failed
    assert step == 5
    assert f"{tmp_path}/gone" in error
    assert not (tmp_path / "gone").exists()


def test_two_hosts_make_one_checkpoint(tmp_path: Path, store: Store) -> None:
    folders = [tmp_path / "here", tmp_path / "there"]
    for folder in folders:
        folder.mkdir()
    with saving(store) as (first, heard), saving(open_store(str(tmp_path / "run"))) as (second, other):
        second.begin(job_of(folders[1], 5, ranks=(1,), world_size=2))
        first.begin(job_of(folders[0], 5, world_size=2))
    assert heard.saved == [(5, "step-000000005")]
    assert (other.saved, other.failed, other.written) == ([], [], [5])
    assert manifest_of(store, 5).tensors["w"].shape == (300, 10)
    assert list(store.list(f"{ROOT}/pending")) == []


def test_a_host_that_cannot_write_is_named(tmp_path: Path, store: Store) -> None:
    folders = [tmp_path / "here", tmp_path / "there"]
    for folder in folders:
        folder.mkdir()
    job = job_of(folders[1], 5, ranks=(1,), world_size=2)
    flip(folders[1], "own-r00001-s0")
    with saving(store) as (first, heard), saving(open_store(str(tmp_path / "run"))) as (second, other):
        second.begin(job)
        first.begin(job_of(folders[0], 5, world_size=2))
    assert len(other.failed) == 1
    ((_, error),) = heard.failed
    assert error.startswith("the host of rank 1 could not save: ")
    assert "own-r00001-s0" in error


def test_a_host_that_says_nothing_is_named(memory: Path, store: Store) -> None:
    with saving(store) as (saver, heard):
        saver.begin(job_of(memory, 5, world_size=2, limit_s=0.3))
    assert [step for step, _ in heard.failed] == [5]
    assert "ranks 1 " in heard.failed[0][1]
    assert not [info for info in store.list(ROOT) if info.key.endswith(".safetensors")]
    with saving(store) as (saver, heard):
        saver.begin(job_of(memory, 6, ranks=(1,), world_size=2, limit_s=0.3))
    assert [step for step, _ in heard.failed] == [6]
    assert "rank 0 " in heard.failed[0][1]


def two_hosts(tmp_path: Path) -> list[Path]:
    folders = [tmp_path / "here", tmp_path / "there"]
    for folder in folders:
        folder.mkdir()
    return folders


def pending(store: Store) -> list[str]:
    return [info.key.rpartition("/")[2] for info in store.list(f"{ROOT}/pending")]


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(0.005)


def test_a_failed_attempt_of_several_hosts_is_tried_again(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = two_hosts(tmp_path)

    def broken(*_: object, **__: object) -> None:
        raise StorageError("EIO")

    with saving(store) as (first, heard), saving(open_store(str(tmp_path / "run"))) as (second, other):
        monkeypatch.setattr(writer, "check_files", broken)
        second.begin(job_of(there, 5, ranks=(1,), world_size=2))
        first.begin(job_of(here, 5, world_size=2))
        until(lambda: heard.failed and not second.busy)
        assert pending(store) == []
        monkeypatch.undo()
        second.begin(job_of(there, 5, ranks=(1,), world_size=2))
        first.begin(job_of(here, 5, world_size=2))
    assert (heard.failed, other.failed) == ([(5, "EIO")], [])
    assert heard.saved == [(5, "step-000000005")]
    assert manifest_of(store, 5).world_size == 2


def test_a_failed_attempt_that_could_not_be_cleared_does_not_spoil_the_next_one(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Storage was away."""
    here, there = two_hosts(tmp_path)
    write = module.write_snapshots

    def broken(store: Store, job: SaveJob, folder: str, *, sha256: bool) -> object:
        if not job.leader:
            raise StorageError("ENOSPC")
        return write(store, job, folder, sha256=sha256)

    with saving(store) as (first, heard), saving(open_store(str(tmp_path / "run"))) as (second, other):
        with monkeypatch.context() as patched:
            patched.setattr(module, "write_snapshots", broken)
            patched.setattr(CommitProtocol, "clear", lambda _: None)
            second.begin(job_of(there, 5, ranks=(1,), world_size=2))
            first.begin(job_of(here, 5, world_size=2))
            until(lambda: heard.failed and not second.busy)
        second.begin(job_of(there, 5, ranks=(1,), world_size=2))
        first.begin(job_of(here, 5, world_size=2))
    assert [step for step, _ in heard.failed] == [5]
    assert "rank 1 " in heard.failed[0][1]
    assert "ENOSPC" in heard.failed[0][1]
    assert (heard.saved, other.written) == ([(5, "step-000000005")], [5])


def test_a_host_does_not_wait_for_a_step_that_the_first_one_is_past(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = two_hosts(tmp_path)

    def away(_: Store) -> Listing:
        raise StorageError("503")

    began = time.monotonic()
    with saving(store) as (first, heard), saving(open_store(str(tmp_path / "run"))) as (second, other):
        with monkeypatch.context() as patched:
            patched.setattr(module, "list_checkpoints", away)
            first.begin(job_of(here, 5, world_size=2, limit_s=60.0))
            until(lambda: heard.failed)
        second.begin(job_of(there, 5, ranks=(1,), world_size=2, limit_s=60.0))
        first.begin(job_of(here, 6, world_size=2, index=1, limit_s=60.0))
        second.begin(job_of(there, 6, ranks=(1,), world_size=2, index=1, limit_s=60.0))
    assert heard.saved == [(6, "step-000000006")]
    assert [step for step, _ in other.failed] == [5]
    assert "rank 0 " in other.failed[0][1]
    assert time.monotonic() - began < 10


def test_a_host_that_fails_before_it_writes_says_so(memory: Path, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    CommitProtocol(store, "000001-aa", 5, first_rank=0).prepare(lambda: "step-000000005")

    def away(_: Store) -> Listing:
        raise StorageError("503")

    monkeypatch.setattr(module, "list_checkpoints", away)
    with saving(store) as (saver, heard):
        saver.begin(job_of(memory, 5, ranks=(1,), world_size=2))
    assert heard.failed == [(5, "503")]
    assert any(name.startswith("failed-00001-") for name in pending(store))


def test_who_has_done_its_part_in_an_attempt_does_not_take_it_back(memory: Path, store: Store) -> None:
    CommitProtocol(store, "000001-aa", 5, first_rank=0).prepare(lambda: "step-000000005")
    with saving(store) as (saver, heard):
        saver.begin(job_of(memory, 5, ranks=(1,), world_size=2))
        saver.begin(RefusedSave("000001-aa", 5, 1, "its slot cannot be read", Deadline(0.3)))
    assert heard.written == [5]
    assert sorted(name.rpartition("-")[0] for name in pending(store)) == ["", "host-00001"]


def test_a_leader_that_was_killed_after_its_commit_leaves_no_word_in_the_store(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = two_hosts(tmp_path)
    with saving(store) as (first, heard), saving(open_store(str(tmp_path / "run"))) as (second, _):
        with monkeypatch.context() as patched:
            patched.setattr(CommitProtocol, "clear", lambda _: None)
            second.begin(job_of(there, 5, ranks=(1,), world_size=2))
            first.begin(job_of(here, 5, world_size=2))
            until(lambda: heard.saved and not first.busy)
        assert pending(store)
        first.begin(job_of(here, 5, world_size=2))
    assert len(heard.saved) == 2
    assert pending(store) == []


def test_a_late_failure_leaves_what_was_committed_in_its_folder_meanwhile(memory: Path, store: Store) -> None:
    """The workers waited no longer for a host that is gone, and have saved the same step by themselves."""
    with saving(store) as (saver, heard):
        saver.begin(job_of(memory, 5, world_size=2, limit_s=1.0))
        until(lambda: heard.written)
        names = ("000001-aa-r00000-000.safetensors", "000001-aa-r00001-000.safetensors")
        for name in names:
            store.write(f"{ROOT}/step-000000005/{name}", b"good")
        store.write(f"{ROOT}/step-000000005/manifest.json", json.dumps(names).encode())
    assert len(heard.failed) == 1
    assert len(list(store.list(f"{ROOT}/step-000000005"))) >= 3
    assert store.read(f"{ROOT}/step-000000005/000001-aa-r00000-000.safetensors") == b"good"


def test_what_is_said_late_of_a_failed_attempt_is_not_heard(store: Store) -> None:
    leader, other = (CommitProtocol(store, "000001-aa", 5, first_rank=rank) for rank in range(2))
    leader.prepare(lambda: "step-000000005")
    assert other.wait_for_prepared(Deadline(1)) == "step-000000005"
    leader.clear()
    again = CommitProtocol(store, "000001-aa", 5, first_rank=0)
    again.prepare(lambda: "step-000000005-2")
    other.report_failure("too slow")
    other.acknowledge([])
    with pytest.raises(CheckpointError, match="ranks 0, 1"):
        again.wait_for_acknowledgements(2, own=[], deadline=Deadline(0.2), wrote_s=0.0)


def test_a_leader_that_was_killed_goes_on_with_what_others_have_written(tmp_path: Path, store: Store) -> None:
    here, there = two_hosts(tmp_path)
    # Killed when it had begun.
    CommitProtocol(store, "000001-aa", 5, first_rank=0).prepare(lambda: "step-000000005")
    with saving(open_store(str(tmp_path / "run"))) as (second, other):
        second.begin(job_of(there, 5, ranks=(1,), world_size=2))
    assert other.written == [5]
    with saving(store) as (first, heard):
        first.begin(job_of(here, 5, world_size=2))
    assert (heard.saved, heard.failed) == ([(5, "step-000000005")], [])
    assert manifest_of(store, 5).world_size == 2


def test_a_host_that_fails_leaves_the_files_of_others(tmp_path: Path, store: Store) -> None:
    # The leader may have heard that they are written: what a host says can arrive although saying it has failed.
    _, there = two_hosts(tmp_path)
    CommitProtocol(store, "000001-aa", 5, first_rank=0).prepare(lambda: "step-000000005")
    store.write(f"{ROOT}/step-000000005/000001-aa-r00000-0.safetensors", b"x")
    job = job_of(there, 5, ranks=(1,), world_size=2)
    flip(there, "own-r00001-s0")
    with saving(open_store(str(tmp_path / "run"))) as (second, other):
        second.begin(job)
    assert len(other.failed) == 1
    assert store.stat(f"{ROOT}/step-000000005/000001-aa-r00000-0.safetensors")
    assert sorted(name.rpartition("-")[0] for name in pending(store)) == ["", "failed-00001"]


def test_a_leader_that_begins_with_nothing_is_not_waited_for(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have failed before it could say so. Meanwhile the snapshot here keeps its slot, and no other step is saved."""
    monkeypatch.setattr(commit_protocol, "_BEGINS_WITHIN_S", 0.3)
    older, other = (CommitProtocol(store, "000001-aa", step, first_rank=rank) for step, rank in ((4, 0), (5, 1)))
    older.prepare(lambda: "step-000000004")
    with pytest.raises(CheckpointError, match="did not begin to save step 5 within 1 s"):
        other.wait_for_prepared(Deadline(1.0))
    older.clear()
    began_s = time.monotonic()
    with pytest.raises(CheckpointError, match="saves no other one"):
        other.wait_for_prepared(Deadline(60.0))
    assert time.monotonic() - began_s < 20.0


def test_what_hosts_say_may_be_garbled(store: Store) -> None:
    leader, other = (CommitProtocol(store, "000001-aa", 5, first_rank=rank) for rank in range(2))
    store.write(f"{ROOT}/pending/000001-aa-000000005/begin.json", b"{")
    with pytest.raises(Exception, match="is garbled"):
        other.wait_for_prepared(Deadline(1))
    assert leader.prepare(lambda: "step-000000005") == "step-000000005"
    other.wait_for_prepared(Deadline(1))
    other.acknowledge([])
    (key,) = [info.key for info in store.list(f"{ROOT}/pending") if "host-" in info.key]
    store.write(key, b"[1, 2]")
    with pytest.raises(InvalidCheckpointError, match=r"host-00001-\w+\.json"):
        leader.wait_for_acknowledgements(2, own=[], deadline=Deadline(1), wrote_s=0.0)


def test_a_save_clears_what_older_ones_said_and_nothing_newer(store: Store) -> None:
    for name in (
        "000001-aa-000000009",
        "000002-bb-000000003",
        "000002-bb-000000005",
        "000002-bb-000000006",
        "000003-cc-000000001",
    ):
        store.write(f"{ROOT}/pending/{name}/begin.json", b"{}")
    CommitProtocol(store, "000002-bb", 5, first_rank=0).clear()
    left = sorted(info.key.split("/")[2] for info in store.list(f"{ROOT}/pending"))
    assert left == ["000002-bb-000000006", "000003-cc-000000001"]


def test_a_configuration_is_stored_and_loaded(tmp_path: Path) -> None:
    store_config(str(tmp_path), FACTS)
    assert load_config(str(tmp_path)) == FACTS
    for garbled in (b"", b"[]", b"{}", b"7", b"[" * 5000):
        (tmp_path / "run.json").write_bytes(garbled)
        with pytest.raises(InvalidCheckpointError, match=r"run\.json"):
            load_config(str(tmp_path))


KEY = SigningKey("A_KEY", b"k" * LEAST_BYTES)


def test_two_hosts_sign_one_checkpoint(tmp_path: Path, store: Store) -> None:
    here, there = two_hosts(tmp_path)
    with (
        saving(store, signing=KEY) as (first, heard),
        saving(open_store(str(tmp_path / "run")), signing=KEY) as (second, other),
    ):
        first.begin(job_of(here, 5, world_size=2))
        second.begin(job_of(there, 5, ranks=(1,), world_size=2))
    assert (heard.failed, other.failed) == ([], [])
    raw = store.read(f"{ROOT}/step-000000005/manifest.json")
    manifest = parse_manifest(raw, where="here", key=KEY)
    folder = CheckpointFolder(store, f"{ROOT}/step-000000005/")
    assert [len(part.sha256) for part in manifest.parts] == [64, 64]
    manifest = read_parts(folder, manifest)
    verify_headers(folder, manifest, files=manifest.files)
    chunks = [chunk for tensor in manifest.tensors.values() for chunk in tensor.chunks]
    assert {len(chunk.sha256) for chunk in chunks} == {64}
    assert read_chunks(folder, chunks, take=lambda _, __: None) > 0
    with pytest.raises(UntrustedCheckpointError):
        parse_manifest(raw, where="here", key=SigningKey("B_KEY", b"b" * LEAST_BYTES))


@pytest.mark.parametrize("signing", [None, SigningKey("B_KEY", b"b" * LEAST_BYTES)], ids=["unsigned", "another key"])
def test_a_leader_signs_only_what_hosts_have_signed(tmp_path: Path, store: Store, signing: SigningKey | None) -> None:
    here, there = two_hosts(tmp_path)
    with (
        saving(store, signing=KEY) as (first, heard),
        saving(open_store(str(tmp_path / "run")), signing=signing) as (second, _),
    ):
        first.begin(job_of(here, 5, world_size=2))
        second.begin(job_of(there, 5, ranks=(1,), world_size=2))
    assert heard.saved == []
    assert [step for step, _ in heard.failed] == [5]


def test_what_a_host_signed_for_another_save_is_not_believed(store: Store) -> None:
    old = CommitProtocol(store, "000001-aa", 4, first_rank=1, signing=KEY)
    CommitProtocol(store, "000001-aa", 4, first_rank=0).prepare(lambda: "step-000000004")
    old.wait_for_prepared(Deadline(1))
    old.acknowledge([])
    (said,) = [info.key for info in store.list(f"{ROOT}/pending") if "host-" in info.key]
    leader = CommitProtocol(store, "000001-aa", 5, first_rank=0, signing=KEY)
    leader.prepare(lambda: "step-000000005")
    store.write(f"{ROOT}/pending/000001-aa-000000005/host-00001-{leader.attempt}.json", store.read(said))
    with pytest.raises(InvalidCheckpointError, match="A_KEY"):
        leader.wait_for_acknowledgements(2, own=[], deadline=Deadline(1), wrote_s=0.0)
