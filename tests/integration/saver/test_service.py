import logging
import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
from msgspec import to_builtins

from elastictrain.checkpoint import writer
from elastictrain.checkpoint.memory.folder import look
from elastictrain.checkpoint.memory.records import load_digests
from elastictrain.checkpoint.memory.slot import Slot, SnapshotId
from elastictrain.checkpoint.peers.placement import Peer
from elastictrain.checkpoint.peers.server import PeerServer
from elastictrain.checkpoint.saver import commit_protocol, connections, event_log, service
from elastictrain.checkpoint.saver.commit_protocol import PENDING, CommitProtocol
from elastictrain.checkpoint.saver.messages import SaverRoster, SendReplicas, encode
from elastictrain.checkpoint.saver.pending_snapshots import LeasedSnapshot, with_digests
from elastictrain.checkpoint.saver.process import SaverStarter
from elastictrain.checkpoint.signing import LEAST_BYTES, SigningKey, proof_of
from elastictrain.errors import StorageError
from elastictrain.storage.opening import open_store
from tests.unit.checkpoint.memory.madeslots import RUN, facts_of, flip, layout_of, put
from tests.unit.checkpoint.saver.running import FACTS, Worker, checkpoints, events, held_up, keeping, until


def test_a_durable_snapshot_is_saved_and_its_slot_released(memory: Path, run: Path) -> None:
    with keeping(memory, run):
        worker = Worker(memory)
        assert worker.hear("welcome")["pid"] == os.getpid()
        put(memory, facts_of(5, reason="interval"), digests=False)
        worker.send(op="snapshot", slot=0, step=5, durable=True)
        assert worker.hear("seen") == {"op": "seen", "slot": 0, "step": 5}
        assert worker.hear("released")["step"] == 5
        assert worker.hear("saved")["checkpoint"] == "step-000000005"
        assert Path(memory / "own-r00000-s0.digests").exists()
        slot = Slot.make(str(memory / "own-r00000-s0"), size_bytes=layout_of().size_bytes)
        until(lambda: slot.lock(shared=False))
        slot.close()
        worker.send(op="finish")
        worker.bye()
    assert checkpoints(run) == [5]


def test_the_ranks_of_other_hosts_are_told_that_no_more_will_be_said(memory: Path, run: Path) -> None:
    """They would take the step for overdue, and go on without snapshots."""
    with keeping(memory, run):
        CommitProtocol(open_store(str(run)), "000001-aa", 5, first_rank=0).prepare(lambda: "step-000000005")
        other = Worker(memory, rank=1, ranks=(1,), world_size=2)
        put(memory, facts_of(5, rank=1, world_size=2, reason="interval"))
        other.send(op="snapshot", slot=0, step=5, durable=True)
        assert other.hear("released") == {"op": "released", "step": 5, "done": True}
        other.send(op="finish")
        other.bye()


def test_the_replicas_that_all_ranks_have_stay_until_newer_ones_have_arrived(memory: Path, run: Path, tmp_path: Path) -> None:
    """The other host has a newer one of this rank. Not all ranks may have it there."""
    before, token = "000001-aa", bytes(8)
    (tmp_path / "b").mkdir(mode=0o700)
    with keeping(memory, run), closing(PeerServer(str(tmp_path / "b"), run=RUN, address="127.0.0.1")) as server:
        put(tmp_path / "b", facts_of(3), kind="replica", index=0)
        put(tmp_path / "b", facts_of(5), kind="replica", index=1)
        server.set_token(token)
        server.replicas.kept = frozenset({0})
        put(memory, facts_of(7, incarnation="000002-bb"))
        worker = Worker(memory, incarnation="000002-bb")
        names = [("a", 1, (0,)), ("b", server.port, (1,))]
        hosts = [Peer(name, "127.0.0.1", port, ranks, number) for number, (name, port, ranks) in enumerate(names)]
        worker.send(**to_builtins(SaverRoster(tuple(hosts), 0, token.hex())))
        worker.send(**to_builtins(SendReplicas(7, safe=SnapshotId(before, 3))))
        assert worker.hear("sent") == {"op": "sent", "step": 7, "whole": True}
        assert {one.slot: one.facts.step for one in look(str(tmp_path / "b"), host=0)} == {
            "replica-r00000-s0": 3,
            "replica-r00000-s1": 7,
        }
        worker.send(op="finish")
        worker.bye()


