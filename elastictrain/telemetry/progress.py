"""Progress on the terminal of rank 0: a bar with the time to go, or single lines."""

import math
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TextIO

from tqdm import tqdm

Mode = Literal["auto", "bar", "lines", "off"]

_CLEAR, _UP = "\033[J", "\033[A"  # erase from the cursor to the end of the screen; go one line up
_SHORTEST_BAR, _LONGEST_BAR = 10, 40
_REDRAW_S = 0.2


def duration_text(seconds: float) -> str:
    """`850 ms`, `42 s`, `3 min 07 s`, `5 h 12 min`, `2 d 03 h`: the two largest units."""
    if not math.isfinite(seconds):
        return "?"
    if seconds < 0.9995:
        return f"{max(seconds, 0.0) * 1000:.0f} ms"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600:02d} h"


def figure_texts(figures: Mapping[str, float], *, eta_s: float | None) -> list[str]:
    """The figures of a logged step by their tags in loggers, as texts; what matters most comes first."""
    unit = "tokens" if "speed/tokens_per_s" in figures else "samples"
    texts = [f"{duration_text(eta_s)} to go"] if eta_s else []
    texts += [
        f"loss {figures['loss/train']:.4f}",
        f"{tqdm.format_sizeof(figures[f'speed/{unit}_per_s'])} {unit}/s",
        f"lr {figures['optimizer/lr']:.2e}",
        f"grad norm {figures['optimizer/grad_norm']:.3f}",
    ]
    if "speed/mfu" in figures:
        texts.append(f"MFU {figures['speed/mfu']:.1%}")
    if figures["optimizer/skipped"]:
        texts.append(f"{figures['optimizer/skipped']:.0f} skipped")
    return texts


def bar_text(step: int, total_steps: int, texts: Sequence[str], *, width: int) -> str:
    """A bar of at least ten characters, with as many of `texts`, from the first on, as fit in `width`."""
    share = step / total_steps
    text = f"{step}/{total_steps}"
    for one in texts:
        if len(f"{text}, {one}") + len("100% || ") + _SHORTEST_BAR > width:
            break
        text = f"{text}, {one}"
    length = max(_SHORTEST_BAR, min(_LONGEST_BAR, width - len(text) - len("100% || ")))
    return f"{share:4.0%} |{('█' * int(share * length)).ljust(length)}| {text}"


class RemainingTime:
    """Estimates the time to the last step from the most recent steps, pauses included."""

    def __init__(self, *, total_steps: int, window_s: float = 120.0) -> None:
        self._total_steps = total_steps
        self._window_s = window_s
        self._passed: deque[tuple[float, int]] = deque()
        self._latest = (0.0, 0)

    def observe(self, *, time_s: float, step: int) -> None:
        """Note that `step` steps were committed at the monotonic time `time_s`."""
        self._latest = (time_s, step)
        # A hundred points per window suffice, however short the steps are.
        if self._passed and time_s - self._passed[-1][0] < self._window_s / 100:
            return
        self._passed.append(self._latest)
        # The newest point outside the window stays, so that steps longer than the window still have a speed.
        while len(self._passed) > 2 and self._passed[1][0] <= time_s - self._window_s:
            self._passed.popleft()

    def estimate_s(self) -> float | None:
        """Seconds to go; None before a step has passed."""
        (first_s, first_step), (last_s, last_step) = self._passed[0] if self._passed else self._latest, self._latest
        if last_step <= first_step:
            return None
        return (self._total_steps - last_step) * (last_s - first_s) / (last_step - first_step)


class Progress:
    """Shows progress: a bar that is redrawn in place, a line for each logged step, or messages alone.

    The bar is drawn one line below the cursor, which stays at the start of an empty line: what any other process writes there
    stands above the bar, whole, and the bar follows when it is drawn again.
    """

    def __init__(
        self,
        mode: Mode,
        *,
        stream: TextIO,
        total_steps: int,
        start_step: int,
        clock: Callable[[], float],
        width: int | None = None,
    ) -> None:
        """`auto` draws a bar where `stream` is a terminal, else lines. `clock` is monotonic."""
        self._stream = stream
        self._total_steps = total_steps
        self._step = start_step
        self._clock = clock
        self._width = width
        self._texts: list[str] = []
        self._drawn_s = -math.inf
        self._remaining = RemainingTime(total_steps=total_steps)
        self._remaining.observe(time_s=clock(), step=start_step)
        draws = stream.isatty() and os.environ.get("TERM") != "dumb"
        self._shows_lines = mode == "lines" or (mode == "auto" and not draws)
        self._shows_bar = mode == "bar" or (mode == "auto" and draws)
        self._draw()

    def advance(self, step: int) -> None:
        """Set the number of committed steps. Called at every step; a bar is redrawn a few times a second at most."""
        self._step = step
        now_s = self._clock()
        self._remaining.observe(time_s=now_s, step=step)
        if now_s - self._drawn_s >= _REDRAW_S:
            self._drawn_s = now_s
            self._draw()

    def show(self, step: int, figures: Mapping[str, float]) -> None:
        """Show the figures of a logged step, after `advance` to it."""
        self._texts = figure_texts(figures, eta_s=self._remaining.estimate_s())
        if self._shows_lines:
            self.print_line(f"step {step:>{len(str(self._total_steps))}}/{self._total_steps}: {', '.join(self._texts)}")
        self._draw()

    def print_line(self, text: str) -> None:
        """Print a message of one or more lines above the bar; flushed, so that it passes a pipe at once."""
        write_above(self._stream, text)
        self._draw()

    def close(self) -> None:
        """Leave the bar as a line of its own."""
        self._draw(last=True)
        self._shows_bar = False

    def _draw(self, *, last: bool = False) -> None:
        if not self._shows_bar:
            return
        bar = bar_text(self._step, self._total_steps, self._texts, width=self._width or terminal_width(self._stream))
        self._stream.write(f"{_CLEAR}{bar}\n" if last else f"{_CLEAR}\n{bar}{_UP}\r")
        self._stream.flush()


def write_above(stream: TextIO, text: str) -> None:
    """Write lines in place of the bar that this process or another one has drawn on this terminal; the bar comes back below."""
    stream.write(f"{_CLEAR if stream.isatty() else ''}{text}\n")
    stream.flush()


def terminal_width(stream: TextIO, otherwise: int = 120) -> int:
    """Columns of the terminal that `stream` is; `otherwise` where it is none."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or otherwise
    except (OSError, ValueError):
        return otherwise
