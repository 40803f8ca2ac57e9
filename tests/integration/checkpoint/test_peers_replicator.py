"""Replicas are sent in rounds, again if need be, and nothing that goes wrong lasts longer than it must."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from elastictrain.checkpoint.memory.folder import Held
from elastictrain.checkpoint.memory.records import load_digests
from elastictrain.checkpoint.memory.slot import Slot
from elastictrain.checkpoint.peers import pace
from elastictrain.checkpoint.peers import replicator as replicator_module
from elastictrain.checkpoint.peers.pace import Pacer
from elastictrain.checkpoint.peers.placement import Peer
from elastictrain.checkpoint.peers.replicator import Replicator
from elastictrain.checkpoint.peers.requests import Limits
from tests.unit.checkpoint.peers.hosts import LAYOUT, LIMITS, TOKEN, Host, facts_of, fill_slot, host, line_to, put_of

FAST = 1e9  # bytes/s


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicator_module, "DEADLINE_S", 10.0)
    monkeypatch.setattr(replicator_module, "QUIET_MOST_S", 0.2)
    monkeypatch.setattr(replicator_module, "FIRST_PAUSE_S", 0.05)
    monkeypatch.setattr(replicator_module, "LONGEST_PAUSE_S", 0.1)


class Desk:
    """Hears what a replicator tells, and lets tests wait for it."""

    def __init__(self) -> None:
        self.replicated: list[tuple[int, int, int]] = []
        self.failed: list[tuple[int, int, str]] = []
        self._changed = threading.Condition()

    def on_replicated(self, rank: int, step: int, size_bytes: int, seconds: float) -> None:
        self._add(self.replicated, (rank, step, size_bytes))

    def on_failed(self, rank: int, step: int, error: str) -> None:
        self._add(self.failed, (rank, step, error))

    def wait(self, until: Callable[[], bool], *, limit_s: float = 10.0) -> None:
        with self._changed:
            assert self._changed.wait_for(until, limit_s), (self.replicated, self.failed)

    def wait_replicated(self, *steps: tuple[int, int]) -> None:
        self.wait(lambda: {(rank, step) for rank, step, _ in self.replicated} >= set(steps))

    def _add(self, where: list, what: tuple) -> None:  # type: ignore[type-arg]
        with self._changed:
            where.append(what)
            self._changed.notify_all()


@contextmanager
def replicating(
    folder: Path, target: Peer, desk: Desk, *, limits: Limits = LIMITS, pacer: Pacer | None = None
) -> Iterator[Replicator]:
    replicator = Replicator(
        str(folder),
        target=target,
        token=TOKEN,
        replicated=desk.on_replicated,
        failed=desk.on_failed,
        pacer=pacer or Pacer(FAST),
        limits=limits,
    )
    try:
        yield replicator
    finally:
        assert replicator.close()


@pytest.fixture
def a(tmp_path: Path) -> Path:
    folder = tmp_path / "a"
    folder.mkdir(mode=0o700)
    return folder


@pytest.fixture
def b(tmp_path: Path) -> Iterator[Host]:
    with host(tmp_path / "b", kept=(0, 1)) as found:
        yield found


def offer(replicator: Replicator, folder: Path, step: int, *, rank: int = 0, index: int = 0) -> bytearray:
    name = f"own-r{rank:05d}-s{index}"
    data = fill_slot(folder, name, facts_of(rank, step))
    replicator.send([Held(0, name, facts_of(rank, step))])
    return data


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 5
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_what_is_offered_arrives(a: Path, b: Host) -> None:
    desk = Desk()
    with line_to(b.peer) as line, replicating(a, line.peer, desk) as replicator:
        for step in (1, 2, 3):
            data = offer(replicator, a, step, index=step % 2)
            desk.wait_replicated((0, step))
            assert data in [b.data_of(slot) for slot in b.replicas()]
        # What has arrived is not sent again, but who asks is answered.
        replicator.send([Held(0, "own-r00000-s1", facts_of(0, 3))])
        desk.wait(lambda: len(desk.replicated) == 4)
        offer(replicator, a, 4)
        desk.wait_replicated((0, 4))
    sizes = [(0, step, LAYOUT.size_bytes) for step in (1, 2, 3, 4)]
    assert desk.replicated == [*sizes[:3], (0, 3, 0), sizes[3]]
    assert desk.failed == []


def offer_both(replicator: Replicator, folder: Path, step: int, *, index: int = 0) -> None:
    held = [Held(0, f"own-r{rank:05d}-s{index}", facts_of(rank, step)) for rank in (0, 1)]
    for one in held:
        fill_slot(folder, one.slot, one.facts)
    replicator.send(held)


def test_all_ranks_of_a_step_arrive(a: Path, b: Host) -> None:
    desk = Desk()
    with replicating(a, b.peer, desk) as replicator:
        offer_both(replicator, a, 2)
        desk.wait_replicated((0, 2), (1, 2))
    assert b.replicas() == {"replica-r00000-s0": 2, "replica-r00001-s0": 2}


def test_the_newest_wins_while_the_buddy_is_away(a: Path, b: Host) -> None:
    desk = Desk()
    b.server.replicas.kept = frozenset()
    with replicating(a, b.peer, desk) as replicator:
        for step in (1, 2, 3):
            offer(replicator, a, step, index=step % 2)
            desk.wait(lambda step=step: desk.failed[-1:] != [] and desk.failed[-1][1] >= step - 1)  # type: ignore[misc]
        b.server.replicas.kept = frozenset({0})
        desk.wait_replicated((0, 3))
    assert [step for _, step, _ in desk.replicated] == [3]
    assert b.replicas() == {"replica-r00000-s0": 3}


def test_a_failure_is_told_once_and_tried_again(a: Path, b: Host) -> None:
    desk = Desk()
    b.server.replicas.kept = frozenset()
    with replicating(a, b.peer, desk) as replicator:
        offer(replicator, a, 1)
        desk.wait(lambda: desk.failed != [])
        time.sleep(0.4)
        assert len(desk.failed) == 1
        assert "rank 0" in desk.failed[0][2]
        b.server.replicas.kept = frozenset({0})
        desk.wait_replicated((0, 1))


def test_a_buddy_that_comes_late(a: Path, b: Host, tmp_path: Path) -> None:
    """The token of a new incarnation may reach the buddy a little later."""
    desk = Desk()
    b.server.set_token(b"of the incarnation before")
    with replicating(a, b.peer, desk) as replicator:
        offer(replicator, a, 1)
        desk.wait(lambda: desk.failed != [])
        assert f"b (127.0.0.1:{b.peer.port})" in desk.failed[0][2]
        b.server.set_token(TOKEN)
        desk.wait_replicated((0, 1))


def test_missing_digests_are_computed_once_the_slot_is_free(a: Path, b: Host) -> None:
    desk = Desk()
    fill_slot(a, "own-r00000-s0", facts_of(), digests=False)
    slot = Slot.make(str(a / "own-r00000-s0"), size_bytes=LAYOUT.size_bytes)
    assert slot.lock(shared=False)
    with replicating(a, b.peer, desk) as replicator:
        replicator.send([Held(0, "own-r00000-s0", facts_of())])
        time.sleep(0.15)
        assert (desk.replicated, desk.failed) == ([], [])
        slot.unlock()
        desk.wait_replicated((0, 1))
    slot.close()
    assert load_digests(str(a / "own-r00000-s0"), facts_of()) == put_of(facts_of())[0].digests


def test_what_is_overwritten_is_passed_over(a: Path, b: Host) -> None:
    desk = Desk()
    with replicating(a, b.peer, desk) as replicator:
        fill_slot(a, "own-r00000-s0", facts_of(step=1))
        slot = Slot.make(str(a / "own-r00000-s0"), size_bytes=LAYOUT.size_bytes)
        assert slot.lock(shared=False)
        replicator.send([Held(0, "own-r00000-s0", facts_of(step=1))])
        time.sleep(0.1)
        slot.begin()
        slot.close()
        replicator.send([Held(0, "own-r00000-s0", facts_of(step=1))])
        time.sleep(0.1)
        replicator.send([Held(0, "own-r00000-s1", facts_of(step=2))])
        time.sleep(0.1)
        offer(replicator, a, 3)
        desk.wait_replicated((0, 3))
    assert [step for _, step, _ in desk.replicated] == [3]
    assert [step for _, step, _ in desk.failed] == [1, 1, 2]


def test_slots_are_held_while_they_are_sent_and_no_longer(a: Path, b: Host) -> None:
    desk, slow = Desk(), Pacer(1e6)
    with replicating(a, b.peer, desk, pacer=slow) as replicator:
        offer_both(replicator, a, 1)
        wait_for(b.folder / "replica-r00000-s0.digests")
        # Both ranks' slots, though the second one's turn is far off.
        slots = [Slot.open(str(a / f"own-r0000{rank}-s0")) for rank in (0, 1)]
        assert not any(slot.lock(shared=False) for slot in slots)
        began = time.monotonic()
        assert replicator.close()
        assert time.monotonic() - began < 1
        for slot in slots:
            assert slot.lock(shared=False)
            slot.close()
    assert (desk.replicated, desk.failed) == ([], [])
    assert b.replicas() == {}


def test_a_replica_that_takes_too_long_is_broken_off(a: Path, b: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk()
    monkeypatch.setattr(replicator_module, "DEADLINE_S", 0.1)
    with replicating(a, b.peer, desk, pacer=Pacer(1e6)) as replicator:
        offer(replicator, a, 1)
        desk.wait(lambda: desk.failed != [])
        assert "0.1 s" in desk.failed[0][2]
        assert "1 MB/s" in desk.failed[0][2]
    assert b.replicas() == {}


def test_what_fails_makes_way_for_what_came_meanwhile(a: Path, b: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk()
    monkeypatch.setattr(replicator_module, "DEADLINE_S", 0.5)
    with replicating(a, b.peer, desk, pacer=Pacer(1e6)) as replicator:
        offer(replicator, a, 1)
        wait_for(b.folder / "replica-r00000-s0")
        offer(replicator, a, 2, index=1)
        desk.wait(lambda: len(desk.failed) > 1 or any(step == 2 for _, step, _ in desk.failed), limit_s=5.0)
        assert [step for _, step, _ in desk.failed] in ([1, 2], [2])


def test_a_line_that_breaks(a: Path, b: Host) -> None:
    desk = Desk()
    with line_to(b.peer) as line:
        line.cut_at["there"] = 1_500_000
        with replicating(a, line.peer, desk) as replicator:
            offer(replicator, a, 1)
            desk.wait_replicated((0, 1))
            assert len(desk.failed) == 1
            assert line.connections == 2


def test_a_damaged_snapshot_is_told_of_and_does_not_stop_newer_ones(a: Path, b: Host) -> None:
    desk = Desk()
    with replicating(a, b.peer, desk) as replicator:
        fill_slot(a, "own-r00000-s0", facts_of(step=1))
        slot = Slot.make(str(a / "own-r00000-s0"), size_bytes=LAYOUT.size_bytes)
        with slot.data as data:
            data[LAYOUT.starts[1] + 5000] ^= 1
        slot.close()
        replicator.send([Held(0, "own-r00000-s0", facts_of(step=1))])
        desk.wait(lambda: desk.failed != [])
        assert "i00001-aa-r00000-001.safetensors" in desk.failed[0][2]
        offer(replicator, a, 2, index=1)
        desk.wait_replicated((0, 2))


def test_a_slot_that_is_being_written_is_told_of_each_time(a: Path, b: Host) -> None:
    # Whoever asked waits for an answer, and asks for the same step again when there is no newer one.
    desk = Desk()
    fill_slot(a, "own-r00000-s0", facts_of(step=1))
    slot = Slot.open(str(a / "own-r00000-s0"))
    assert slot.lock(shared=False)
    with replicating(a, b.peer, desk) as replicator:
        for number in (1, 2):
            replicator.send([Held(0, "own-r00000-s0", facts_of(step=1))])
            desk.wait(lambda number=number: len(desk.failed) == number)  # type: ignore[misc]
        assert desk.failed[0][:2] == (0, 1)
        assert "own-r00000-s0" in desk.failed[0][2]
        slot.unlock()
        replicator.send([Held(0, "own-r00000-s0", facts_of(step=1))])
        desk.wait_replicated((0, 1))
    slot.close()


def test_a_slot_that_stays_locked_is_told_of(a: Path, b: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk()
    fill_slot(a, "own-r00000-s0", facts_of(step=1), digests=False)
    slot = Slot.make(str(a / "own-r00000-s0"), size_bytes=LAYOUT.size_bytes)
    assert slot.lock(shared=False)
    monkeypatch.setattr(replicator_module, "LOCKED_MOST_S", 0.05)
    with replicating(a, b.peer, desk) as replicator:
        replicator.send([Held(0, "own-r00000-s0", facts_of(step=1))])
        desk.wait(lambda: desk.failed != [])
    slot.close()
    ((rank, step, reason),) = desk.failed
    assert (rank, step) == (0, 1)
    assert "0.05 s" in reason


@pytest.mark.parametrize("digests", [True, False])
def test_a_layout_that_is_gone_is_told_of(a: Path, b: Host, digests: bool) -> None:
    desk = Desk()
    with replicating(a, b.peer, desk) as replicator:
        fill_slot(a, "own-r00000-s0", facts_of(), digests=digests)
        (a / f"layout-{LAYOUT.digest}.json").unlink()
        replicator.send([Held(0, "own-r00000-s0", facts_of())])
        desk.wait(lambda: desk.failed != [])
        assert "layout-" in desk.failed[0][2]


def test_a_round_waits_for_quiet_steps_but_not_for_ever(a: Path, b: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk()
    with monkeypatch.context() as patched, replicating(a, b.peer, desk) as replicator:
        patched.setattr(replicator_module, "QUIET_MOST_S", 30.0)
        replicator.step_took(0.1)
        offer(replicator, a, 1)
        time.sleep(0.1)
        assert desk.replicated == []
        for _ in range(pace.BASELINE - 1):
            replicator.step_took(0.1)
        desk.wait_replicated((0, 1))
    with replicating(a, b.peer, desk) as replicator:
        replicator.step_took(0.1)
        offer(replicator, a, 2)
        desk.wait_replicated((0, 2))


def test_steps_that_slow_down_slow_the_sender_down(a: Path, b: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "LEAST_RATE", 1e5)
    monkeypatch.setattr(pace, "WINDOW", 4)
    monkeypatch.setattr(pace, "BASELINE", 2)
    desk, pacer = Desk(), Pacer(5e5)
    with replicating(a, b.peer, desk, pacer=pacer) as replicator:
        for _ in range(8):
            replicator.step_took(1.0)
        offer(replicator, a, 1)
        wait_for(b.folder / "replica-r00000-s0.digests")
        time.sleep(0.05)
        deadline = time.monotonic() + 5
        while pacer.rate == 5e5 and time.monotonic() < deadline:
            replicator.step_took(1.1)
            time.sleep(0.05)
        assert pacer.rate == pytest.approx(1.25e5)


def test_steps_after_a_round_are_no_steps_while_sending(a: Path, b: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "WINDOW", 4)
    monkeypatch.setattr(pace, "BASELINE", 2)
    desk, pacer = Desk(), Pacer(1e8)
    with replicating(a, b.peer, desk, pacer=pacer) as replicator:
        for _ in range(8):
            replicator.step_took(1.0)
        offer(replicator, a, 1)
        desk.wait_replicated((0, 1))
        time.sleep(0.1)
        for _ in range(6):
            replicator.step_took(2.0)
        assert pacer.rate == 1e8


def test_closing_before_anything_was_offered(a: Path, b: Host) -> None:
    with replicating(a, b.peer, Desk()):
        pass
    desk = Desk()
    assert Replicator(
        str(a), target=b.peer, token=TOKEN, replicated=desk.on_replicated, failed=desk.on_failed, pacer=Pacer()
    ).close()


def test_closing_while_a_buddy_says_nothing(a: Path) -> None:
    limits = replace(LIMITS, handshake_s=60.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(5.0)
        buddy = Peer("b", "127.0.0.1", silent.getsockname()[1], (0,), 1)
        with replicating(a, buddy, Desk(), limits=limits) as replicator:
            offer(replicator, a, 1)
            with silent.accept()[0]:
                time.sleep(0.1)
                began = time.monotonic()
                assert replicator.close()
                assert time.monotonic() - began < 1