def test_who_comes_again_is_told_what_was_saved_meanwhile(memory: Path, run: Path) -> None:
    with keeping(memory, run):
        first, second = (Worker(memory, rank=rank, ranks=(0, 1)) for rank in range(2))
        for rank, worker in enumerate((first, second)):
            put(memory, facts_of(5, rank=rank, world_size=2, reason="interval"))
            worker.send(op="snapshot", slot=0, step=5, durable=True)
            worker.hear("seen")
        first.hear("saved")
        second.socket.close()
        again = Worker(memory, rank=1, ranks=(0, 1))
        assert again.hear("saved")["step"] == 5
        first.send(op="finish")
        first.bye()
        again.bye()


def test_what_becomes_of_a_save_of_the_past_is_not_told_to_those_who_train_now(
    memory: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may come to the same step, and have it saved."""
    with keeping(memory, run):
        with held_up(monkeypatch) as held:
            old = Worker(memory)
            put(memory, facts_of(9, reason="interval"))
            old.send(op="snapshot", slot=0, step=9, durable=True)
            assert held.reached.wait(10)
            old.bye()
            new = Worker(memory, incarnation="000002-bb")
            held.go_on.set()
            until(lambda: events(run, "checkpoint_saved"))
        new.send(op="snapshot", slot=8, step=0, durable=False)
        new.hear("seen")
        assert not [message for message in new.waiting if message["op"] in ("saved", "released", "failed")]
        put(memory, replace(facts_of(8, reason="interval"), incarnation="000002-bb"), index=1)
        new.send(op="snapshot", slot=1, step=8, durable=True)
        assert new.hear("saved")["step"] == 8
        new.send(op="finish")
        new.bye()


def test_both_ranks_are_waited_for(memory: Path, run: Path) -> None:
    with keeping(memory, run):
        workers = [Worker(memory, rank=rank, ranks=(0, 1)) for rank in range(2)]
        for rank, worker in enumerate(workers):
            assert checkpoints(run) == []
            put(memory, facts_of(5, rank=rank, world_size=2, reason="interval"))
            worker.send(op="snapshot", slot=0, step=5, durable=True)
            worker.hear("seen")
        assert [worker.hear("saved")["step"] for worker in workers] == [5, 5]
        workers[0].send(op="finish")
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
        worker.send(op="snapshot", slot=0, step=5, durable=True)
        assert worker.hear("seen")["step"] == 5
        failed = worker.hear("failed")
        assert failed["step"] == 5
        assert str(failed["error"]).startswith("the snapshot of rank 0: own-r00000-s0 ")
        # One that was to stay in memory is no failed save.
        worker.send(op="snapshot", slot=0, step=5, durable=False)
        assert worker.hear("seen")["step"] == 5
        put(memory, facts_of(6, reason="interval"))
        worker.send(op="snapshot", slot=0, step=6, durable=True)
        assert worker.hear("saved")["step"] == 6
        assert not any(message["op"] == "failed" for message in worker.waiting)
        worker.send(op="finish")
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
            patched.setattr(writer, "check_files", broken)
            worker.send(op="snapshot", slot=0, step=5, durable=True)
            assert worker.hear("failed") == {"op": "failed", "step": 5, "error": "full"}
        put(memory, facts_of(5, reason="stop"), index=1)
        worker.send(op="snapshot", slot=1, step=5, durable=True)
        assert worker.hear("saved")["step"] == 5
        worker.send(op="finish")
        worker.bye()


@pytest.mark.parametrize("size_bytes", [-1, 1, None], ids=["shorter", "longer", "gone"])
def test_a_file_that_is_not_as_it_was_written_keeps_the_commit_back(
    memory: Path, run: Path, monkeypatch: pytest.MonkeyPatch, size_bytes: int | None
) -> None:
    with keeping(memory, run):
        worker = Worker(memory)
        put(memory, facts_of(5, reason="stop"))
        with held_up(monkeypatch) as held:
            worker.send(op="snapshot", slot=0, step=5, durable=True)
            assert held.reached.wait(10)
            shard = next(run.glob("checkpoints/*/*.safetensors"))
            if size_bytes is None:
                shard.unlink()
            else:
                os.truncate(shard, shard.stat().st_size + size_bytes)
            held.go_on.set()
            assert worker.hear("failed")["step"] == 5
        assert checkpoints(run) == []
        worker.send(op="finish")
        worker.bye()


def test_a_rank_gives_up_its_own_old_slots_only(memory: Path, run: Path) -> None:
    """Ranks may use slots of different numbers."""
    with keeping(memory, run):
        worker = Worker(memory, rank=0, ranks=(0, 1))
        for index in range(3):
            for rank in range(3):
                put(memory, facts_of(index, rank=rank, world_size=3), index=index)
        worker.send(op="old", slots=0b011)
        until(lambda: not (memory / "own-r00002-s2").exists())
        left = sorted(path.name for path in memory.glob("own-*") if path.suffix != ".digests")
        assert left == ["own-r00000-s0", "own-r00000-s1", "own-r00001-s0", "own-r00001-s1", "own-r00001-s2"]
        worker.send(op="finish")
        worker.bye()


def test_a_worker_of_the_past_is_refused(memory: Path, run: Path) -> None:
    with keeping(memory, run):
        old = Worker(memory)
        old.hear("welcome")
        new = Worker(memory, incarnation="000002-bb")
        new.hear("welcome")
        put(memory, facts_of(5))
        old.send(op="snapshot", slot=0, step=5, durable=False)
        assert old.hear("refused")["reason"]
        assert old.socket.recv(10) == b""
        late = Worker(memory, settle=False)
        assert "is past" in str(late.hear("refused")["reason"])
        old.socket.close()
        late.socket.close()
        new.send(op="finish")
        new.bye()


def test_a_later_life_may_have_the_same_number(memory: Path, run: Path) -> None:
    """The first was killed before a trace of it was stored; which name sorts first says nothing."""
    with keeping(memory, run):
        old = Worker(memory, incarnation="000002-ff", agent=os.getpid())
        old.hear("welcome")
        early = Worker(memory, incarnation="000002-aa", settle=False)
        assert "is past" in str(early.hear("refused")["reason"])
        early.socket.close()
        old.socket.close()
        new = Worker(memory, incarnation="000002-aa")
        new.hear("welcome")
        new.socket.close()
        late = Worker(memory, incarnation="000002-ff", settle=False)
        assert "is past" in str(late.hear("refused")["reason"])
        late.socket.close()
        again = Worker(memory, incarnation="000002-aa")
        again.send(op="finish")
        again.bye()


def test_who_only_hangs_up_is_not_lost(memory: Path, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker may hang up because the saver did not read for a while, and comes again; a dead one does not."""
    with keeping(memory, run):
        first = Worker(memory, rank=0, ranks=(0, 1))
        second = Worker(memory, rank=1, ranks=(0, 1))
        second.hear("welcome")
        second.socket.close()
        again = Worker(memory, rank=1, ranks=(0, 1))
        again.hear("welcome")
        with monkeypatch.context() as patched:
            # As if it had been another process, which is gone.
            patched.setattr(connections.os, "pidfd_open", _no_such_process)
            again.socket.close()
            assert first.hear("lost") == {"op": "lost", "rank": 1}
        assert not [message for message in first.waiting if message["op"] == "lost"]
        first.send(op="finish")
        first.bye()


def _no_such_process(pid: int) -> int:
    raise ProcessLookupError(pid)


def test_a_save_that_begins_when_the_group_is_broken_does_not_wait_long_for_other_hosts(
    memory: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commit_protocol, "SHORTENED_S", 0.2)
    with keeping(memory, run, facts=replace(FACTS, save_timeout_s=600.0)):
        first, second = (Worker(memory, rank=rank, ranks=(0, 1), world_size=3) for rank in range(2))
        with monkeypatch.context() as patched:
            patched.setattr(connections.os, "pidfd_open", _no_such_process)
            second.socket.close()
            first.hear("lost")
        put(memory, facts_of(5, rank=1, world_size=3, reason="interval"))
        put(memory, facts_of(5, world_size=3, reason="interval"))
        again = Worker(memory, rank=1, ranks=(0, 1), world_size=3)
        first.send(op="snapshot", slot=0, step=5, durable=True)
        assert "ranks 2 " in str(first.hear("failed")["error"])
        first.send(op="finish")
        first.bye()
        again.bye()


def test_another_incarnation_may_begin_at_an_older_step(memory: Path, run: Path) -> None:
    """What the one before it had saved was damaged: its steps are saved once more."""
    with keeping(memory, run):
        worker = Worker(memory)
        put(memory, facts_of(9, reason="interval"))
        worker.send(op="snapshot", slot=0, step=9, durable=True)
        worker.hear("saved")
        worker.socket.close()
        worker = Worker(memory, incarnation="000002-bb")
        put(memory, replace(facts_of(7, reason="interval"), incarnation="000002-bb"))
        worker.send(op="snapshot", slot=0, step=7, durable=True)
        assert worker.hear("saved")["step"] == 7
        worker.send(op="finish")
        worker.bye()
    assert checkpoints(run) == [7, 9]


def test_a_save_that_takes_long_is_told_once_with_what_storage_complains_of(
    memory: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_log, "SLOW_S", 0.3)
    go_on = threading.Event()
    check = writer.check_files

    def stalled(*arguments: object, **more: object) -> None:
        logging.getLogger("elastictrain.storage.failures").warning("503")
        assert go_on.wait(10)
        check(*arguments, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(writer, "check_files", stalled)
    with keeping(memory, run):
        worker = Worker(memory)
        put(memory, facts_of(5, reason="interval"))
        worker.send(op="snapshot", slot=0, step=5, durable=True)
        slow = worker.hear("slow")
        assert (slow["step"], slow["trouble"]) == (5, "503")
        time.sleep(0.6)
        go_on.set()
        assert worker.hear("saved")["step"] == 5
        worker.send(op="finish")
        worker.bye()
    (told,) = events(run, "checkpoint_slow")
    assert (told["step"], told["trouble"]) == (5, "503")
    assert cast(float, told["seconds"]) >= 0.3


def test_a_step_that_some_ranks_lack_is_told_once(memory: Path, run: Path) -> None:
    with keeping(memory, run):
        ranks = (0, 1, 2)
        workers = [Worker(memory, rank=rank, ranks=ranks) for rank in ranks]
        for rank in (0, 1):
            put(memory, facts_of(5, rank=rank, world_size=3, reason="interval"))
            workers[rank].send(op="snapshot", slot=0, step=5, durable=True)
            workers[rank].hear("seen")
        for rank in ranks:
            put(memory, facts_of(6, rank=rank, world_size=3, reason="interval"), index=1)
            workers[rank].send(op="snapshot", slot=1, step=6, durable=True)
        workers[0].hear("saved")
        told = [message for message in workers[0].waiting if message["op"] == "failed"]
        assert [(one["op"], one["step"]) for one in told] == [("failed", 5)]
        workers[0].send(op="finish")
        for worker in workers:
            worker.bye()


def test_a_successor_takes_the_steps_in_their_order(memory: Path, run: Path) -> None:
    """Or the older ones would look as if a rank had passed them."""
    ranks = (0, 1)
    for rank in ranks:
        put(memory, facts_of(20, rank=rank, world_size=2, reason="interval"), index=0)
        put(memory, facts_of(10, rank=rank, world_size=2, reason="interval"), index=1)
    with keeping(memory, run):
        workers = [Worker(memory, rank=rank, ranks=ranks) for rank in ranks]
        assert [workers[0].hear("saved")["step"] for _ in ranks] == [10, 20]
        assert not [message for message in workers[0].waiting if message["op"] == "failed"]
        workers[0].send(op="finish")
        for worker in workers:
            worker.bye()
    assert checkpoints(run) == [10, 20]


def test_a_successor_does_not_write_again_what_a_later_save_has_made_needless(memory: Path, run: Path) -> None:
    facts = replace(FACTS, keep_last=1)
    for index, step in enumerate((10, 20)):
        put(memory, facts_of(step, reason="interval"), index=index)
    with keeping(memory, run, facts=facts):
        worker = Worker(memory)
        assert [worker.hear("saved")["step"] for _ in range(2)] == [10, 20]
        worker.send(op="finish")
        worker.bye()
    with keeping(memory, run, facts=facts):
        worker = Worker(memory)
        assert [worker.hear("saved")["step"] for _ in range(2)] == [10, 20]
        worker.send(op="finish")
        worker.bye()
    assert [event["step"] for event in events(run, "checkpoint_saved")] == [10, 20]
    assert checkpoints(run) == [20]


def test_a_stranger_does_not_end_a_saver(memory: Path, run: Path) -> None:
    put(memory, facts_of(5))
    with keeping(memory, run):
        stranger = socket.socket(socket.AF_UNIX)
        stranger.connect(str(memory / "keeper.sock"))
        stranger.sendall(encode({"op": "finish"}))
        stranger.close()
        time.sleep(0.2)
        worker = Worker(memory)
        worker.socket.close()
    assert checkpoints(run) == [5]


def test_words_of_the_past_do_not_count(memory: Path, run: Path) -> None:
    with keeping(memory, run):
        old = Worker(memory)
        new = Worker(memory, incarnation="000002-bb")
        put(memory, replace(facts_of(5), incarnation="000002-bb"))
        old.send(op="finish")
        old.send(op="send", step=None)
        assert old.hear("refused")["reason"]
        old.socket.close()
        new.socket.close()
    assert checkpoints(run) == [5], "saved, as nobody of this incarnation said that the run is complete"


def test_who_comes_again_before_the_end_of_its_old_connection_is_not_lost(
    memory: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with keeping(memory, run):
        first, old, again = (Worker(memory, rank=rank, ranks=(0, 1)) for rank in (0, 1, 1))
        with monkeypatch.context() as patched:
            patched.setattr(connections.os, "pidfd_open", _no_such_process)
            old.socket.close()
            for worker in (first, again):
                worker.send(op="snapshot", slot=8, step=0, durable=False)
                worker.hear("seen")
        assert not [message for message in first.waiting if message["op"] == "lost"]
        first.send(op="finish")
        first.bye()
        again.bye()


def test_who_comes_again_is_told_what_failed_meanwhile(memory: Path, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its slot would never be free again."""
    with keeping(memory, run):
        first, second = (Worker(memory, rank=rank, ranks=(0, 1)) for rank in range(2))
        with monkeypatch.context() as patched:
            patched.setattr(writer, "check_files", _full)
            for rank, worker in enumerate((first, second)):
                put(memory, facts_of(5, rank=rank, world_size=2, reason="interval"))
                worker.send(op="snapshot", slot=0, step=5, durable=True)
            second.hear("failed")
        first.socket.close()
        again = Worker(memory, rank=0, ranks=(0, 1))
        assert again.hear("failed")["error"] == "full"
        # But not of the attempt before, while it is tried again.
        with held_up(monkeypatch) as held:
            for rank, worker in enumerate((again, second)):
                put(memory, facts_of(5, rank=rank, world_size=2, reason="interval"), index=1)
                worker.send(op="snapshot", slot=1, step=5, durable=True)
            assert held.reached.wait(10)
            second.socket.close()
            third = Worker(memory, rank=1, ranks=(0, 1))
            assert not [message for message in third.waiting if message["op"] == "failed"]
        assert again.hear("saved")["step"] == 5
        again.send(op="finish")
        again.bye()
        third.bye()


def _full(*_: object, **__: object) -> None:
    raise StorageError("full")


def test_a_host_takes_part_in_the_second_attempt_at_a_step(memory: Path, run: Path) -> None:
    """The first one failed elsewhere, after this host had done its part."""
    store = open_store(str(run))
    with keeping(memory, run):
        worker = Worker(memory, rank=1, ranks=(1,), world_size=2)
        for slot in range(2):
            leader = CommitProtocol(store, "000001-aa", 5, first_rank=0)
            leader.prepare(lambda: "step-000000005")
            put(memory, facts_of(5, rank=1, world_size=2, reason="stop"), index=slot)
            worker.send(op="snapshot", slot=slot, step=5, durable=True)
            worker.hear("released")
            until(lambda: any(f"host-00001-{leader.attempt}" in info.key for info in store.list(PENDING)))  # noqa: B023
            leader.clear()
        worker.send(op="finish")
        worker.bye()


def test_a_host_that_gives_a_step_up_says_so(memory: Path, run: Path) -> None:
    """The first one would wait for it until its limit."""
    store = open_store(str(run))
    CommitProtocol(store, "000001-aa", 5, first_rank=0).prepare(lambda: "step-000000005")
    with keeping(memory, run):
        worker = Worker(memory, rank=1, ranks=(1,), world_size=2)
        flip(memory, put(memory, facts_of(5, rank=1, world_size=2, reason="interval")), at=60)
        worker.send(op="snapshot", slot=0, step=5, durable=True)
        worker.hear("failed")
        until(lambda: any("failed-00001-" in info.key for info in store.list(PENDING)))
        worker.send(op="finish")
        worker.bye()


def test_what_the_first_host_never_begins_does_not_hold_up_the_end(memory: Path, run: Path) -> None:
    """Two ranks lack a step: the first host is told of it once, and gives it up for good."""
    store = open_store(str(run))
    leader = CommitProtocol(store, "000001-aa", 5, first_rank=0)
    leader.prepare(lambda: "step-000000005")
    with keeping(memory, run, facts=replace(FACTS, save_timeout_s=600.0)):
        workers = [Worker(memory, rank=rank, ranks=(1, 2), world_size=3, agent=os.getpid()) for rank in (1, 2)]
        for rank, worker in enumerate(workers, 1):
            flip(memory, put(memory, facts_of(5, rank=rank, world_size=3, reason="interval")), at=60)
            worker.send(op="snapshot", slot=0, step=5, durable=True)
            worker.hear("failed")
        until(lambda: any("failed-00001-" in info.key for info in store.list(PENDING)))
        leader.clear()
        workers[0].send(op="finish")
        for worker in workers:
            worker.bye()
        began = time.monotonic()
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("name", ["no key", "another key"])
def test_a_worker_with_another_key_is_refused(memory: Path, run: Path, name: str) -> None:
    """What it hands over would be signed with a key that its next start does not take."""
    key = SigningKey("A_KEY", b"k" * LEAST_BYTES)
    other = None if name == "no key" else SigningKey("A_KEY", b"o" * LEAST_BYTES)
    with keeping(memory, run, signing=key):
        stranger = Worker(memory, settle=False, key=proof_of(other))
        assert stranger.hear("refused")["reason"]
        stranger.socket.close()
        worker = Worker(memory, key=proof_of(key))
        assert worker.hear("welcome")["pid"] == os.getpid()
        worker.send(op="finish")
        worker.bye()


def test_a_saver_that_its_parent_does_not_reap_has_ended(memory: Path) -> None:
    program = "import os, time; pid = os.fork() or os._exit(0); print(pid, flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        began_s = time.monotonic()
        SaverStarter(str(memory), FACTS).wait_for_end(pid, timeout_s=30.0)
        assert time.monotonic() - began_s < 10.0
        assert Path(f"/proc/{pid}").exists()
        parent.kill()


def digested(memory: Path, index: int, step: int, *, rank: int = 0, world_size: int = 1) -> bool:
    facts = facts_of(step, rank=rank, world_size=world_size)
    return load_digests(str(memory / f"own-r{rank:05d}-s{index}"), facts) is not None


@pytest.fixture
def digests(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The steps whose digests the saver has computed; each takes a while."""
    steps: list[int] = []

    def compute(leased: LeasedSnapshot) -> LeasedSnapshot:
        steps.append(leased.facts.step)
        time.sleep(0.02)
        return with_digests(leased)

    monkeypatch.setattr(service, "with_digests", compute)
    return steps


def test_of_many_snapshots_few_are_digested_and_what_stays_is(
    memory: Path, run: Path, digests: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "DIGEST_SHARE", 0.2)
    with keeping(memory, run):
        worker = Worker(memory)
        began_s = time.monotonic()
        for step in range(1, 21):
            put(memory, facts_of(step), index=step % 2, digests=False)
            worker.send(op="snapshot", slot=step % 2, step=step, durable=False)
            assert worker.hear("seen")["step"] == step
        # Each digest takes 20 ms here, and a pause of 80 ms follows it.
        assert len(digests) <= 1 + (time.monotonic() - began_s) / 0.1
        until(lambda: digested(memory, 0, 20) and digested(memory, 1, 19))
        worker.send(op="finish")
        worker.bye()


def test_without_workers_all_snapshots_are_digested(
    memory: Path, run: Path, digests: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "DIGEST_SHARE", 1e-6)
    with keeping(memory, run):
        workers = [Worker(memory, rank=rank, ranks=(0, 1)) for rank in range(2)]
        for step in range(1, 5):
            for rank, worker in enumerate(workers):
                put(memory, facts_of(step, rank=rank, world_size=2), index=step % 2, digests=False)
                worker.send(op="snapshot", slot=step % 2, step=step, durable=False)
                worker.hear("seen")
        workers[1].socket.close()
        time.sleep(0.1)
        assert digests == [1]
        workers[0].socket.close()
        until(lambda: all(digested(memory, step % 2, step, rank=rank, world_size=2) for step in (3, 4) for rank in range(2)))
        last = Worker(memory, rank=0, ranks=(0, 1))
        last.send(op="finish")
        last.bye()


def test_an_undigested_snapshot_keeps_no_slot_and_overtakes_no_save(memory: Path, run: Path, digests: list[int]) -> None:
    with keeping(memory, run):
        workers = [Worker(memory, rank=rank, ranks=(0, 1)) for rank in range(2)]
        for step, reason in ((1, ""), (2, ""), (3, "interval"), (4, "")):
            for rank, worker in enumerate(workers):
                index = step % 3
                put(memory, facts_of(step, rank=rank, world_size=2, reason=reason), index=index, digests=False)
                worker.send(op="snapshot", slot=index, step=step, durable=bool(reason))
                worker.hear("seen")
        # The snapshots of step 4 need no digest, but they do not arrive before those of step 3.
        assert [worker.hear("saved")["step"] for worker in workers] == [3, 3]
        slot = Slot.make(str(memory / "own-r00001-s1"), size_bytes=layout_of().size_bytes)
        assert slot.lock(shared=False)
        slot.close()
        workers[0].send(op="finish")
        for worker in workers:
            worker.bye()
    assert checkpoints(run) == [3]
    assert not events(run, "checkpoint_failed")
