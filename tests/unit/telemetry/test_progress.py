import io
import logging
import math
import re
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastictrain.telemetry.log import LogPrefix, WorkerHandler
from elastictrain.telemetry.progress import Mode, Progress, RemainingTime, bar_text, duration_text, figure_texts

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
    ("mode", "terminal", "term", "shown"),
    [
        ("auto", True, "xterm", "bar"),
        ("auto", True, "dumb", "line"),
        ("auto", False, "xterm", "line"),
        ("bar", False, "xterm", "bar"),
        ("lines", True, "xterm", "line"),
        ("off", True, "xterm", "nothing"),
    ],
)
def test_the_mode_and_the_stream_decide_what_is_shown(
    mode: Mode, terminal: bool, term: str, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", term)
    stream = Terminal() if terminal else io.StringIO()
    progress = Progress(mode, stream=stream, total_steps=10, start_step=0, clock=counting_clock(), width=140)
    progress.advance(4)
    progress.show(4, FIGURES)
    progress.close()
    text = stream.getvalue()
    assert shown == ("bar" if " 40% |" in text else "line" if "step  4/10: " in text else "nothing")
    assert bool(text) == (shown != "nothing")


def test_off_still_gives_messages() -> None:
    stream = io.StringIO()
    progress = Progress("off", stream=stream, total_steps=10, start_step=0, clock=counting_clock())
    progress.advance(1)
    progress.show(1, FIGURES)
    progress.print_line("hello")
    assert stream.getvalue() == "hello\n"


def test_one_line_for_each_logged_step_with_the_time_to_go_first() -> None:
    stream = io.StringIO()
    progress = Progress("lines", stream=stream, total_steps=100, start_step=90, clock=counting_clock(step_s=2.0))
    for step in (91, 92):
        progress.advance(step)
    progress.show(92, FIGURES)
    progress.close()
    assert stream.getvalue() == f"step  92/100: {', '.join(figure_texts(FIGURES, eta_s=16.0))}\n"


def screen(written: str) -> list[str]:
    """The lines that a terminal of any height would show."""
    lines, row, column = [""], 0, 0
    for text in re.findall(r"\033\[[AJ]|[\r\n]|[^\r\n\033]+", written):
        if text == "\033[J":
            lines[row] = lines[row][:column]
            del lines[row + 1 :]
        elif text == "\033[A":
            row -= 1
        elif text == "\r":
            column = 0
        elif text == "\n":
            row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
        else:
            lines[row] = lines[row][:column].ljust(column) + text + lines[row][column + len(text) :]
            column += len(text)
    return [line.rstrip() for line in lines]


def test_the_bar_starts_where_the_run_resumed_and_ends_as_a_line() -> None:
    stream = Terminal()
    bar = Progress("bar", stream=stream, total_steps=100, start_step=40, clock=counting_clock(), width=140)
    assert screen(stream.getvalue())[-1].endswith("| 40/100")
    bar.advance(50)
    bar.show(50, FIGURES)
    (above, shown) = screen(stream.getvalue())
    assert above == ""
    assert shown.startswith(" 50% |")
    assert shown.endswith(f"| 50/100, {', '.join(figure_texts(FIGURES, eta_s=5.0))}")
    bar.close()
    assert screen(stream.getvalue()) == [shown, ""]


def test_nothing_tears_the_bar_and_the_bar_tears_nothing() -> None:
    stream = Terminal()
    bar = Progress("bar", stream=stream, total_steps=100, start_step=0, clock=counting_clock(), width=80)
    bar.advance(10)
    bar.show(10, FIGURES)
    bar.print_line("first\nsecond")
    WorkerHandler(stream, prefix=LogPrefix(rank=0)).emit(logging.makeLogRecord({"msg": "a record", "levelname": "WARNING"}))
    # Another process knows nothing of the bar.
    bar.advance(11)
    stream.write("another process\n")
    bar.advance(12)
    WorkerHandler(stream, prefix=LogPrefix(rank=1)).emit(logging.makeLogRecord({"msg": "two\nlines", "levelname": "WARNING"}))
    bar.advance(13)
    *messages, above, last = screen(stream.getvalue())
    assert [message.split(" ")[-1] for message in messages] == ["first", "second", "record", "process", "two", "lines"]
    assert above == ""
    assert last.startswith(" 13% |")


@given(
    step=st.integers(0, 10**6),
    total=st.integers(1, 10**6),
    width=st.integers(40, 200),
    texts=st.lists(st.text("abc ", min_size=1), max_size=6),
)
def test_a_bar_is_a_bar_in_any_width(step: int, total: int, width: int, texts: list[str]) -> None:
    step = min(step, total)
    shown = bar_text(step, total, texts, width=width)
    drawn = shown[shown.index("|") + 1 : shown.rindex("|")]
    assert len(shown) <= width
    assert 10 <= len(drawn) <= 40
    assert drawn.count("█") == int(step / total * len(drawn))


def test_eighty_columns_show_the_time_to_go_and_the_loss() -> None:
    texts = figure_texts(FIGURES, eta_s=125.0)
    shown = bar_text(200, 300, texts, width=80)
    assert "200/300, 2 min 05 s to go, loss 3.2101" in shown
    assert len(shown) <= 80


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
        ({}, 125.0, "2 min 05 s to go, loss 3.2101, 12.3k tokens/s, lr 3.00e-04, grad norm 0.988"),
        (
            {"loss/train": math.nan, "optimizer/grad_norm": math.inf, "optimizer/skipped": 2.0, "speed/mfu": 0.4951},
            None,
            "loss nan, 12.3k tokens/s, lr 3.00e-04, grad norm inf, MFU 49.5%, 2 skipped",
        ),
    ],
)
def test_a_line_holds_what_is_known(more: dict[str, float], eta_s: float | None, text: str) -> None:
    assert ", ".join(figure_texts({**FIGURES, **more}, eta_s=eta_s)) == text


@pytest.mark.parametrize("eta_s", [None, 0.0])
def test_no_time_to_go_is_not_shown(eta_s: float | None) -> None:
    assert not any("to go" in text for text in figure_texts(FIGURES, eta_s=eta_s))


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
    assert "96.5 samples/s" in figure_texts({**figures, "speed/samples_per_s": 96.5}, eta_s=None)
