import ctypes
import os
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from elastictrain.checkpoint import copier
from elastictrain.checkpoint.copier import Arena, free_indices, slot_indices
from elastictrain.checkpoint.layout import Item
from elastictrain.checkpoint.memory.folder import SlotName, remove_slot, slot_names
from elastictrain.checkpoint.memory.layout import RankLayout
from elastictrain.checkpoint.memory.slot import Slot
from tests.unit.checkpoint.memory.madeslots import facts_of, layout_of, put

LAYOUT = layout_of()
CPU = torch.device("cpu")


def test_slots_that_fit_are_used_again_and_others_left_alone(tmp_path: Path) -> None:
    assert slot_indices(str(tmp_path), rank=0, size_bytes=LAYOUT.file_bytes, wanted=2) == ([0, 1], [])
    put(tmp_path, facts_of(3), index=1)
    (tmp_path / "own-r00000-s0").write_bytes(b"another size")
    assert slot_indices(str(tmp_path), rank=0, size_bytes=LAYOUT.file_bytes, wanted=2) == ([1, 2], [1])
    put(tmp_path, facts_of(3), index=4)
    put(tmp_path, facts_of(3), index=5)
    assert slot_indices(str(tmp_path), rank=0, size_bytes=LAYOUT.file_bytes, wanted=2) == ([1, 4], [1, 4])


def test_a_slot_that_another_process_allocates_is_one_of_its_slots(tmp_path: Path) -> None:
    put(tmp_path, facts_of(3), index=0)
    (tmp_path / "own-r00000-s1").touch()
    (tmp_path / "own-r00000-s2").write_bytes(b"another size")
    find = partial(slot_indices, str(tmp_path), rank=0, size_bytes=LAYOUT.file_bytes, wanted=3)
    assert find(allocating=True)[0] == [0, 1, 3]
    # For a rank that starts it is what a killed process has left, and holds no memory.
    assert find() == ([0, 3, 4], [0])


def test_names_that_older_starts_have_taken_are_freed_the_oldest_first(tmp_path: Path) -> None:
    def free(wanted: int, *kept_steps: int) -> list[int]:
        free_indices(str(tmp_path), rank=0, size_bytes=99, wanted=wanted, kept_steps=kept_steps)
        return slot_indices(str(tmp_path), rank=0, size_bytes=99, wanted=wanted)[0]

    for index in range(8):
        put(tmp_path, facts_of(30 - index, incarnation=f"00000{index % 4}-aa"), index=index)
    put(tmp_path, facts_of(1, rank=1, world_size=2), index=0)
    assert free(2, 30) == [8, 9]
    (tmp_path / "own-r00000-s8").write_bytes(b"torn")
    put(tmp_path, facts_of(99, incarnation="000009-aa"), index=9)
    # Step 30 is of the oldest incarnation, and was restored; then come step 26 of the same, and step 25 of the next.
    assert free(3, 30) == [4, 5, 8]
    assert len(slot_names(str(tmp_path))) == 8
    assert free(10, 30) == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert free(10) == list(range(10))
    assert slot_names(str(tmp_path)) == [SlotName("own", 1, 0)]


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_slots_become_ready_and_keep_what_is_in_them(tmp_path: Path) -> None:
    put(tmp_path, facts_of(3), index=1)
    arena = Arena(str(tmp_path), LAYOUT, rank=0, indices=[1, 0], device=CPU)
    assert arena.slots[0] is None
    arena.start()
    wait_for(partial(arena.slots.__getitem__, 1))
    first, second = arena.slots[0], arena.slots[1]
    assert first is not None
    assert second is not None
    assert first.facts == facts_of(3)
    assert second.facts is None
    assert not arena.broken
    assert (tmp_path / f"layout-{LAYOUT.digest}.json").exists()
    arena.close()
    assert arena.slots[0] is None
    assert Slot.open(f"{tmp_path}/own-r00000-s1").facts == facts_of(3)


def test_slots_are_made_once_however_many_generations_begin_with_them(tmp_path: Path) -> None:
    arena = Arena(str(tmp_path), LAYOUT, rank=0, indices=[0], device=CPU)
    arena.start()
    wait_for(partial(arena.slots.__getitem__, 0))
    slot = arena.slots[0]
    arena.start()
    assert arena.slots == [slot]
    arena.close()


OTHER_LAYOUT = RankLayout((Item("other", "float32", (3,), (0,), (3,)),), shard_bytes=500)


def test_memory_is_allocated_before_slots_are_ready(tmp_path: Path) -> None:
    arena = Arena(str(tmp_path), LAYOUT, rank=0, indices=[1, 0], device=CPU)
    arena.allocate()
    wait_for(lambda: len(arena._made) == 2)
    assert [one.index for one in slot_names(str(tmp_path))] == [0, 1]
    assert arena.slots == [None, None]
    arena.start()
    wait_for(lambda: None not in arena.slots)
    assert [slot.path[-1] for slot in arena.slots if slot is not None] == ["1", "0"]
    arena.close()


