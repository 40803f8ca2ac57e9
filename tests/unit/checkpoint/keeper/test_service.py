import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from elastictrain.checkpoint.folders import ROOT, Listing
from elastictrain.checkpoint.keeper import flush as flushing
from elastictrain.checkpoint.keeper import patience
from elastictrain.checkpoint.keeper import saver as saving
from elastictrain.checkpoint.keeper import slow as slowness
from elastictrain.checkpoint.keeper import workers as listening
from elastictrain.checkpoint.keeper.facts import RunFacts
from elastictrain.checkpoint.keeper.hosts import Hosts
from elastictrain.checkpoint.keeper.messages import Lines, Message, encode
from elastictrain.checkpoint.keeper.service import Keeper
from elastictrain.checkpoint.memory.slot import Slot
from elastictrain.errors import StorageError, TransientStorageError
from elastictrain.storage.opening import open_store
from elastictrain.storage.store import Store
from tests.unit.checkpoint.memory.madeslots import RUN, facts_of, flip, layout_of, put

FACTS = RunFacts("unused", RUN, keep_last=9, keep_every=0, save_timeout_s=5.0, flush_s=1.0, grace_s=0.5, versions={})
NOBODY = 0
"""An agent that is no process: a keeper does not wait for it."""


class Worker:
    """What one rank says to its keeper, and hears."""

    def __init__(
        self,
        folder: Path,
        *,
        rank: int = 0,
        ranks: tuple[int, ...] = (0,),
        world_size: int | None = None,
        incarnation: str = "000001-aa",
        settle: bool = True,
    ) -> None:
        """`settle`: wait until the keeper has looked for what this rank had before."""
        self._lines = Lines()
        self._waiting: list[Message] = []
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(10)
        self.socket.connect(str(folder / "keeper.sock"))
        self.say(
            op="hello",
            rank=rank,
            ranks=list(ranks),
            world_size=world_size or len(ranks),
            incarnation=incarnation,
            agent=NOBODY,
            address="",
            port=0,
        )
        if settle:
            self.say(op="snapshot", slot=9, step=0, durable=False)
            self.hear("seen")

    def say(self, **message: object) -> None:
        self.socket.sendall(encode(message))  # type: ignore[arg-type]

    def hear(self, op: str) -> Message:
        while True:
            for message in self._waiting:
                if message["op"] == op:
                    self._waiting.remove(message)
                    return message
            data = self.socket.recv(65536)
            assert data, f"hung up before {op}"
            self._waiting += list(self._lines.feed(data))

    def bye(self) -> None:
        self.say(op="bye")
        self.socket.close()


@contextmanager
def keeping(memory: Path, run: Path, *, facts: RunFacts = FACTS) -> Iterator[Keeper]:
    keeper = Keeper(str(memory), facts, open_store(str(run)))
    thread = threading.Thread(target=keeper.run, daemon=True)
    thread.start()
    yield keeper
    thread.join(20)
    assert not thread.is_alive()


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    # A path of a socket has at most 107 characters.
    monkeypatch.chdir(tmp_path)
    Path("memory").mkdir()
    return Path("memory")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    (folder / "events").mkdir(parents=True)
    (folder / "config.yaml").write_text("")
    for name in ("000001-aa", "000002-bb"):
        (folder / f"events/{name}-r00000.jsonl").write_text("")
    return folder


def checkpoints(run: Path) -> list[int]:
    return sorted(int(path.parent.name[5:]) for path in (run / ROOT).glob("*/manifest.json"))


def events(run: Path, name: str) -> list[dict[str, object]]:
    rows = [json.loads(line) for path in sorted((run / "events").glob("*-k*.jsonl")) for line in path.read_text().splitlines()]
    return [row for row in rows if row["event"] == name]


