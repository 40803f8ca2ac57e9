import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from elastictrain.checkpoint import run_folder
from elastictrain.checkpoint.folders import Listing
from elastictrain.checkpoint.memory.slot import Slot
from elastictrain.checkpoint.saver import commit_protocol, final_save
from elastictrain.checkpoint.saver import snapshot_writer as saving
from elastictrain.checkpoint.saver.commit_protocol import PENDING, CommitProtocol
from elastictrain.checkpoint.saver.pending_snapshots import Cause, cause_of
from elastictrain.errors import (
    AccessDeniedError,
    CheckpointError,
    InvalidCheckpointError,
    ObjectNotFoundError,
    StorageError,
    StorageFullError,
    TransientStorageError,
)
from elastictrain.storage.opening import open_store
from elastictrain.storage.store import Store
from tests.unit.checkpoint.memory.madeslots import facts_of, flip, layout_of, put
from tests.unit.checkpoint.saver.running import FACTS, Worker, checkpoints, events, keeping, until


def test_when_all_are_gone_the_newest_whole_step_is_flushed(memory: Path, run: Path) -> None:
    with keeping(memory, run):
        worker = Worker(memory)
        worker.hear("welcome")
        put(memory, facts_of(5))
        put(memory, facts_of(6), index=1)
        worker.socket.close()
    assert checkpoints(run) == [6]
    (saved,) = events(run, "checkpoint_saved")
    assert (saved["step"], saved["reason"]) == (6, "flush")


def test_what_is_damaged_is_not_flushed_but_the_step_before_it(memory: Path, run: Path) -> None:
    with keeping(memory, run):
        worker = Worker(memory)
        worker.hear("welcome")
        put(memory, facts_of(5))
        flip(memory, put(memory, facts_of(6), index=1))
        worker.socket.close()
    assert checkpoints(run) == [5]


def test_a_step_of_the_incarnation_before_is_flushed(memory: Path, run: Path) -> None:
    put(memory, facts_of(5))
    with keeping(memory, run):
        worker = Worker(memory, incarnation="000002-bb")
        worker.hear("welcome")
        worker.socket.close()
    assert checkpoints(run) == [5]


def test_a_slot_that_its_dying_worker_still_holds_is_waited_for(memory: Path, run: Path) -> None:
    put(memory, facts_of(5))
    slot = Slot.make(str(memory / "own-r00000-s0"), size_bytes=layout_of().size_bytes)
    assert slot.lock(shared=False)
    with keeping(memory, run):
        worker = Worker(memory)
        worker.hear("welcome")
        worker.socket.close()
        time.sleep(0.8)
        slot.close()
    assert checkpoints(run) == [5]