def test_the_next_generation_takes_over_slots_that_are_being_allocated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on, really = threading.Event(), threading.Event(), os.posix_fallocate

    def slowly(descriptor: int, start: int, size: int) -> None:
        begun.set()
        assert go_on.wait(10)
        really(descriptor, start, size)

    monkeypatch.setattr(os, "posix_fallocate", slowly)
    arena = Arena(str(tmp_path), LAYOUT, rank=0, indices=[0, 1], device=CPU)
    arena.allocate()
    assert begun.wait(10)
    indices, held = slot_indices(str(tmp_path), rank=0, size_bytes=LAYOUT.file_bytes, wanted=2, allocating=True)
    assert (indices, held) == ([0, 1], [0])
    assert arena.take_over(LAYOUT, [SlotName("own", 0, index) for index in indices])
    go_on.set()
    wait_for(lambda: len(arena._made) == 2)
    remove_slot(str(tmp_path), SlotName("own", 0, 1))
    assert not arena.take_over(LAYOUT, [SlotName("own", 0, index) for index in indices])
    arena.close()


def test_memory_that_was_only_allocated_is_given_back(tmp_path: Path) -> None:
    arena = Arena(str(tmp_path), LAYOUT, rank=0, indices=[0], device=CPU)
    arena.allocate()
    wait_for(lambda: arena._made)
    mapped = weakref.ref(arena._made[0].map.obj)
    assert mapped() is not None
    arena.close()
    assert mapped() is None


@pytest.mark.parametrize(
    ("layout", "names", "fits"),
    [
        (LAYOUT, [SlotName("own", 0, 1), SlotName("own", 0, 0)], True),
        (OTHER_LAYOUT, [SlotName("own", 0, 1), SlotName("own", 0, 0)], False),
        # Ranks refer to slots by their place.
        (LAYOUT, [SlotName("own", 0, 0), SlotName("own", 0, 1)], False),
        (LAYOUT, [SlotName("own", 0, 1)], False),
        (LAYOUT, [SlotName("own", 0, 1), SlotName("own", 0, 0), SlotName("own", 0, 2)], False),
        (LAYOUT, [SlotName("own", 1, 1), SlotName("own", 1, 0)], False),
    ],
)
@pytest.mark.parametrize("started", [False, True])
def test_slots_are_kept_for_the_same_rank_layout_and_places(
    started: bool, layout: RankLayout, names: list[SlotName], fits: bool, tmp_path: Path
) -> None:
    arena = Arena(str(tmp_path), LAYOUT, rank=0, indices=[1, 0], device=CPU)
    if started:
        arena.start()
        wait_for(partial(arena.slots.__getitem__, 1))
    assert arena.take_over(layout, names) is fits
    arena.broken = "own-r00000-s1 was removed"
    assert not arena.take_over(layout, names)
    arena.broken = ""
    arena.close()
    assert not arena.take_over(layout, names)


@pytest.mark.parametrize("wanted", [1, 2])
def test_slots_of_another_process_are_opened_after_their_first_snapshot(wanted: int, tmp_path: Path) -> None:
    arena = Arena(str(tmp_path), LAYOUT, rank=0, indices=[1, 0], device=CPU, of_another=True)
    arena.start()
    with closing(Slot.make(f"{tmp_path}/own-r00000-s1", size_bytes=LAYOUT.size_bytes)):
        time.sleep(2 * copier._LOOK_S)
        assert arena.slots == [None, None]
    put(tmp_path, facts_of(3), index=1)
    wait_for(partial(arena.slots.__getitem__, 0))
    assert not (tmp_path / "own-r00000-s0").exists()
    names = [SlotName("own", 0, 1), SlotName("own", 0, 0)][:wanted]
    assert arena.take_over(LAYOUT, names)
    assert len(arena.slots) == wanted
    wait_for(lambda: None not in arena.slots)
    assert (tmp_path / "own-r00000-s0").exists() is (wanted == 2)
    first = arena.slots[0]
    assert first is not None
    assert first.facts == facts_of(3)
    arena.close()


def test_a_slot_that_the_other_process_removes_meanwhile_is_not_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copier, "_LOOK_S", 0.01)
    monkeypatch.setattr(Arena, "_is_made", lambda *_: True)
    arena = Arena(str(tmp_path), LAYOUT, rank=0, indices=[0], device=CPU, of_another=True)
    arena.start()
    time.sleep(0.05)
    assert (slot_names(str(tmp_path)), arena.slots, arena.broken) == ([], [None], "")
    (tmp_path / "own-r00000-s0").write_bytes(b"another size")
    time.sleep(0.05)
    assert (tmp_path / "own-r00000-s0").read_bytes() == b"another size"
    assert arena.take_over(LAYOUT, [SlotName("own", 0, 0)])
    wait_for(lambda: arena.slots[0])
    arena.close()


