import fcntl
import os
from pathlib import Path

import pytest

from elastictrain.checkpoint.memory.layout import HEADER_BYTES
from elastictrain.checkpoint.memory.slot import Slot
from elastictrain.errors import CheckpointError
from tests.unit.checkpoint.memory.madeslots import facts_of, fill, layout_of, put

LAYOUT = layout_of()


def make(tmp_path: Path, *, size_bytes: int = LAYOUT.size_bytes) -> Slot:
    return Slot.make(f"{tmp_path}/own-r00000-s0", size_bytes=size_bytes)


def test_a_snapshot_is_whole_only_between_its_end_and_the_next_beginning(tmp_path: Path) -> None:
    slot = make(tmp_path)
    assert slot.facts is None
    fill(slot, facts_of(3), LAYOUT)
    assert slot.facts == facts_of(3)
    reader = Slot.open(slot.path)
    assert reader.facts == facts_of(3)
    slot.begin()
    assert reader.facts is None
    slot.close()
    reader.close()


def test_a_slot_of_the_same_size_keeps_what_is_in_it(tmp_path: Path) -> None:
    slot = make(tmp_path)
    fill(slot, facts_of(3), LAYOUT)
    slot.close()
    again = make(tmp_path)
    assert again.facts == facts_of(3)
    again.close()


def test_another_size_is_another_file(tmp_path: Path) -> None:
    slot = make(tmp_path)
    fill(slot, facts_of(3), LAYOUT)
    reader = Slot.open(slot.path)
    larger = make(tmp_path, size_bytes=LAYOUT.size_bytes + 4096)
    assert larger.facts is None
    assert not reader.is_current()
    assert larger.is_current()
    # Who still reads the old one keeps it.
    assert reader.facts == facts_of(3)
    for one in (slot, reader, larger):
        one.close()


def test_one_writer_or_many_readers(tmp_path: Path) -> None:
    slot = make(tmp_path)
    readers = [Slot.open(slot.path) for _ in range(2)]
    assert slot.lock(shared=False)
    assert [reader.lock(shared=True) for reader in readers] == [False, False]
    slot.unlock()
    assert [reader.lock(shared=True) for reader in readers] == [True, True]
    assert not slot.lock(shared=False)
    readers[0].unlock()
    assert not slot.lock(shared=False)
    # However a reader ends, its lock ends with it.
    readers[1].close()
    assert slot.lock(shared=False)
    slot.close()
    readers[0].close()


def test_memory_that_is_not_there_is_refused_and_nothing_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int, __: int, ___: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(CheckpointError, match=r"own-r00000-s0.*No space"):
        make(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_slot_that_cannot_be_opened_keeps_what_is_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slot = make(tmp_path)
    fill(slot, facts_of(3), LAYOUT)
    slot.close()

    def no_more_files(*_: object) -> int:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", no_more_files)
        with pytest.raises(CheckpointError, match="own-r00000-s0"):
            make(tmp_path)
    again = Slot.open(slot.path)
    assert again.facts == facts_of(3)
    again.close()


def test_a_failure_closes_no_file_of_somebody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path).close()
    closed: list[int] = []
    really_open, really_close = os.open, os.close

    def open_once(path: str, flags: int, *more: int) -> int:
        if flags & os.O_EXCL:
            raise OSError(13, "Permission denied")
        return really_open(path, flags, *more)

    def close(descriptor: int) -> None:
        assert descriptor not in closed, "closed twice: by now it may be another's"
        closed.append(descriptor)
        really_close(descriptor)

    monkeypatch.setattr(os, "open", open_once)
    monkeypatch.setattr(os, "close", close)
    with pytest.raises(CheckpointError, match="Permission denied"):
        make(tmp_path, size_bytes=4096)


def test_what_is_no_slot_cannot_be_opened(tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(b"x" * (HEADER_BYTES - 1))
    (tmp_path / "link").symlink_to(tmp_path / "short")
    for name in ("short", "link", "missing"):
        with pytest.raises(OSError):
            Slot.open(f"{tmp_path}/{name}")
    with pytest.raises(CheckpointError):
        Slot.make(f"{tmp_path}/link", size_bytes=10)


def test_the_lock_outlives_no_process(tmp_path: Path) -> None:
    slot = make(tmp_path)
    child = os.fork()
    if child == 0:
        other = os.open(slot.path, os.O_RDWR)
        fcntl.flock(other, fcntl.LOCK_EX)
        os._exit(0)
    os.waitpid(child, 0)
    assert slot.lock(shared=False)
    slot.close()


def test_a_slot_that_cannot_be_locked_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = put(tmp_path, facts_of(4))
    closed: list[str] = []
    close = Slot.close

    def refuse(slot: Slot, *, shared: bool = False) -> bool:
        raise OSError("no locks available")

    monkeypatch.setattr(Slot, "lock", refuse)
    monkeypatch.setattr(Slot, "close", lambda slot: (closed.append(slot.path), close(slot)))
    with pytest.raises(OSError, match="locks"):
        Slot.hold(f"{tmp_path}/{name}")
    assert closed == [f"{tmp_path}/{name}"]
