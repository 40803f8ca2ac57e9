import io
import logging
from collections.abc import Callable

import pytest

from elastictrain.telemetry.log import LogPrefix, WorkerHandler
from elastictrain.telemetry.progress import Bar, LineProgress, MessagesOnly, Mode, open_progress
from elastictrain.telemetry.reading import Reading


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def counting_clock(step_s: float = 1.0) -> Callable[[], float]:
    times = iter(range(1_000_000))
    return lambda: next(times) * step_s


def reading(step: int) -> Reading:
    return Reading(step=step, loss=2.5, lr=1e-3, grad_norm=1.0, tokens_per_s=2000.0, step_s=1.0, mfu=None, skipped=0)


@pytest.mark.parametrize(
    ("mode", "stream", "kind"),
    [
        ("auto", Terminal(), Bar),
        ("auto", io.StringIO(), LineProgress),
        ("bar", io.StringIO(), Bar),
        ("lines", Terminal(), LineProgress),
        ("off", Terminal(), MessagesOnly),
    ],
)
def test_the_mode_and_the_stream_decide_the_kind(mode: Mode, stream: io.StringIO, kind: type) -> None:
    progress = open_progress(mode, stream=stream, total_steps=10, start_step=0, clock=counting_clock())
    assert isinstance(progress, kind)
    progress.close()


def test_off_still_gives_messages() -> None:
    stream = io.StringIO()
    progress = open_progress("off", stream=stream, total_steps=10, start_step=0, clock=counting_clock())
    progress.advance(1)
    progress.show(reading(1))
    progress.say("hello")
    assert stream.getvalue() == "hello\n"


def test_one_line_for_each_logged_step_with_the_time_to_go() -> None:
    stream = io.StringIO()
    progress = LineProgress(stream, total_steps=100, start_step=90, clock=counting_clock(step_s=2.0))
    for step in (91, 92):
        progress.advance(step)
    progress.show(reading(92))
    progress.close()
    assert stream.getvalue() == "step  92/100: loss 2.5000, lr 1.00e-03, grad norm 1.000, 2.0k tokens/s, 16 s to go\n"


def test_the_bar_starts_where_the_run_resumed_and_shows_the_figures() -> None:
    stream = Terminal()
    bar = Bar(stream, total_steps=100, start_step=40, clock=counting_clock(), width=140)
    assert " 40/100" in stream.getvalue()
    bar.advance(50)
    bar.show(reading(50))
    assert "50% |" in stream.getvalue()
    assert " 50/100, loss 2.5000" in stream.getvalue()
    assert "5 s to go" in stream.getvalue()
    bar.close()
    assert stream.getvalue().endswith("\n")


def screen(written: str) -> list[str]:
    """The lines that a terminal would show: a carriage return goes back to the start of the line and overwrites."""
    lines = []
    for line in written.split("\n"):
        shown: list[str] = []
        for part in line.split("\r"):
            shown[: len(part)] = part
        lines.append("".join(shown).rstrip())
    return lines


def test_messages_and_log_records_do_not_tear_the_bar() -> None:
    stream = Terminal()
    bar = Bar(stream, total_steps=100, start_step=0, clock=counting_clock(), width=140)
    bar.advance(10)
    bar.show(reading(10))
    bar.say("saved a checkpoint\nof two lines")
    handler = WorkerHandler(stream, prefix=LogPrefix(rank=0))
    handler.emit(logging.makeLogRecord({"msg": "a record", "levelname": "WARNING"}))
    *messages, last = screen(stream.getvalue())
    assert messages[:2] == ["saved a checkpoint", "of two lines"]
    assert messages[2].endswith("[- rank 0] a record")
    assert last.startswith(" 10% |")
    bar.close()
