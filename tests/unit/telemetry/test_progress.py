import io
import logging
import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastictrain.telemetry.log import LogPrefix, WorkerHandler
from elastictrain.telemetry.progress import Mode, Progress, RemainingTime, duration_text, figures_text

FIGURES = {
    "loss/train": 3.21009,
    "optimizer/lr": 3e-4,
    "optimizer/grad_norm": 0.98765,
    "optimizer/skipped": 0.0,
    "speed/samples_per_s": 96.45,
    "speed/tokens_per_s": 12345.6,
    "speed/step_s": 0.5,
}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def counting_clock(step_s: float = 1.0) -> Callable[[], float]:
    times = iter(range(1_000_000))
    return lambda: next(times) * step_s


@pytest.mark.parametrize(
    ("mode", "stream", "shown"),
    [
        ("auto", Terminal(), "bar"),
        ("auto", io.StringIO(), "line"),
        ("bar", io.StringIO(), "bar"),
        ("lines", Terminal(), "line"),
        ("off", Terminal(), "nothing"),
    ],
)
def test_the_mode_and_the_stream_decide_what_is_shown(mode: Mode, stream: io.StringIO, shown: str) -> None:
    progress = Progress(mode, stream=stream, total_steps=10, start_step=0, clock=counting_clock(), width=140)
    progress.advance(4)
    progress.show(4, FIGURES)
    progress.close()
    text = stream.getvalue()
    assert shown == ("bar" if "40% |" in text else "line" if text.startswith("step  4/10: ") else "nothing")
    assert bool(text) == (shown != "nothing")


def test_off_still_gives_messages() -> None:
    stream = io.StringIO()
    progress = Progress("off", stream=stream, total_steps=10, start_step=0, clock=counting_clock())
    progress.advance(1)
    progress.show(1, FIGURES)
    progress.print_line("hello")
    assert stream.getvalue() == "hello\n"


def test_one_line_for_each_logged_step_with_the_time_to_go() -> None:
    stream = io.StringIO()
    progress = Progress("lines", stream=stream, total_steps=100, start_step=90, clock=counting_clock(step_s=2.0))
    for step in (91, 92):
        progress.advance(step)
    progress.show(92, FIGURES)
    progress.close()
    assert stream.getvalue() == f"step  92/100: {figures_text(FIGURES, eta_s=16.0)}\n"


def test_the_bar_starts_where_the_run_resumed_and_shows_the_figures() -> None:
    stream = Terminal()
    bar = Progress("bar", stream=stream, total_steps=100, start_step=40, clock=counting_clock(), width=140)
    assert " 40/100" in stream.getvalue()
    bar.advance(50)
    bar.show(50, FIGURES)
    assert "50% |" in stream.getvalue()
    assert f" 50/100, {figures_text(FIGURES, eta_s=5.0)}" in stream.getvalue()
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
    bar = Progress("bar", stream=stream, total_steps=100, start_step=0, clock=counting_clock(), width=140)
    bar.advance(10)
    bar.show(10, FIGURES)
    bar.print_line("first\nsecond")
    handler = WorkerHandler(stream, prefix=LogPrefix(rank=0))
    handler.emit(logging.makeLogRecord({"msg": "a record", "levelname": "WARNING"}))
    *messages, last = screen(stream.getvalue())
    assert messages[:2] == ["first", "second"]
    assert messages[2].endswith("record")
    assert last.startswith(" 10% |")
    bar.close()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 ms"),
        (-1.0, "0 ms"),
        (0.85, "850 ms"),
        (0.9999, "1 s"),
        (42.4, "42 s"),
        (59.6, "1 min 00 s"),
        (187.0, "3 min 07 s"),
        (3599.7, "1 h 00 min"),
        (18720.0, "5 h 12 min"),
        (183600.0, "2 d 03 h"),
        (math.inf, "?"),
        (math.nan, "?"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


@pytest.mark.parametrize(
    ("more", "eta_s", "text"),
    [
        ({}, 125.0, "loss 3.2101, lr 3.00e-04, grad norm 0.988, 12.3k tokens/s, 2 min 05 s to go"),
        (
            {"loss/train": math.nan, "optimizer/grad_norm": math.inf, "optimizer/skipped": 2.0, "speed/mfu": 0.4951},
            None,
            "loss nan, lr 3.00e-04, grad norm inf, 12.3k tokens/s, MFU 49.5%, 2 skipped",
        ),
    ],
)
def test_a_line_holds_what_is_known(more: dict[str, float], eta_s: float | None, text: str) -> None:
    assert figures_text({**FIGURES, **more}, eta_s=eta_s) == text


@pytest.mark.parametrize("eta_s", [None, 0.0])
def test_no_time_to_go_is_not_shown(eta_s: float | None) -> None:
    assert "to go" not in figures_text(FIGURES, eta_s=eta_s)


def test_nothing_is_estimated_before_a_step_has_passed() -> None:
    remaining = RemainingTime(total_steps=10)
    assert remaining.estimate_s() is None
    remaining.observe(time_s=1.0, step=4)
    assert remaining.estimate_s() is None


def test_a_resumed_run_counts_only_its_own_steps() -> None:
    remaining = RemainingTime(total_steps=100)
    remaining.observe(time_s=50.0, step=90)
    remaining.observe(time_s=54.0, step=92)
    assert remaining.estimate_s() == pytest.approx(16.0)


def test_a_slow_start_is_forgotten() -> None:
    remaining = RemainingTime(total_steps=2000, window_s=60.0)
    remaining.observe(time_s=0.0, step=0)
    for step in range(1, 1001):
        remaining.observe(time_s=500.0 + step, step=step)
    assert remaining.estimate_s() == pytest.approx(1000.0)


def test_steps_longer_than_the_window_still_have_a_speed() -> None:
    remaining = RemainingTime(total_steps=10, window_s=1.0)
    for step in range(4):
        remaining.observe(time_s=100.0 * step, step=step)
    assert remaining.estimate_s() == pytest.approx(700.0)


@given(step_s=st.floats(1e-3, 1e3), start=st.integers(0, 50), steps=st.integers(1, 300))
def test_an_even_pace_gives_the_exact_answer(step_s: float, start: int, steps: int) -> None:
    remaining = RemainingTime(total_steps=1000)
    for count in range(steps + 1):
        remaining.observe(time_s=count * step_s, step=start + count)
    assert remaining.estimate_s() == pytest.approx((1000 - start - steps) * step_s)


def test_samples_are_counted_where_tokens_are_not() -> None:
    figures = {name: value for name, value in FIGURES.items() if name != "speed/tokens_per_s"}
    assert "96.5 samples/s" in figures_text({**figures, "speed/samples_per_s": 96.5}, eta_s=None)
