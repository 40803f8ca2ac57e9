"""Files in host memory made of huge pages."""

import errno
import gc
import mmap
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastictrain.checkpoint.memory import huge_pages as module
from elastictrain.checkpoint.memory.huge_pages import PAGE_BYTES, make_huge_file, map_aligned
from elastictrain.checkpoint.memory.slot import Slot
from elastictrain.errors import CheckpointError

SHARED = Path("/dev/shm")
SIZE = 3 * PAGE_BYTES + 4321


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    made = SHARED / f"elastictrain-test-{os.getpid()}"
    made.mkdir()
    yield made
    for one in made.iterdir():
        one.unlink()
    made.rmdir()


def collapses() -> bool:
    return tuple(map(int, os.uname().release.split("-")[0].split(".")[:2])) >= (6, 1)


def huge_bytes(descriptor: int) -> int:
    """How much of a file is in huge pages, as the kernel tells of a mapping that was read."""
    number, size = os.fstat(descriptor).st_ino, os.fstat(descriptor).st_size
    mapped = map_aligned(descriptor, size)
    assert not any(mapped[:: mmap.PAGESIZE])
    found = 0
    for block in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(encoding="utf-8")):
        if str(number) in block.splitlines()[0].split():
            found += sum(int(line.split()[1]) << 10 for line in block.splitlines() if line.startswith("ShmemPmdMapped"))
    return found


@pytest.mark.skipif(not collapses(), reason="needs Linux 6.1")
def test_a_file_gets_huge_pages_whatever_its_mount_says(folder: Path) -> None:
    descriptor = make_huge_file(str(folder), SIZE)
    assert descriptor is not None
    try:
        os.posix_fallocate(descriptor, 0, SIZE)
        assert huge_bytes(descriptor) == 3 * PAGE_BYTES
        assert os.fstat(descriptor).st_size == SIZE
        assert list(folder.iterdir()) == [], "no other process sees it before it is whole"
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("size", [1, mmap.PAGESIZE, PAGE_BYTES, SIZE])
def test_a_mapping_begins_with_a_huge_page_and_lives_as_long_as_what_refers_to_it(size: int, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(size))
    descriptor = os.open(path, os.O_RDWR)
    mapped = map_aligned(descriptor, size)
    os.close(descriptor)
    assert (len(mapped), mapped.format, mapped.readonly) == (size, "B", False)
    lines = [line for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines() if line.endswith(str(path))]
    assert [int(line.partition("-")[0], 16) % PAGE_BYTES for line in lines] == [0]
    part = mapped[-1:]
    del mapped
    part[0] = 7
    assert path.read_bytes()[-1] == 7
    del part
    gc.collect()
    assert str(path) not in Path("/proc/self/maps").read_text(encoding="utf-8")


@pytest.mark.parametrize("refuses", ["file system", "kernel"])
def test_without_huge_pages_a_slot_has_small_ones(refuses: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if refuses == "kernel":
        monkeypatch.setattr(module, "_COLLAPSE", 9999)
    else:
        monkeypatch.setattr(os, "O_TMPFILE", os.O_DIRECTORY | os.O_CREAT)
    slot = Slot.make(f"{folder}/own-0-0", size_bytes=SIZE)
    assert Path(slot.path).stat().st_blocks * 512 >= SIZE
    assert slot.is_current()
    assert huge_bytes(slot._descriptor) == 0
    slot.close()


def test_where_memory_is_short_nothing_is_left(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, start: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    open_before = len([*Path("/proc/self/fd").iterdir()])
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(CheckpointError, match="No space left"):
        Slot.make(f"{folder}/own-0-0", size_bytes=SIZE)
    assert list(folder.iterdir()) == []
    assert len([*Path("/proc/self/fd").iterdir()]) == open_before


@pytest.mark.skipif(not collapses(), reason="needs Linux 6.1")
def test_a_slot_that_another_process_has_made_meanwhile_stays(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, real = folder / "own-0-0", module.make_huge_file

    def make(where: str, size: int) -> int | None:
        path.unlink()
        path.write_bytes(b"another's")
        return real(where, size)

    monkeypatch.setattr("elastictrain.checkpoint.memory.slot.make_huge_file", make)
    with pytest.raises(CheckpointError, match="meanwhile"):
        Slot.make(str(path), size_bytes=SIZE)
    assert path.read_bytes() == b"another's"
