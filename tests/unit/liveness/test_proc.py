from pathlib import Path

from elastictrain.liveness.stacks import describe_process
from tests.unit.fault.fake_proc import make_process


def test_threads_and_children_are_told_of(tmp_path: Path) -> None:
    make_process(tmp_path, 7, state="R")
    make_process(tmp_path, 9, name="a) R 1 (b", state="T", parent=7)
    make_process(tmp_path, 10, name="else", parent=1)
    (tmp_path / "self").mkdir()
    assert describe_process(7, proc=tmp_path) == (
        "  python (7) runs\n  its child a) R 1 (b (9) is stopped by a signal in do_nanosleep"
    )
    assert describe_process(11, proc=tmp_path) == ""