def test_who_comes_back_while_the_last_step_is_looked_for_is_let_in(
    memory: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host that is not the first waits for that one to begin."""
    choose, begun, over = final_save.choose_final_save, threading.Event(), threading.Event()

    def watched(*arguments: object, **more: object) -> object:
        begun.set()
        found = choose(*arguments, **more)  # type: ignore[arg-type]
        over.set()
        return found

    monkeypatch.setattr(final_save, "choose_final_save", watched)
    with keeping(memory, run, facts=replace(FACTS, grace_s=30.0)):
        worker = Worker(memory, rank=1, ranks=(1,), world_size=2)
        put(memory, facts_of(5, rank=1, world_size=2))
        worker.socket.close()
        assert begun.wait(10)
        began = time.monotonic()
        again = Worker(memory, rank=1, ranks=(1,), world_size=2, incarnation="000002-bb")
        again.hear("welcome")
        assert over.wait(5)
        assert time.monotonic() - began < 5
        assert (memory / "own-r00001-s0").exists()
        again.send(op="finish")
        again.bye()
    assert checkpoints(run) == []


def test_a_flush_of_several_hosts_does_not_wait_long_for_one_that_is_gone(
    memory: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commit_protocol, "SHORTENED_S", 0.2)
    with keeping(memory, run, facts=replace(FACTS, save_timeout_s=600.0)):
        worker = Worker(memory, world_size=2)
        put(memory, facts_of(5, world_size=2))
        worker.socket.close()
    assert checkpoints(run) == []


def test_what_is_torn_on_one_host_is_refused_there_and_the_step_before_it_is_flushed(
    tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    here, there = Path("here"), Path("there")
    for folder in (here, there):
        folder.mkdir()
    facts = replace(FACTS, grace_s=4.0, save_timeout_s=600.0)
    began = time.monotonic()
    with keeping(here, run, facts=facts), keeping(there, run, facts=facts):
        first, second = (Worker(folder, rank=rank, ranks=(rank,), world_size=2) for rank, folder in enumerate((here, there)))
        for rank, folder in enumerate((here, there)):
            put(folder, facts_of(5, rank=rank, world_size=2))
        put(here, facts_of(6, world_size=2), index=1)
        for worker in (first, second):
            worker.socket.close()
    assert checkpoints(run) == [5]
    assert time.monotonic() - began < 9, "nobody waited for what was not there"


def test_storage_that_is_away_for_a_moment_does_not_cost_what_is_in_memory(
    memory: Path, run: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(final_save, "_STORAGE_PAUSE_S", 0.05)
    fails = iter([True, True, False, True, False, False, False])
    listing = final_save.list_checkpoints

    def sometimes(store: Store) -> Listing:
        if next(fails, False):
            raise TransientStorageError("503")
        return listing(store)

    monkeypatch.setattr(final_save, "list_checkpoints", sometimes)
    monkeypatch.setattr(saving, "list_checkpoints", sometimes)
    with keeping(memory, run):
        worker = Worker(memory)
        put(memory, facts_of(5))
        put(memory, facts_of(4), index=1)
        worker.socket.close()
    assert checkpoints(run) == [5]
    assert next(fails, None) is None, "a listing of the save itself failed, too"
    assert "503" in caplog.text


def is_leased(slot: Slot) -> bool:
    if slot.lock(shared=False):
        slot.unlock()
        return False
    return True


def test_a_slot_that_cannot_be_leased_holds_no_other_one(memory: Path, run: Path) -> None:
    """Who comes back could never write to that one."""
    with keeping(memory, run):
        worker = Worker(memory, ranks=(0, 1))
        names = [put(memory, facts_of(5, rank=rank, world_size=2)) for rank in range(2)]
        slots = [
            Slot.make(f"{memory}/{name}", size_bytes=layout_of(rank, world_size=2).size_bytes)
            for rank, name in enumerate(names)
        ]
        assert slots[1].lock(shared=False)
        worker.socket.close()
        until(lambda: is_leased(slots[0]))
        again = Worker(memory, ranks=(0, 1), incarnation="000002-bb")
        until(lambda: slots[0].lock(shared=False))
        again.send(op="finish")
        again.bye()
    for slot in slots:
        slot.close()


def test_a_deleted_run_gets_no_checkpoint(memory: Path, run: Path) -> None:
    with keeping(memory, run):
        worker = Worker(memory)
        worker.hear("welcome")
        put(memory, facts_of(5))
        for path in sorted(run.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        run.rmdir()
        worker.socket.close()
    assert not run.exists()


def test_a_host_does_not_take_back_what_it_has_said(tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its part of step 12 is written; the first host still writes its own. An older whole step is in another slot."""
    monkeypatch.chdir(tmp_path)
    here, there = Path("here"), Path("there")
    for rank, folder in enumerate((here, there)):
        folder.mkdir()
        for index, step in enumerate((10, 12)):
            put(folder, facts_of(step, rank=rank, world_size=2), index=index)
    write = saving.write_snapshots

    def slowly(store: Store, job: saving.SaveJob, folder: str, *, sha256: bool) -> object:
        time.sleep(1.5 if job.leader else 0.0)
        return write(store, job, folder, sha256=sha256)

    monkeypatch.setattr(saving, "write_snapshots", slowly)
    facts = replace(FACTS, grace_s=10.0)
    began = time.monotonic()
    with keeping(here, run, facts=facts), keeping(there, run, facts=facts):
        for rank, folder in enumerate((here, there)):
            Worker(folder, rank=rank, ranks=(rank,), world_size=2).socket.close()
    assert checkpoints(run) == [12]
    assert time.monotonic() - began < 8, "who has done its part leaves when it is committed"


def test_a_saver_that_nobody_came_to_saves_what_it_finds(memory: Path, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one before it was killed, and the worker that started this one, too, before it could speak."""
    monkeypatch.setattr(final_save, "ALONE_S", 0.3)
    put(memory, facts_of(5))
    with keeping(memory, run):
        pass
    assert checkpoints(run) == [5]


@pytest.mark.parametrize("error", [StorageFullError("no space left"), TransientStorageError("503")])
def test_what_may_pass_is_waited_for(error: StorageError, memory: Path, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, refused = saving.write_file, []

    def full(*arguments: object, **more: object) -> object:
        if len(refused) < 3:
            refused.append(1)
            raise error
        return write(*arguments, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(saving, "write_file", full)
    monkeypatch.setattr(final_save, "AGAIN_S", 0.05)
    put(memory, facts_of(5))
    put(memory, facts_of(4), index=1)
    with keeping(memory, run):
        Worker(memory).socket.close()
    assert checkpoints(run) == [5]


def test_a_run_whose_folder_cannot_be_seen_is_taken_to_be_there() -> None:
    class Away:
        def stat(self, key: str) -> None:
            raise ObjectNotFoundError(key)

        def list(self, _: str) -> None:
            raise TransientStorageError("503")

    assert run_folder.still_there(cast(Store, Away()))


def test_who_is_at_the_door_when_the_last_look_ends_is_let_in(memory: Path, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    came: list[Worker] = []

    def late(*_: object, **__: object) -> tuple[()]:
        if not came:
            came.append(Worker(memory, incarnation="000002-bb", settle=False))
        return ()

    monkeypatch.setattr(final_save, "choose_final_save", late)
    put(memory, facts_of(5))
    with keeping(memory, run):
        Worker(memory).socket.close()
        until(lambda: came)
        came[0].hear("welcome")
        assert (memory / "own-r00000-s0").exists()
        came[0].send(op="finish")
        came[0].bye()


def test_what_a_host_has_said_is_not_taken_back_when_all_are_gone(
    memory: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first host is still writing its own files."""
    monkeypatch.setattr(commit_protocol, "SHORTENED_S", 0.3)
    store = open_store(str(run))
    CommitProtocol(store, "000001-aa", 5, first_rank=0).prepare(lambda: "step-000000005")
    with keeping(memory, run):
        worker = Worker(memory, rank=1, ranks=(1,), world_size=2)
        put(memory, facts_of(5, rank=1, world_size=2, reason="interval"))
        worker.send(op="snapshot", slot=0, step=5, durable=True)
        until(lambda: any("host-00001-" in info.key for info in store.list(PENDING)))
        worker.socket.close()
    assert not any("failed-" in info.key for info in store.list(PENDING))


def test_what_another_run_has_left_is_not_flushed_into_this_one(
    memory: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That run was deleted; the worker that started this saver was gone before it spoke."""
    monkeypatch.setattr(final_save, "ALONE_S", 0.0)
    put(memory, facts_of(5, incarnation="000009-zz"))
    with keeping(memory, run):
        pass
    assert checkpoints(run) == []


def test_what_will_never_be_readable_does_not_hold_up_the_step_before_it(memory: Path, run: Path) -> None:
    put(memory, facts_of(5))
    put(memory, replace(facts_of(6), layout="f" * 64), index=1)
    with keeping(memory, run, facts=replace(FACTS, save_timeout_s=600.0)):
        worker = Worker(memory)
        worker.hear("welcome")
        worker.socket.close()
    assert checkpoints(run) == [5]


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(final_save, "KEPT_S", 1.5)
    monkeypatch.setattr(final_save, "_RETRY_S", 0.1)


def refuse(run: Path) -> Path:
    """Storage takes no checkpoint, from root neither."""
    file = run / "checkpoints"
    file.touch()
    return file


def test_what_storage_refuses_is_kept_until_it_takes_it(memory: Path, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(final_save, "_RETRY_S", 0.1)
    file = refuse(run)
    with keeping(memory, run):
        worker = Worker(memory)
        put(memory, facts_of(5))
        worker.socket.close()
        time.sleep(2.0)
        assert (memory / "own-r00000-s0").exists()
        # Who starts again finds it there, and may be gone again before it is saved.
        again = Worker(memory, incarnation="000002-bb")
        again.hear("welcome")
        again.socket.close()
        time.sleep(1.0)
        file.unlink()
    assert checkpoints(run) == [5]


def test_a_run_whose_file_system_is_not_mounted_is_kept_until_it_is(
    memory: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(final_save, "_RETRY_S", 0.1)
    with keeping(memory, run):
        worker = Worker(memory)
        worker.hear("welcome")
        put(memory, facts_of(5))
        run.rename(run.with_name("away"))
        monkeypatch.setattr(run_folder, "device_of", lambda _: -1)
        worker.socket.close()
        time.sleep(1.0)
        assert (memory / "own-r00000-s0").exists()
        assert not run.exists()
        run.with_name("away").rename(run)
    assert checkpoints(run) == [5]


@pytest.mark.usefixtures("impatient")
def test_a_run_whose_file_system_is_not_mounted_is_not_kept_for_ever(
    memory: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began = time.monotonic()
    with keeping(memory, run):
        worker = Worker(memory)
        worker.hear("welcome")
        put(memory, facts_of(5))
        shutil.rmtree(run)
        monkeypatch.setattr(run_folder, "device_of", lambda _: -1)
        worker.socket.close()
    assert time.monotonic() - began >= 1.5
    assert not run.exists()


@pytest.mark.usefixtures("impatient")
def test_what_storage_refuses_is_not_kept_for_ever(memory: Path, run: Path) -> None:
    refuse(run)
    began = time.monotonic()
    with keeping(memory, run):
        worker = Worker(memory)
        put(memory, facts_of(5))
        worker.socket.close()
    assert time.monotonic() - began >= 1.5


@pytest.mark.parametrize(("writable", "kept"), [(False, True), (True, False)])
@pytest.mark.usefixtures("impatient")
def test_a_host_that_waits_for_the_first_one_in_vain_keeps_its_part_where_storage_refuses_writes(
    writable: bool, kept: bool, memory: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(_: Store) -> None:
        if not writable:
            raise AccessDeniedError("no")

    monkeypatch.setattr(final_save, "check_writable", check)
    began = time.monotonic()
    with keeping(memory, run, facts=replace(FACTS, grace_s=0.1)):
        worker = Worker(memory, rank=1, ranks=(1,), world_size=2)
        put(memory, facts_of(5, rank=1, world_size=2))
        worker.socket.close()
    assert (time.monotonic() - began >= 1.5) is kept


def test_who_deletes_the_folder_in_host_memory_has_it_back_at_once(
    memory: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(final_save, "_RETRY_S", 0.1)
    refuse(run)
    with keeping(memory, run):
        worker = Worker(memory)
        put(memory, facts_of(5))
        worker.socket.close()
        time.sleep(0.5)
        shutil.rmtree(memory)


def test_a_run_that_was_deleted_is_not_kept(memory: Path, run: Path) -> None:
    began = time.monotonic()
    with keeping(memory, run):
        worker = Worker(memory)
        put(memory, facts_of(5))
        shutil.rmtree(run)
        worker.socket.close()
    assert time.monotonic() - began < 15
    assert not run.exists()


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (TransientStorageError("away"), Cause.PASSING),
        (StorageFullError("full"), Cause.PASSING),
        (AccessDeniedError("denied"), Cause.REFUSED),
        (ObjectNotFoundError("the bucket is gone"), Cause.REFUSED),
        (StorageError("x"), Cause.REFUSED),
        (OSError("x"), Cause.REFUSED),
        (InvalidCheckpointError("host memory is damaged"), Cause.OTHER),
        (CheckpointError("another host lacks it"), Cause.OTHER),
    ],
)
def test_which_errors_keep_what_is_in_memory(error: Exception, cause: Cause) -> None:
    assert cause_of(error) is cause