@contextmanager
def held_up(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Saves wait before their commit until the event is set, or this ends."""
    go_on = threading.Event()
    check = saving.check_files

    def wait(*arguments: object, **more: object) -> None:
        assert go_on.wait(10)
        check(*arguments, **more)  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr(saving, "check_files", wait)
        yield go_on
        go_on.set()


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_durable_snapshot_is_saved_and_its_slot_released(memory: Path, run: Path) -> None:
    with keeping(memory, run):
        worker = Worker(memory)
        assert worker.hear("welcome")["pid"] == os.getpid()
        put(memory, facts_of(5, reason="interval"), digests=False)
        worker.say(op="snapshot", slot=0, step=5, durable=True)
        assert worker.hear("seen") == {"op": "seen", "slot": 0, "step": 5}
        assert worker.hear("released")["step"] == 5
        assert worker.hear("saved")["checkpoint"] == "step-000000005"
        assert Path(memory / "own-r00000-s0.digests").exists()
        slot = Slot.make(str(memory / "own-r00000-s0"), size_bytes=layout_of().size_bytes)
        until(lambda: slot.lock(shared=False))
        slot.close()
        worker.say(op="finish")
        worker.bye()
    assert checkpoints(run) == [5]


def test_the_ranks_of_other_hosts_are_told_that_no_more_will_be_said(memory: Path, run: Path) -> None:
    """They would take the step for overdue, and go on without snapshots."""
    with keeping(memory, run):
        Hosts(open_store(str(run)), "000001-aa", 5, first_rank=0).begin(lambda: "step-000000005")
        other = Worker(memory, rank=1, ranks=(1,), world_size=2)
        put(memory, facts_of(5, rank=1, world_size=2, reason="interval"))
        other.say(op="snapshot", slot=0, step=5, durable=True)
        assert other.hear("released") == {"op": "released", "step": 5, "done": True}
        other.say(op="finish")
        other.bye()


def test_who_comes_again_is_told_what_was_saved_meanwhile(memory: Path, run: Path) -> None:
    with keeping(memory, run):
        first, second = (Worker(memory, rank=rank, ranks=(0, 1)) for rank in range(2))
        for rank, worker in enumerate((first, second)):
            put(memory, facts_of(5, rank=rank, world_size=2, reason="interval"))
            worker.say(op="snapshot", slot=0, step=5, durable=True)
            worker.hear("seen")
        first.hear("saved")
        second.socket.close()
        again = Worker(memory, rank=1, ranks=(0, 1))
        assert again.hear("saved")["step"] == 5
        first.say(op="finish")
        first.bye()
        again.bye()


def test_what_becomes_of_a_save_of_the_past_is_not_told_to_those_who_train_now(
    memory: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may come to the same step, and have it saved."""
    with keeping(memory, run) as keeper:
        with held_up(monkeypatch) as go_on:
            old = Worker(memory)
            put(memory, facts_of(9, reason="interval"))
            old.say(op="snapshot", slot=0, step=9, durable=True)
            until(lambda: keeper._saver.under_way)
            old.bye()
            new = Worker(memory, incarnation="000002-bb")
            go_on.set()
            until(lambda: checkpoints(run) == [9] and not keeper._saver.busy)
        new.say(op="snapshot", slot=8, step=0, durable=False)
        new.hear("seen")
        assert not [message for message in new._waiting if message["op"] in ("saved", "released", "failed")]
        put(memory, replace(facts_of(8, reason="interval"), incarnation="000002-bb"), index=1)
        new.say(op="snapshot", slot=1, step=8, durable=True)
        assert new.hear("saved")["step"] == 8
        new.say(op="finish")
        new.bye()


def test_both_ranks_are_waited_for(memory: Path, run: Path) -> None:
    with keeping(memory, run):
        workers = [Worker(memory, rank=rank, ranks=(0, 1)) for rank in range(2)]
        for rank, worker in enumerate(workers):
            assert checkpoints(run) == []
            put(memory, facts_of(5, rank=rank, world_size=2, reason="interval"))
            worker.say(op="snapshot", slot=0, step=5, durable=True)
            worker.hear("seen")
        assert [worker.hear("saved")["step"] for worker in workers] == [5, 5]
        workers[0].say(op="finish")
        for worker in workers:
            worker.bye()


@pytest.mark.parametrize("damage", ["gone", "torn", "header", "layout"])
def test_a_snapshot_that_cannot_be_read_is_answered(damage: str, memory: Path, run: Path) -> None:
    """A worker that waited for an answer for ever would never save again."""
    with keeping(memory, run):
        worker = Worker(memory)
        name = put(memory, facts_of(5, reason="interval"))
        if damage == "gone":
            (memory / name).unlink()
        elif damage == "torn":
            slot = Slot.make(str(memory / name), size_bytes=layout_of().size_bytes)
            slot.begin()
            slot.close()
        elif damage == "header":
            flip(memory, name, at=60)
        else:
            next(memory.glob("layout-*")).unlink()
        worker.say(op="snapshot", slot=0, step=5, durable=True)
        assert worker.hear("seen")["step"] == 5
        failed = worker.hear("failed")
        assert failed["step"] == 5
        assert str(failed["error"]).startswith("the snapshot of rank 0: own-r00000-s0 ")
        # One that was to stay in memory is no failed save.
        worker.say(op="snapshot", slot=0, step=5, durable=False)
        assert worker.hear("seen")["step"] == 5
        put(memory, facts_of(6, reason="interval"))
        worker.say(op="snapshot", slot=0, step=6, durable=True)
        assert worker.hear("saved")["step"] == 6
        assert not any(message["op"] == "failed" for message in worker._waiting)
        worker.say(op="finish")
        worker.bye()


def test_a_save_that_failed_may_be_tried_again_with_the_same_step(
    memory: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last save of a run cannot wait for a later step."""

    def broken(*_: object, **__: object) -> None:
        raise StorageError("full")

    with keeping(memory, run):
        worker = Worker(memory)
        put(memory, facts_of(5, reason="stop"))
        with monkeypatch.context() as patched:
            patched.setattr(saving, "check_files", broken)
            worker.say(op="snapshot", slot=0, step=5, durable=True)
            assert worker.hear("failed") == {"op": "failed", "step": 5, "error": "full"}
        put(memory, facts_of(5, reason="stop"), index=1)
        worker.say(op="snapshot", slot=1, step=5, durable=True)
        assert worker.hear("saved")["step"] == 5
        worker.say(op="finish")
        worker.bye()


def test_a_rank_gives_up_its_own_old_slots_only(memory: Path, run: Path) -> None:
    """Ranks may use slots of different numbers."""
    with keeping(memory, run):
        worker = Worker(memory, rank=0, ranks=(0, 1))
        for index in range(3):
            for rank in range(3):
                put(memory, facts_of(index, rank=rank, world_size=3), index=index)
        worker.say(op="old", slots=0b011)
        until(lambda: not (memory / "own-r00002-s2").exists())
        left = sorted(path.name for path in memory.glob("own-*") if path.suffix != ".digests")
        assert left == ["own-r00000-s0", "own-r00000-s1", "own-r00001-s0", "own-r00001-s1", "own-r00001-s2"]
        worker.say(op="finish")
        worker.bye()


def test_a_worker_of_the_past_is_refused(memory: Path, run: Path) -> None:
    with keeping(memory, run):
        old = Worker(memory)
        old.hear("welcome")
        new = Worker(memory, incarnation="000002-bb")
        new.hear("welcome")
        put(memory, facts_of(5))
        old.say(op="snapshot", slot=0, step=5, durable=False)
        assert "no living incarnation" in str(old.hear("refused")["reason"])
        assert old.socket.recv(10) == b""
        late = Worker(memory, settle=False)
        assert "is past" in str(late.hear("refused")["reason"])
        old.socket.close()
        late.socket.close()
        new.say(op="finish")
        new.bye()


def test_who_only_hangs_up_is_not_lost(memory: Path, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker may hang up because the keeper did not read for a while, and comes again; a dead one does not."""
    with keeping(memory, run):
        first = Worker(memory, rank=0, ranks=(0, 1))
        second = Worker(memory, rank=1, ranks=(0, 1))
        second.hear("welcome")
        second.socket.close()
        again = Worker(memory, rank=1, ranks=(0, 1))
        again.hear("welcome")
        with monkeypatch.context() as patched:
            # As if it had been another process, which is gone.
            patched.setattr(listening.os, "pidfd_open", _no_such_process)
            again.socket.close()
            assert first.hear("lost") == {"op": "lost", "rank": 1}
        assert not [message for message in first._waiting if message["op"] == "lost"]
        first.say(op="finish")
        first.bye()


def _no_such_process(pid: int) -> int:
    raise ProcessLookupError(pid)


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


def test_who_comes_back_while_the_last_step_is_looked_for_is_let_in(memory: Path, run: Path) -> None:
    """A host that is not the first waits for that one to begin."""
    with keeping(memory, run, facts=replace(FACTS, grace_s=30.0)) as keeper:
        worker = Worker(memory, rank=1, ranks=(1,), world_size=2)
        put(memory, facts_of(5, rank=1, world_size=2))
        worker.socket.close()
        until(lambda: keeper._flushing.busy)
        began = time.monotonic()
        again = Worker(memory, rank=1, ranks=(1,), world_size=2, incarnation="000002-bb")
        again.hear("welcome")
        until(lambda: not keeper._flushing.busy)
        assert time.monotonic() - began < 5
        assert (memory / "own-r00001-s0").exists()
        again.say(op="finish")
        again.bye()
    assert checkpoints(run) == []


def test_a_flush_of_several_hosts_does_not_wait_long_for_one_that_is_gone(
    memory: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience, "HURRY_S", 0.2)
    with keeping(memory, run, facts=replace(FACTS, save_timeout_s=600.0)):
        worker = Worker(memory, world_size=2)
        put(memory, facts_of(5, world_size=2))
        worker.socket.close()
    assert checkpoints(run) == []


def test_a_save_that_begins_when_the_group_is_broken_does_not_wait_long_for_other_hosts(
    memory: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience, "HURRY_S", 0.2)
    with keeping(memory, run, facts=replace(FACTS, save_timeout_s=600.0)):
        first, second = (Worker(memory, rank=rank, ranks=(0, 1), world_size=3) for rank in range(2))
        with monkeypatch.context() as patched:
            patched.setattr(listening.os, "pidfd_open", _no_such_process)
            second.socket.close()
            first.hear("lost")
        put(memory, facts_of(5, rank=1, world_size=3, reason="interval"))
        put(memory, facts_of(5, world_size=3, reason="interval"))
        again = Worker(memory, rank=1, ranks=(0, 1), world_size=3)
        first.say(op="snapshot", slot=0, step=5, durable=True)
        assert "the hosts of ranks 2 did not say" in str(first.hear("failed")["error"])
        first.say(op="finish")
        first.bye()
        again.bye()


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
    monkeypatch.setattr(flushing, "_STORAGE_PAUSE_S", 0.05)
    fails = iter([True, True, False, True, False, False, False])
    listing = flushing.list_checkpoints

    def sometimes(store: Store) -> Listing:
        if next(fails, False):
            raise TransientStorageError("503")
        return listing(store)

    monkeypatch.setattr(flushing, "list_checkpoints", sometimes)
    monkeypatch.setattr(saving, "list_checkpoints", sometimes)
    with keeping(memory, run):
        worker = Worker(memory)
        put(memory, facts_of(5))
        put(memory, facts_of(4), index=1)
        worker.socket.close()
    assert checkpoints(run) == [5]
    assert next(fails, None) is None, "a listing of the save itself failed, too"
    assert "waits for storage: 503" in caplog.text


def test_a_slot_that_cannot_be_pinned_holds_no_other_one(memory: Path, run: Path) -> None:
    """Who comes back could never write to that one."""
    with keeping(memory, run) as keeper:
        worker = Worker(memory, ranks=(0, 1))
        names = [put(memory, facts_of(5, rank=rank, world_size=2)) for rank in range(2)]
        slots = [
            Slot.make(f"{memory}/{name}", size_bytes=layout_of(rank, world_size=2).size_bytes)
            for rank, name in enumerate(names)
        ]
        assert slots[1].lock(shared=False)
        worker.socket.close()
        until(lambda: keeper._pins._count.get(keeper._pins._slots.get(names[0])))  # type: ignore[arg-type]
        again = Worker(memory, ranks=(0, 1), incarnation="000002-bb")
        until(lambda: slots[0].lock(shared=False))
        again.say(op="finish")
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


def test_another_incarnation_may_begin_at_an_older_step(memory: Path, run: Path) -> None:
    """What the one before it had saved was damaged: its steps are saved once more."""
    with keeping(memory, run):
        worker = Worker(memory)
        put(memory, facts_of(9, reason="interval"))
        worker.say(op="snapshot", slot=0, step=9, durable=True)
        worker.hear("saved")
        worker.socket.close()
        worker = Worker(memory, incarnation="000002-bb")
        put(memory, replace(facts_of(7, reason="interval"), incarnation="000002-bb"))
        worker.say(op="snapshot", slot=0, step=7, durable=True)
        assert worker.hear("saved")["step"] == 7
        worker.say(op="finish")
        worker.bye()
    assert checkpoints(run) == [7, 9]


def test_a_save_that_takes_long_is_told_once_with_what_storage_complains_of(
    memory: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slowness, "SLOW_S", 0.05)
    go_on = threading.Event()
    check = saving.check_files

    def stalled(*arguments: object, **more: object) -> None:
        logging.getLogger("elastictrain.storage.retry").warning("503: slow down")
        assert go_on.wait(10)
        check(*arguments, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(saving, "check_files", stalled)
    with keeping(memory, run):
        worker = Worker(memory)
        put(memory, facts_of(5, reason="interval"))
        worker.say(op="snapshot", slot=0, step=5, durable=True)
        slow = worker.hear("slow")
        assert (slow["step"], slow["trouble"]) == (5, "503: slow down")
        time.sleep(0.6)
        go_on.set()
        assert worker.hear("saved")["step"] == 5
        worker.say(op="finish")
        worker.bye()
    (told,) = events(run, "checkpoint_slow")
    assert (told["step"], told["trouble"]) == (5, "503: slow down")
    assert cast(float, told["seconds"]) >= 0.05


def test_a_process_that_lives_is_not_exiting_and_one_that_is_gone_counts_as_it() -> None:
    assert not listening.is_exiting(os.getpid())
    assert listening.is_exiting(1 << 22)


@pytest.mark.parametrize(
    ("stat", "exiting"),
    [
        ("7 (a) b) S 1 7 7 0 -1 4194560 1 2", False),
        ("7 (a) b) S 1 7 7 0 -1 4194564 1 2", True),
        ("7 (a) b) Z 1 7 7 0 -1 4228100 1 2", True),
        ("7 (a", True),
        ("", True),
    ],
)
def test_a_process_past_the_point_of_return_is_known_by_its_flags(
    stat: str, exiting: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stat").write_text(stat)
    monkeypatch.setattr(listening, "open", lambda path, mode: (tmp_path / Path(path).name).open(mode), raising=False)
    assert listening.is_exiting(7) is exiting
