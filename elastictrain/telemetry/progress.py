"""What a person sees on the terminal: a bar with the time to go, or single lines. Rank 0 speaks for the group."""

from collections.abc import Callable
from typing import Literal, Protocol, TextIO

from tqdm import tqdm

from elastictrain.telemetry.figures import reading_text, step_line
from elastictrain.telemetry.reading import Reading
from elastictrain.telemetry.window import RemainingTime

Mode = Literal["auto", "bar", "lines", "off"]


class Progress(Protocol):
    """Shows how far the run is."""

    def advance(self, step: int) -> None:
        """`step` optimizer steps are committed. Cheap; called at every step."""

    def show(self, reading: Reading) -> None:
        """The figures of a logged step, after `advance` to it."""

    def say(self, text: str) -> None:
        """A message of one or more lines that stays on the terminal."""

    def close(self) -> None:
        """Leave the terminal in order."""


class Bar:
    """A bar that is redrawn in place."""

    def __init__(
        self, stream: TextIO, *, total_steps: int, start_step: int, clock: Callable[[], float], width: int | None = None
    ) -> None:
        self._stream = stream
        self._clock = clock
        self._remaining = RemainingTime(total_steps=total_steps)
        self._remaining.observe(time_s=clock(), step=start_step)
        self._bar = tqdm(
            total=total_steps,
            initial=start_step,
            file=stream,
            ncols=width,
            dynamic_ncols=width is None,
            bar_format="{percentage:3.0f}% |{bar}| {n_fmt}/{total_fmt}{postfix}",
        )

    def advance(self, step: int) -> None:
        """Move the bar; it redraws itself a few times a second at most."""
        self._remaining.observe(time_s=self._clock(), step=step)
        self._bar.update(step - self._bar.n)

    def show(self, reading: Reading) -> None:
        """Put the figures behind the bar."""
        self._bar.set_postfix_str(reading_text(reading, eta_s=self._remaining.estimate_s()), refresh=True)

    def say(self, text: str) -> None:
        """Print above the bar."""
        tqdm.write(text, file=self._stream)

    def close(self) -> None:
        """Draw the bar a last time and leave it."""
        self._bar.close()


class LineProgress:
    """One line for each logged step; for files and pipes."""

    def __init__(self, stream: TextIO, *, total_steps: int, start_step: int, clock: Callable[[], float]) -> None:
        self._stream = stream
        self._total_steps = total_steps
        self._clock = clock
        self._remaining = RemainingTime(total_steps=total_steps)
        self._remaining.observe(time_s=clock(), step=start_step)

    def advance(self, step: int) -> None:
        """Only note the time."""
        self._remaining.observe(time_s=self._clock(), step=step)

    def show(self, reading: Reading) -> None:
        """Write one line."""
        self.say(step_line(reading, total_steps=self._total_steps, eta_s=self._remaining.estimate_s()))

    def say(self, text: str) -> None:
        """Write the message, at once also through a pipe."""
        self._stream.write(text + "\n")
        self._stream.flush()

    def close(self) -> None:
        """Nothing is left open."""


class MessagesOnly:
    """No progress, only messages."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def advance(self, step: int) -> None:
        """Shows nothing."""

    def show(self, reading: Reading) -> None:
        """Shows nothing."""

    def say(self, text: str) -> None:
        """Write the message."""
        self._stream.write(text + "\n")
        self._stream.flush()

    def close(self) -> None:
        """Nothing is left open."""


def open_progress(mode: Mode, *, stream: TextIO, total_steps: int, start_step: int, clock: Callable[[], float]) -> Progress:
    """The progress display; `auto` draws a bar where `stream` is a terminal. `clock` is monotonic."""
    if mode == "off":
        return MessagesOnly(stream)
    if mode == "bar" or (mode == "auto" and stream.isatty()):
        return Bar(stream, total_steps=total_steps, start_step=start_step, clock=clock)
    return LineProgress(stream, total_steps=total_steps, start_step=start_step, clock=clock)
