import os
from pathlib import Path

import pytest

from elastictrain.fault.exits import AGAIN_S, FIRST_S, WaitNotice, describe_process


@pytest.mark.parametrize(
    ("until_s", "limit"), [(None, ""), (400.0, ", {left:.0f} s more at most"), (100.0, ", 0 s more at most")]
)
def test_a_wait_is_told_after_a_while_and_again_now_and_then(until_s: float | None, limit: str) -> None:
    now, told = [100.0], list[tuple[float, str]]()
    notice = WaitNotice(lambda text: told.append((now[0] - 100.0, text)), clock=lambda: now[0])
    while now[0] < 100.0 + FIRST_S + 2 * AGAIN_S + 1.0:
        notice.tell(lambda: "the saver", until_s=until_s)
        now[0] += 0.5
    assert [at for at, _ in told] == [FIRST_S, FIRST_S + AGAIN_S, FIRST_S + 2 * AGAIN_S]
    left = (until_s or 0.0) - 100.0 - FIRST_S
    assert told[0][1] == f"waiting for the saver ({FIRST_S:.0f} s so far{limit.format(left=left)})"


def test_a_short_wait_is_not_worth_a_word() -> None:
    now, told = [0.0], list[str]()
    notice = WaitNotice(told.append, clock=lambda: now[0])
    for now[0] in (0.0, FIRST_S - 0.1):
        notice.tell(lambda: "the saver", until_s=None)
    assert told == []


def test_a_process_is_named_with_what_keeps_it_from_running(tmp_path: Path) -> None:
    assert describe_process(os.getpid()) == f"process {os.getpid()}"
    assert describe_process(7, proc=tmp_path) == "process 7, which is gone"
    (tmp_path / "7").mkdir()
    fields = ["T", "1", *["0"] * 15, "1", "0", "99", *["0"] * 29, "0"]
    (tmp_path / "7" / "stat").write_text(f"7 (saver) {' '.join(fields)}")
    assert "`kill -CONT 7`" in describe_process(7, proc=tmp_path)
