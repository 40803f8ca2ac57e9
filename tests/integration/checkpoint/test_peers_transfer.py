"""Snapshots on their way between hosts: whole or not at all, whatever happens to the line, the sender or the slot."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from elastictrain.checkpoint.memory.budget import HostMemory
from elastictrain.checkpoint.memory.folder import Held, look
from elastictrain.checkpoint.memory.layout import RankDigests, RankPart
from elastictrain.checkpoint.memory.records import load_layout
from elastictrain.checkpoint.memory.slot import Slot, SnapshotSource
from elastictrain.checkpoint.peers import server as server_module
from elastictrain.checkpoint.peers.client import OtherHosts
from elastictrain.checkpoint.peers.requests import Put, RefusedError
from elastictrain.checkpoint.peers.server import PeerServer, ReplicaSlots, choose_replica_slot
from elastictrain.checkpoint.verified_read import CheckpointFolder, DamagedFileError, read_chunks
from elastictrain.errors import CheckpointError, ObjectNotFoundError, TransientStorageError, TransportError
from elastictrain.net.channel import FRAME_BYTES
from tests.unit.checkpoint.peers.hosts import (
    LAYOUT,
    LIMITS,
    RUN,
    TOKEN,
    Host,
    Whole,
    connected,
    facts_of,
    fill_slot,
    host,
    layout_of,
    line_to,
    put_of,
)


def send(to: Host, step: int = 1, *, rank: int = 0) -> bool:
    put, data = put_of(facts_of(rank, step))
    with connected(to.peer) as connection:
        return connection.put(put, data, before_frame=lambda count: None)


def send_again(to: Host, step: int, *, token: bytes = TOKEN, before_frame: Callable[[int], None] = lambda count: None) -> None:
    """After a sender is gone, which the receiver may notice a little later."""
    put, data = put_of(facts_of(step=step))
    for _ in range(100):
        with connected(to.peer, token=token) as connection, suppress(TransientStorageError):
            assert connection.put(put, data, before_frame=before_frame)
            return
        time.sleep(0.02)
    pytest.fail("the first sender is never forgotten")


class LostError(Exception):
    """The sender is killed."""


def send_part(to: Host, step: int, *, frames: int) -> None:
    put, data = put_of(facts_of(step=step))
    left = iter(range(frames))

    def before_frame(count: int) -> None:
        if next(left, None) is None:
            raise LostError

    with connected(to.peer) as connection, pytest.raises(LostError):
        connection.put(put, data, before_frame=before_frame)


def test_there_and_back(tmp_path: Path) -> None:
    put, data = put_of(facts_of())
    frames: list[int] = []
    with host(tmp_path / "b") as b, connected(b.peer) as connection:
        assert connection.put(put, data, before_frame=frames.append)
        assert b.replicas() == {"replica-r00000-s0": 1}
        assert b.data_of("replica-r00000-s0") == data
        assert load_layout(str(b.folder), LAYOUT.digest) == LAYOUT
        back = bytearray(len(data))
        connection.get_into(memoryview(back), put.facts, start=0)
        assert back == data
        part = bytearray(1000)
        connection.get_into(memoryview(part), put.facts, start=FRAME_BYTES - 500)
        assert part == data[FRAME_BYTES - 500 : FRAME_BYTES + 500]
        connection.get_into(memoryview(bytearray()), put.facts, start=0)
    assert sum(frames) == len(data)
    assert max(frames) == FRAME_BYTES


def test_what_is_there_already_is_not_sent_again(tmp_path: Path) -> None:
    with host(tmp_path / "b") as b:
        assert send(b)
        assert not send(b)
        assert b.replicas() == {"replica-r00000-s0": 1}


def test_two_slots_take_turns_and_the_newest_stays(tmp_path: Path) -> None:
    with host(tmp_path / "b") as b:
        seen = []
        for step in (1, 2, 3, 4):
            assert send(b, step)
            seen.append(b.replicas())
    first, second = "replica-r00000-s0", "replica-r00000-s1"
    assert seen == [{first: 1}, {first: 1, second: 2}, {first: 3, second: 2}, {first: 3, second: 4}]


def test_where_the_next_one_goes() -> None:
    assert choose_replica_slot([None, None]) == 0
    assert choose_replica_slot([facts_of(step=3), None]) == 1
    assert choose_replica_slot([None, facts_of(step=3)]) == 0
    assert choose_replica_slot([facts_of(step=3), facts_of(step=2)]) == 1
    new = facts_of(step=2, incarnation="i00002-bb")
    assert choose_replica_slot([facts_of(step=9), new]) == 0
    # What all ranks have replicas of stays, though another is newer.
    assert choose_replica_slot([facts_of(step=3), facts_of(step=2)], safe=facts_of(step=2).id) == 0
    assert choose_replica_slot([facts_of(step=2), None], safe=facts_of(step=2).id) == 1


@pytest.mark.parametrize("frames", [0, 1, 2])
def test_a_sender_that_is_killed_leaves_the_newest_replica_whole(tmp_path: Path, frames: int) -> None:
    with host(tmp_path / "b") as b:
        assert send(b, 1)
        assert send(b, 2)
        send_part(b, 3, frames=frames)
        assert b.replicas() == {"replica-r00000-s1": 2}
        send_again(b, 4)
        assert b.replicas() == {"replica-r00000-s0": 4, "replica-r00000-s1": 2}


def test_a_line_that_is_cut_midway(tmp_path: Path) -> None:
    put, data = put_of(facts_of(step=2))
    with host(tmp_path / "b") as b:
        send(b, 1)
        with line_to(b.peer) as line, connected(line.peer) as connection:
            line.cut_at["there"] = FRAME_BYTES + 20_000
            with pytest.raises(TransientStorageError, match=rf"b \(127.0.0.1:{line.peer.port}\): .*step 2"):
                connection.put(put, data, before_frame=lambda count: None)
        assert b.replicas() == {"replica-r00000-s0": 1}


def test_a_bit_that_flips_on_the_way_of_a_replica(tmp_path: Path) -> None:
    put, data = put_of(facts_of())
    with host(tmp_path / "b") as b, line_to(b.peer) as line, connected(line.peer) as connection:
        line.flip_at["there"] = FRAME_BYTES + 50_000
        with pytest.raises(TransientStorageError, match="rank 0"):
            connection.put(put, data, before_frame=lambda count: None)
        assert b.replicas() == {}
        send_again(b, 1)


def test_a_bit_that_flipped_in_the_slot_of_the_sender(tmp_path: Path) -> None:
    put, data = put_of(facts_of(step=2))
    offset = LAYOUT.starts[1] + 5000
    data[offset] ^= 1
    with host(tmp_path / "b") as b, connected(b.peer) as connection:
        send(b, 1)
        with pytest.raises(TransientStorageError, match=r"-r00000-001.safetensors"):
            connection.put(put, data, before_frame=lambda count: None)
        assert b.replicas() == {"replica-r00000-s0": 1}


def test_a_connection_that_was_broken_off_is_not_made_anew(tmp_path: Path) -> None:
    with host(tmp_path / "b") as b, line_to(b.peer) as line, connected(line.peer) as connection:
        connection.break_off()
        with pytest.raises(TransientStorageError, match="broken off"):
            connection.get_into(memoryview(bytearray(1)), facts_of(), start=0)


def test_a_bit_that_flips_on_the_way_back_is_read_again(tmp_path: Path) -> None:
    with host(tmp_path / "b") as b, line_to(b.peer) as line, connected(line.peer) as connection:
        data = fill_slot(b.folder, "own-r00000-s0", facts_of())
        line.flip_at["back"] = 500_000
        back = bytearray(len(data))
        connection.get_into(memoryview(back), facts_of(), start=0)
        assert back == data
        assert line.connections == 2


def test_a_connection_that_breaks_is_made_anew_once(tmp_path: Path) -> None:
    with host(tmp_path / "b") as b, line_to(b.peer) as line, connected(line.peer) as connection:
        data = fill_slot(b.folder, "own-r00000-s0", facts_of())
        back = memoryview(bytearray(len(data)))
        line.cut_at["back"] = 500_000
        connection.get_into(back, facts_of(), start=0)
        assert back == data
        b.server.set_token(b"another")
        with pytest.raises(TransientStorageError, match=rf"b \(127.0.0.1:{line.peer.port}\): .*token"):
            connection.get_into(back, facts_of(), start=0)


def test_verified_reading_from_several_threads(tmp_path: Path) -> None:
    with host(tmp_path / "b") as b:
        data = fill_slot(b.folder, "own-r00000-s0", facts_of())
        put, _ = put_of(facts_of())
        chunks = [chunk for *_, found in RankPart(0, LAYOUT, put.digests).written("i00001-aa") for chunk in found]
        others = OtherHosts([b.peer], token=TOKEN, limits=LIMITS)
        source = SnapshotSource("host memory")
        source.resources.callback(others.close)
        read = others(Held(1, "own-r00000-s0", facts_of()))
        source.add(LAYOUT, read, incarnation="i00001-aa", rank=0, remote=True)
        taken: list[int] = []
        assert read_chunks(CheckpointFolder(source, ""), chunks, take=lambda chunk, found: taken.append(len(found)), threads=6)  # type: ignore[arg-type]
        assert sum(taken) == sum(chunk.size_bytes for chunk in chunks)
        assert source.remote
        # A bit that flips in host memory: no frame differs, but the chunk does.
        slot = Slot.make(str(b.folder / "own-r00000-s0"), size_bytes=len(data))
        with slot.data as view:
            view[LAYOUT.template[0].items[0].start + 7] ^= 1
        slot.close()
        with pytest.raises(DamagedFileError, match=r"i00001-aa-r00000-000.safetensors"):
            read_chunks(CheckpointFolder(source, ""), chunks, take=lambda chunk, found: None, threads=4)  # type: ignore[arg-type]
        source.resources.close()


def test_a_host_that_is_not_in_the_roster_has_nothing() -> None:
    with pytest.raises(TransientStorageError, match="7"):
        OtherHosts([], token=TOKEN)(Held(7, "own-r00000-s0", facts_of()))


def test_many_read_at_once(tmp_path: Path) -> None:
    """More than may be connected at once: the others wait."""
    with host(tmp_path / "b", connections=3) as b:
        data = fill_slot(b.folder, "own-r00000-s0", facts_of())

        def read(_: int) -> bool:
            back = bytearray(len(data))
            with connected(b.peer, limits=replace(LIMITS, handshake_s=20.0)) as connection:
                connection.get_into(memoryview(back), facts_of(), start=0)
            return back == data

        with ThreadPoolExecutor(8) as threads:
            assert all(threads.map(read, range(16)))


@pytest.mark.parametrize(
    "other", [{"step": 2}, {"rank": 1}, {"incarnation": "i00002-bb"}, {"incarnation": "../../etc"}, {"run": "another"}]
)
def test_what_is_not_there(tmp_path: Path, other: dict[str, str | int]) -> None:
    with host(tmp_path / "b") as b, connected(b.peer) as connection:
        fill_slot(b.folder, "own-r00000-s0", facts_of())
        key = replace(facts_of(), **other)  # type: ignore[arg-type]
        with pytest.raises(ObjectNotFoundError, match=rf"b \(127.0.0.1:{b.peer.port}\)"):
            connection.get_into(memoryview(bytearray(10)), key, start=0)


def test_a_torn_snapshot_is_not_there(tmp_path: Path) -> None:
    with host(tmp_path / "b") as b, connected(b.peer) as connection:
        data = fill_slot(b.folder, "own-r00000-s0", facts_of())
        slot = Slot.make(str(b.folder / "own-r00000-s0"), size_bytes=len(data))
        assert slot.lock(shared=False)
        with pytest.raises(ObjectNotFoundError):
            connection.get_into(memoryview(bytearray(10)), facts_of(), start=0)
        slot.begin()
        slot.close()
        with pytest.raises(ObjectNotFoundError):
            connection.get_into(memoryview(bytearray(10)), facts_of(), start=0)


def test_bytes_past_the_end(tmp_path: Path) -> None:
    with host(tmp_path / "b") as b, connected(b.peer) as connection:
        fill_slot(b.folder, "own-r00000-s0", facts_of())
        with pytest.raises(TransientStorageError, match=f"has {LAYOUT.size_bytes} bytes, not {LAYOUT.size_bytes + 1}"):
            connection.get_into(memoryview(bytearray(10)), facts_of(), start=LAYOUT.size_bytes - 9)


def test_ranks_of_others_are_refused_and_dropped(tmp_path: Path) -> None:
    with host(tmp_path / "b", kept=(0, 1)) as b:
        send(b, rank=0)
        send(b, rank=1)
        fill_slot(b.folder, "own-r00005-s0", facts_of(5))
        b.server.replicas.kept = frozenset({1})
        put, data = put_of(facts_of(0, 2))
        sent: list[int] = []
        with connected(b.peer) as connection, pytest.raises(TransientStorageError, match="rank 0"):
            connection.put(put, data, before_frame=sent.append)
        assert sent == []
        assert b.replicas() == {"replica-r00000-s0": 1, "replica-r00001-s0": 1}
        b.server.replicas.drop_others()
        assert b.replicas() == {"replica-r00001-s0": 1}
        assert sorted(path.name for path in b.folder.iterdir() if "layout" not in path.name) == [
            "own-r00005-s0",
            "own-r00005-s0.digests",
            "replica-r00001-s0",
            "replica-r00001-s0.digests",
        ]


def test_ranks_that_are_shared_out_anew_while_a_replica_comes(tmp_path: Path) -> None:
    put, data = put_of(facts_of())
    with host(tmp_path / "b") as b, connected(b.peer) as connection:

        def drop(count: int) -> None:
            b.server.replicas.kept = frozenset()
            b.server.replicas.drop_others()

        with pytest.raises(TransientStorageError, match="any more"):
            connection.put(put, data, before_frame=drop)
        assert b.replicas() == {}


def test_a_replica_that_is_being_read_is_not_overwritten(tmp_path: Path) -> None:
    with host(tmp_path / "b") as b:
        send(b, 1)
        send(b, 2)
        slot = Slot.open(str(b.folder / "replica-r00000-s0"))
        assert slot.lock(shared=True)
        with pytest.raises(TransientStorageError, match="older replica"):
            send(b, 3)
        slot.close()
        assert send(b, 3)


def test_a_second_sender_of_the_same_rank_is_refused(tmp_path: Path) -> None:
    put, data = put_of(facts_of())
    refused: list[str] = []
    with host(tmp_path / "b") as b, connected(b.peer) as connection:

        def meanwhile(count: int) -> None:
            if not refused:
                with pytest.raises(TransientStorageError) as caught:
                    send(b, 2)
                refused.append(str(caught.value))

        assert connection.put(put, data, before_frame=meanwhile)
        assert len(refused) == 1
        assert b.replicas() == {"replica-r00000-s0": 1}


HUGE_ITEM = structs.replace(LAYOUT.items[0], shape=(2**50, 100), sizes=(2**50, 100))
HUGE = structs.replace(LAYOUT, items=(HUGE_ITEM,), chunk_bytes=2**60)
HUGE_PUT = Put(facts_of(layout=HUGE), HUGE, RankDigests(("0" * 32,), ("0" * 32,), ("0" * 32,)))


def test_no_memory_is_answered(tmp_path: Path) -> None:
    with host(tmp_path / "b") as b, connected(b.peer) as connection:
        with pytest.raises(TransientStorageError, match="GB"):
            connection.put(HUGE_PUT, Whole(), before_frame=lambda count: None)
        assert send(b)


def test_memory_that_the_system_does_not_give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "memory_of", lambda folder, held_bytes: HostMemory(2**62, 2**62, 2**62))
    slots = ReplicaSlots(str(tmp_path), run=RUN)
    slots.kept = frozenset({0})
    for _ in range(2):
        with pytest.raises(CheckpointError, match="bytes"):
            slots.take(HUGE_PUT, go=lambda: None, receive=len)
    assert list(tmp_path.iterdir()) == []


def test_memory_that_a_slot_has_is_not_asked_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = [HostMemory(10**9, 10**9, 10**9)]
    monkeypatch.setattr(server_module, "memory_of", lambda folder, held_bytes: replace(left[0], held_bytes=held_bytes))
    slots = ReplicaSlots(str(tmp_path), run=RUN)
    slots.kept = frozenset({0})

    def take(step: int, kilobytes: int = 100) -> bool:
        put, data = put_of(facts_of(step=step, layout=layout_of(kilobytes)), layout=layout_of(kilobytes))
        at = 0

        def receive(part: memoryview) -> int:
            nonlocal at
            part[:] = data[at : at + len(part)]
            at += len(part)
            return len(part)

        return slots.take(put, go=lambda: None, receive=receive)

    assert take(1)
    left[0] = HostMemory(10**9, 0, 0)
    with pytest.raises(CheckpointError, match=r"0\.00 GB"):
        take(2)
    left[0] = HostMemory(10**9, 10**9, 10**9)
    assert take(2)
    left[0] = HostMemory(10**9, 0, 0)
    assert take(3)
    left[0] = HostMemory(10**9, 10**8, 0)
    assert take(4, kilobytes=80)
    with pytest.raises(CheckpointError):
        take(5, kilobytes=200)


def test_an_address_of_another_host(tmp_path: Path) -> None:
    with pytest.raises(TransportError, match=r"203\.0\.113\.1"):
        PeerServer(str(tmp_path), run=RUN, address="203.0.113.1")


def test_nobody_listens(tmp_path: Path) -> None:
    with host(tmp_path / "b") as b:
        pass
    with (
        connected(b.peer) as connection,
        pytest.raises(TransientStorageError, match=rf"b \(127.0.0.1:{b.peer.port}\).*refused"),
    ):
        connection.get_into(memoryview(bytearray(1)), facts_of(), start=0)


def test_a_new_token_ends_what_is_under_way(tmp_path: Path) -> None:
    put, data = put_of(facts_of())
    with host(tmp_path / "b") as b, connected(b.peer) as connection:
        with pytest.raises(TransientStorageError):
            connection.put(put, data, before_frame=lambda count: b.server.set_token(b"new"))
        assert b.replicas() == {}
        # The same token once more changes nothing.
        send_again(b, 1, token=b"new", before_frame=lambda count: b.server.set_token(b"new"))


def test_closing_while_connections_are_there(tmp_path: Path) -> None:
    put, data = put_of(facts_of())
    with host(tmp_path / "b") as b, connected(b.peer) as connection, connected(b.peer) as idle:
        with pytest.raises(ObjectNotFoundError):
            idle.get_into(memoryview(bytearray(1)), facts_of(), start=0)
        closed: list[bool] = []
        with pytest.raises(TransientStorageError):
            connection.put(put, data, before_frame=lambda count: closed.append(b.server.close()))
        assert all(closed)
        with pytest.raises(TransientStorageError, match="refused"):
            idle.get_into(memoryview(bytearray(1)), facts_of(), start=0)


def test_a_replica_whose_slot_was_removed_while_it_came_is_refused(tmp_path: Path) -> None:
    """Ranks were shared out anew, and again: nobody would find the file that it came into."""
    put, data = put_of(facts_of())
    replicas = ReplicaSlots(str(tmp_path), run=RUN)
    replicas.kept = frozenset({0})
    position = 0

    def receive(part: memoryview) -> int:
        nonlocal position
        if position == 0:
            replicas.kept = frozenset()
            replicas.drop_others()
            replicas.kept = frozenset({0})
        data.read_into(part, start=position)
        position += len(part)
        return len(part)

    with pytest.raises(RefusedError):
        replicas.take(put, go=lambda: None, receive=receive)
    assert look(str(tmp_path), host=0) == []
