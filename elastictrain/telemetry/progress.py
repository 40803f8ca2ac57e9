"""Progress on the terminal of rank 0: a bar with the time to go, or single lines."""

import math
from collections import deque
from collections.abc import Callable, Mapping
from typing import Literal, TextIO

from tqdm import tqdm

Mode = Literal["auto", "bar", "lines", "off"]


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


def figures_text(figures: Mapping[str, float], *, eta_s: float | None) -> str:
    """The figures of a logged step, by their tags in TensorBoard, in one line."""
    unit = "tokens" if "speed/tokens_per_s" in figures else "samples"
    parts = [
        f"loss {figures['loss/train']:.4f}",
        f"lr {figures['optimizer/lr']:.2e}",
        f"grad norm {figures['optimizer/grad_norm']:.3f}",
        f"{tqdm.format_sizeof(figures[f'speed/{unit}_per_s'])} {unit}/s",
    ]
    if "speed/mfu" in figures:
        parts.append(f"MFU {figures['speed/mfu']:.1%}")
    if figures["optimizer/skipped"]:
        parts.append(f"{figures['optimizer/skipped']:.0f} skipped")
    if eta_s:
        parts.append(f"{duration_text(eta_s)} to go")
    return ", ".join(parts)


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
    """Shows progress: a bar that is redrawn in place, a line for each logged step, or messages alone."""

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
        self._clock = clock
        self._remaining = RemainingTime(total_steps=total_steps)
        self._remaining.observe(time_s=clock(), step=start_step)
        self._shows_lines = mode == "lines" or (mode == "auto" and not stream.isatty())
        self._bar: tqdm | None = None
        if mode == "bar" or (mode == "auto" and stream.isatty()):
            self._bar = tqdm(
                total=total_steps,
                initial=start_step,
                file=stream,
                ncols=width,
                dynamic_ncols=width is None,
                bar_format="{percentage:3.0f}% |{bar}| {n_fmt}/{total_fmt}{postfix}",
            )

    def advance(self, step: int) -> None:
        """Set the number of committed steps. Called at every step; a bar redraws itself a few times a second at most."""
        self._remaining.observe(time_s=self._clock(), step=step)
        if self._bar is not None:
            self._bar.update(step - self._bar.n)

    def show(self, step: int, figures: Mapping[str, float]) -> None:
        """Show the figures of a logged step, after `advance` to it."""
        text = figures_text(figures, eta_s=self._remaining.estimate_s())
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=True)
        elif self._shows_lines:
            self.print_line(f"step {step:>{len(str(self._total_steps))}}/{self._total_steps}: {text}")

    def print_line(self, text: str) -> None:
        """Print a message of one or more lines above the bar; flushed, so that it passes a pipe at once."""
        tqdm.write(text, file=self._stream)
        self._stream.flush()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
