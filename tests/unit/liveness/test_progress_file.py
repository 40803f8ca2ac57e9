import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastictrain.liveness.progress import Phase, ProgressMark
from elastictrain.liveness.progress_file import ProgressFile, ProgressFileReader, progress_path

marks = st.builds(
    ProgressMark,
    st.sampled_from(list(Phase)),
    st.integers(0, 2**40),
    st.integers(0, 2**20),
    st.floats(0.0, 1e9),
    st.booleans(),
    compiling=st.booleans(),
    finished_step=st.integers(0, 2**62),
)


def pair(folder: Path, rank: int = 3) -> tuple[ProgressFile, ProgressFileReader]:
    writer = ProgressFile(str(folder), rank=rank, stopped_s=8.0, grace_s=20.0)
    return writer, ProgressFileReader(str(folder), rank)


@settings(max_examples=30)
@given(marks)
def test_what_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, mark: ProgressMark) -> None:
    writer, reader = pair(tmp_path_factory.mktemp("marks"))
    writer.write(mark, bound_s=10.0, limit_s=120.0)
    found = reader.read()
    assert found is not None
    assert (found.mark, found.bound_s, found.limit_s) == (mark, 10.0, 120.0)
    assert (found.pid, found.rank, found.stopped_s, found.grace_s) == (os.getpid(), 3, 8.0, 20.0)
    writer.close()
    reader.close()


def test_marks_and_pulses_are_seen_to_go_on(tmp_path: Path) -> None:
    writer, reader = pair(tmp_path)
    first = reader.read()
    writer.beat()
    second = reader.read()
    writer.write(ProgressMark(Phase.DATA, 1, 0, 1.0, True), bound_s=1.0, limit_s=2.0)
    writer.announce_ending()
    third = reader.read()
    assert first is not None
    assert second is not None
    assert third is not None
    assert (second.sequence - first.sequence, second.pulse - first.pulse) == (0, 1)
    assert (third.sequence - second.sequence, third.pulse - second.pulse) == (1, 0)
    assert (first.ending, third.ending) == (False, True)


def test_a_writer_that_was_stopped_in_the_middle_leaves_what_stood_there_before(tmp_path: Path) -> None:
    writer, reader = pair(tmp_path)
    writer.write(ProgressMark(Phase.REDUCE, 9, 0, 1.0, True), bound_s=1.0, limit_s=2.0)
    before = reader.read()
    with open(progress_path(str(tmp_path), 3), "r+b") as file:  # noqa: PTH123
        file.seek(64 + 20)
        file.write(b"\xff\xff")
    assert reader.read() == before
    assert ProgressFileReader(str(tmp_path), 3).read() is None


def test_a_deleted_file_is_still_read_and_a_closed_one_takes_no_more(tmp_path: Path) -> None:
    writer, reader = pair(tmp_path)
    writer.close()
    writer.write(ProgressMark(Phase.DATA, 1, 0, 1.0, True), bound_s=1.0, limit_s=2.0)
    writer.beat()
    writer.announce_ending()
    found = reader.read()
    assert found is not None
    assert found.mark.phase is Phase.START
    assert list(tmp_path.iterdir()) == []


def test_who_looks_learns_that_a_process_has_left_its_generation(tmp_path: Path) -> None:
    writer, reader = pair(tmp_path)
    writer.write(ProgressMark(Phase.DETACH, 7, 0, 1.0, True), bound_s=1.0, limit_s=2.0)
    before = reader.read()
    writer.close()
    after = reader.read()
    writer.close()
    assert before is not None
    assert after is not None
    assert (before.closed, after.closed) == (False, True)
    assert after == replace(before, closed=True)
    # The next generation of the same process has another file, even in the same place.
    second, reader_of_second = pair(tmp_path)
    found = reader_of_second.read()
    assert found is not None
    assert not found.closed
    assert reader.read() == after
    second.close()


def test_memory_that_is_not_there_is_missed_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, start: int, length: int) -> None:
        assert (os.fstat(descriptor).st_size, start, length) == (0, 0, 4096)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(OSError) as refused:
        pair(tmp_path)
    assert refused.value.errno == errno.ENOSPC
    assert list(tmp_path.iterdir()) == []


def test_other_files_are_no_marks(tmp_path: Path) -> None:
    Path(progress_path(str(tmp_path), 3)).write_bytes(b"x" * 4096)
    with pytest.raises(ValueError, match=r"r00003\.marks"):
        ProgressFileReader(str(tmp_path), 3)
    with pytest.raises(FileNotFoundError):
        ProgressFileReader(str(tmp_path), 4)