def test_slots_of_another_process_that_are_not_wanted_or_removed_are_not_taken_over(tmp_path: Path) -> None:
    for index in (0, 1):
        put(tmp_path, facts_of(3), index=index)
    arena = Arena(str(tmp_path), LAYOUT, rank=0, indices=[0, 1], device=CPU, of_another=True)
    arena.start()
    wait_for(partial(arena.slots.__getitem__, 1))
    assert not arena.take_over(LAYOUT, [SlotName("own", 0, 0)])
    remove_slot(str(tmp_path), SlotName("own", 0, 1))
    put(tmp_path, facts_of(4), index=1)
    assert not arena.take_over(LAYOUT, [SlotName("own", 0, 0), SlotName("own", 0, 1)])
    arena.close()


def test_memory_that_is_not_there_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int, __: int, ___: int) -> None:
        raise OSError(28, "ENOSPC")

    monkeypatch.setattr("os.posix_fallocate", full)
    arena = Arena(str(tmp_path), LAYOUT, rank=0, indices=[0], device=CPU)
    arena.start()
    wait_for(lambda: arena.broken)
    assert "ENOSPC" in arena.broken
    assert arena.slots[0] is None
    arena.close()


@dataclass
class Runtime:
    """The CUDA runtime, as far as it locks pages; `on_register` happens at each segment."""

    on_register: Callable[[], int]
    locked: set[int] = field(default_factory=set)
    segments: list[tuple[int, int]] = field(default_factory=list)

    def cudaHostRegister(self, address: int, size_bytes: int, flags: int) -> int:
        code = self.on_register()
        if not code:
            self.locked.add(address)
            self.segments.append((address, address + size_bytes))
        return code

    def cudaHostUnregister(self, address: int) -> None:
        self.locked.remove(address)


def on_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runtime: Runtime) -> Arena:
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    return Arena(str(tmp_path), LAYOUT, rank=0, indices=[0, 1], device=torch.device("cuda", 0))


def test_memory_that_cannot_be_page_locked_is_used_unlocked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> int:
        raise RuntimeError("CUDA driver error: out of memory")

    monkeypatch.setattr("elastictrain.checkpoint.copier.SEGMENT_BYTES", 4096)
    codes = iter([0, 2])
    for on_register in (fails, lambda: next(codes, 2)):
        runtime = Runtime(on_register)
        arena = on_cuda(tmp_path, monkeypatch, runtime)
        arena.start()
        wait_for(partial(arena.slots.__getitem__, 1))
        assert not runtime.locked
        assert (arena.slots[0] is not None, arena.slots[1] is not None, arena.broken) == (True, True, "")
        arena.close()


def test_segments_cover_a_slot_and_end_where_copies_are_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastictrain.checkpoint.copier.SEGMENT_BYTES", 8192)
    runtime = Runtime(lambda: 0)
    arena = on_cuda(tmp_path, monkeypatch, runtime)
    arena.start()
    wait_for(partial(arena.slots.__getitem__, 1))
    for slot in arena.slots:
        assert slot is not None
        size_bytes = len(slot.map)
        first = ctypes.addressof(ctypes.c_char.from_buffer(slot.map))
        mine = sorted(one for one in runtime.segments if first <= one[0] < first + size_bytes)
        assert mine[0][0] == first
        assert mine[-1][1] == first + size_bytes
        assert all(end == begin for (_, end), (begin, _) in pairwise(mine))
        assert all(end % 8192 == 0 for _, end in mine[:-1])
    arena.close()
    assert not runtime.locked


def test_pages_are_unlocked_before_they_are_unmapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reached, go_on = threading.Event(), threading.Event()

    def stopped_meanwhile() -> int:
        reached.set()
        assert go_on.wait(10)
        return 0

    runtime, locked_at_close = Runtime(stopped_meanwhile), []
    really_close = Slot.close

    def close(slot: Slot) -> None:
        locked_at_close.append(len(runtime.locked))
        really_close(slot)

    monkeypatch.setattr(Slot, "close", close)
    arena = on_cuda(tmp_path, monkeypatch, runtime)
    arena.start()
    assert reached.wait(10)
    # While it is being closed.
    threading.Timer(0.1, go_on.set).start()
    arena.close()
    assert (locked_at_close, runtime.locked) == ([0], set())
    assert not (tmp_path / "own-r00000-s1").exists()


def test_whatever_ends_the_thread_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> Slot:
        raise ValueError("mmap length is greater than file size")

    monkeypatch.setattr(Slot, "make", broken)
    arena = Arena(str(tmp_path), LAYOUT, rank=0, indices=[0], device=CPU)
    arena.start()
    wait_for(lambda: arena.broken)
    assert "ValueError" in arena.broken
    arena.close()


def test_an_arena_that_never_started_is_closed(tmp_path: Path) -> None:
    Arena(str(tmp_path), LAYOUT, rank=0, indices=[0], device=CPU).close()
    assert list(tmp_path.iterdir()) == []
