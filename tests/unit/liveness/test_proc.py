import os
from pathlib import Path

from elastictrain.liveness.stacks import describe_process, look_at
from tests.unit.fault.fake_proc import EXITING, make_process


def test_a_process_is_read_whatever_its_name(tmp_path: Path) -> None:
    make_process(tmp_path, 7, name="a) R 1 (b", parent=3)
    found = look_at(7, proc=tmp_path)
    assert found is not None
    assert (found.pid, found.name, found.state, found.parent, found.exiting, found.where) == (
        7, "a) R 1 (b", "S", 3, False, "do_nanosleep",
    )  # fmt: skip
    assert look_at(8, proc=tmp_path) is None


def test_who_cannot_but_go_is_as_good_as_gone(tmp_path: Path) -> None:
    make_process(tmp_path, 7, state="Z")
    make_process(tmp_path, 8, state="D", flags=EXITING)
    assert [found.exiting for pid in (7, 8) if (found := look_at(pid, proc=tmp_path))] == [True, True]
    itself = look_at(os.getpid())
    assert itself is not None
    assert not itself.exiting


def test_threads_and_children_are_told_of(tmp_path: Path) -> None:
    make_process(tmp_path, 7, state="R")
    make_process(tmp_path, 9, name="data-worker", state="T", parent=7)
    make_process(tmp_path, 10, name="else", parent=1)
    (tmp_path / "self").mkdir()
    assert describe_process(7, proc=tmp_path) == (
        "  python (7) runs\n  its child data-worker (9) is stopped by a signal in do_nanosleep"
    )
    assert describe_process(11, proc=tmp_path) == ""
