from pathlib import Path

import pytest
import torch

from elastictrain.checkpoint.memory.records import layout_path
from elastictrain.checkpoint.memory.slot import Slot
from elastictrain.checkpoint.snapshot.arena import Arena, slot_indices
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


def test_slots_become_ready_and_keep_what_is_in_them(tmp_path: Path) -> None:
    put(tmp_path, facts_of(3), index=1)
    arena = Arena(str(tmp_path), LAYOUT, rank=0, indices=[1, 0], device=CPU)
    assert arena.slot(0) is None
    arena.start()
    arena._thread.join(10)
    first, second = arena.slot(0), arena.slot(1)
    assert first is not None
    assert second is not None
    assert first.facts == facts_of(3)
    assert second.facts is None
    assert not arena.broken
    assert Path(layout_path(str(tmp_path), LAYOUT.digest)).exists()
    arena.close()
    assert arena.slot(0) is None
    assert Slot.open(f"{tmp_path}/own-r00000-s1").facts == facts_of(3)


def test_memory_that_is_not_there_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int, __: int, ___: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    arena = Arena(str(tmp_path), LAYOUT, rank=0, indices=[0], device=CPU)
    arena.start()
    arena._thread.join(10)
    assert "No space left" in arena.broken
    assert arena.slot(0) is None
    arena.close()


def test_an_arena_that_never_started_is_closed(tmp_path: Path) -> None:
    Arena(str(tmp_path), LAYOUT, rank=0, indices=[0], device=CPU).close()
    assert list(tmp_path.iterdir()) == []
